"""Data loading: pipelines that read a data set and yield batches of augmented views.

    from fastsiam.pipelines import ViewLoader

    loader = ViewLoader("/data/imagenet", batch=256, device="cuda")
    for epoch in range(100):
        for batch in loader:
            loss = model(batch.view1, batch.view2)

Every pipeline applies the parameters from ``fastsiam.views.draws.draw_views`` to the images that
``order.Order`` selects. They differ in speed, not in what they load. ``backends`` lists them.
"""

from .bad_images import BadImages
from .builders import build_eval_loader, build_loader, open_training_images
from .order import Order
from .store import Store, open_store
from .subsets import choose, has_validation, open_split, read_list
from .view_loader import (
    ViewLoader,
    lightly_batch,
    solo_learn_batch,
    supervised_batch,
    transformers_batch,
)

__all__ = [
    "BadImages",
    "Order",
    "Store",
    "ViewLoader",
    "build_eval_loader",
    "build_loader",
    "choose",
    "has_validation",
    "lightly_batch",
    "open_split",
    "open_store",
    "open_training_images",
    "read_list",
    "solo_learn_batch",
    "supervised_batch",
    "transformers_batch",
]
