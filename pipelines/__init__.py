"""From a data set to batches of two views, whatever the back-end.

    from fastsiam.pipelines import build_loader

    loader = build_loader(DataConfig(data="/data/imagenet"), batch=256, device="cuda")
    for epoch in range(100):
        for batch in loader.epoch(epoch):
            loss = model(batch.view1, batch.view2)

Every pipeline applies the parameters that ``fastsiam.augment.draw_views`` gives it to the images
that ``order.Order`` names, so they differ in speed and not in what they show.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.errors import BackendError, DataError

from .order import Order
from .store import Split, Store, open_store

if TYPE_CHECKING:  # torch is loaded with a loader: fastsiam convert does without
    import torch

    from fastsiam.batch import EvalLoader, Loader

__all__ = [
    "Order",
    "Store",
    "build_eval_loader",
    "build_loader",
    "open_store",
    "open_training_images",
]


def build_loader(
    data: DataConfig,
    augment: AugmentConfig | None = None,
    *,
    batch: int,
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Loader:
    """Open a data set's training images as a loader of two-view batches.

    Args:
        data: which images, by which pipeline, with how many workers.
        augment: ranges and probabilities; the paper's by default.
        batch: *global* batch size, in images; each rank gets ``batch // world`` of them.
        seed: decides the order and the augmentations.
        rank: this process's number.
        world: number of processes.
        device: where the views shall lie.
        dtype: floating type of the views; float32 by default.

    Raises:
        BackendError: the pipeline's package is missing.
        DataError: the data cannot be read, or holds fewer images than a batch.
        ValueError: the batch cannot be shared equally among the ranks.
    """
    import torch

    augment, device, dtype = (
        augment or AugmentConfig(),
        torch.device(device),
        dtype or torch.float32,
    )
    if data.pipeline == "synthetic":
        from .synthetic_backend import SyntheticLoader

        return SyntheticLoader(
            augment, batch=batch, seed=seed, rank=rank, world=world, device=device, dtype=dtype
        )
    store = open_training_images(data, batch=batch)
    order = Order(images=len(store), batch=batch, seed=seed, rank=rank, world=world)
    if data.pipeline == "memory":
        from .memory_backend import MemoryLoader

        return MemoryLoader(store, order, augment, workers=data.workers, device=device, dtype=dtype)
    if data.pipeline == "ffcv":
        with _needs("ffcv"):
            from .ffcv_backend import FfcvLoader

        return FfcvLoader(
            store,
            order,
            augment,
            workers=data.workers,
            prefetch=data.prefetch,
            os_cache=data.os_cache,
            device=device,
            dtype=dtype,
        )
    if data.pipeline == "dali":
        with _needs("dali"):
            from .dali_backend import DaliLoader

        return DaliLoader(
            store,
            order,
            augment,
            workers=data.workers,
            prefetch=data.prefetch,
            hw_decoder_load=data.dali_hw_decoder_load,
            device=device,
            dtype=dtype,
        )
    from .torchvision_backend import TorchvisionLoader

    return TorchvisionLoader(
        store, order, augment, workers=data.workers, device=device, dtype=dtype
    )


@contextlib.contextmanager
def _needs(package: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise BackendError(
            f"the {package} pipeline cannot be loaded ({error}); "
            f"install it with: pip install 'fastsiam[{package}]'"
        ) from error


def open_training_images(data: DataConfig, *, batch: int) -> Store:
    """Open the training images.

    Raises:
        DataError: they cannot be read, or are fewer than ``batch``.
    """
    store = open_store(data.root, "train")
    if len(store) < batch:
        raise DataError(
            f"{store.root} holds {len(store):,} {'image' if len(store) == 1 else 'images'}, "
            f"fewer than one batch of {batch:,}: add images or choose a smaller --batch"
        )
    return store


def build_eval_loader(
    data: DataConfig,
    split: Split,
    augment: AugmentConfig,
    *,
    resize: int,
    batch: int = 256,
    rank: int = 0,
    world: int = 1,
    device: torch.device | str = "cpu",
) -> EvalLoader:
    """Open one split as a loader of central crops, as kNN and linear evaluation use them.

    Args:
        data: which images, with how many workers.
        split: "train" or "val".
        augment: for the crop's side and the normalisation.
        resize: shorter side in pixels before the crop is taken.
        batch: images in a batch of this rank.
        rank: this process's number; it gets every ``world``-th part of the images.
        world: number of processes.
        device: where the images shall lie.

    Raises:
        DataError: the split is missing or cannot be read.
    """
    import torch

    from .evaluation import CentralCrops

    store = open_store(data.root, split)
    return CentralCrops(
        store,
        augment,
        resize=resize,
        batch=batch,
        workers=data.workers,
        rank=rank,
        world=world,
        device=torch.device(device),
    )
