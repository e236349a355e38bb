"""From a data set to batches of views, by one of several pipelines.

    from fastsiam.pipelines import ViewLoader

    loader = ViewLoader("/data/imagenet", batch=256, device="cuda")
    for epoch in range(100):
        for batch in loader:
            loss = model(batch.view1, batch.view2)

Every pipeline applies the parameters from ``fastsiam.views.draws.draw_views`` to the images that
``order.Order`` names, so they differ in speed, not in what they show. ``backends`` lists them.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.errors import DataError

from .automatic import choose_pipeline, with_pipeline
from .backends import NOISE_IMAGES, backend_of
from .bad_images import BadImages
from .order import Order
from .shuffle import Mixture, Window, shuffle_of
from .store import Split, Store, open_store, picked
from .subsets import choose, has_validation, open_split, open_training, read_list
from .view_loader import (
    ViewLoader,
    lightly_batch,
    solo_learn_batch,
    supervised_batch,
    transformers_batch,
)

if TYPE_CHECKING:  # torch is loaded with a loader: fastsiam convert does without
    import torch

    from fastsiam.views.batch import EvalLoader, Loader

    from .loaders import CropTransform

log = logging.getLogger(__name__)

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
    chosen: NDArray[np.int64] | None = None,
    store: Store | None = None,
    bad: BadImages | None = None,
    shuffle: Window | Mixture | None = None,
    crop_transform: CropTransform | None = None,
) -> Loader:
    """Open a data set's training images as a loader of batches of views.

    Args:
        data: which images, by which pipeline, with how many workers. Each process chooses what the
            pipeline ``auto`` is: see ``automatic``.
        augment: ranges and probabilities; the paper's by default.
        batch: *global* batch size, in images; each rank gets ``batch // world`` of them.
        seed: decides the order and the augmentations.
        rank: this process's number.
        world: number of processes.
        device: device of the views.
        dtype: floating type of the views; float32 by default.
        chosen: ascending positions of the images to train on, as ``choose`` and ``read_list``
            return them; all by default.
        store: the training images, if they are open already; opened by default.
        bad: the bad images that are known, which others replace; by default those that this loader
            finds, if ``data.bad_images`` says so.
        shuffle: shuffles the images; by default as ``data`` says, by how the images lie now.
        crop_transform: is called with the uint8 crops of each batch on the device, one tensor
            (V, N, S, S, 3) for each side of the views, and returns tensors like them, on which the
            colour operations then work. Later batches overwrite the crops: clone what you keep. The
            pipelines ``torchvision`` and ``synthetic`` have none.

    Raises:
        BackendError: the pipeline's package is missing.
        DataError: the data cannot be read, or holds fewer images than a batch.
        ValueError: the batch cannot be shared equally among the ranks, ``rank`` is not one of them,
            ``chosen`` is not ascending, ``dtype`` is not a floating type of two bytes or more, or
            the pipeline has no crops that ``crop_transform`` could change.
    """
    import torch

    from .loaders import LoaderSpec

    augment, dtype = augment or AugmentConfig(), dtype or torch.float32
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise ValueError(f"views are of a floating type of two bytes or more, not {dtype}")
    device = _with_index(device)
    chosen = None if chosen is None else np.asarray(chosen)
    images = NOISE_IMAGES if chosen is None else len(chosen)
    if data.loads_images:
        store = open_training_images(data, batch=batch, chosen=chosen, store=store)
        if data.pipeline == "auto":
            choice = choose_pipeline(store, device=device, chosen=chosen)
            log.info(choice)
            data = replace(data, pipeline=choice.name)
        positions = _positions(store, chosen)
        images = len(positions)
        shuffle = shuffle or shuffle_of(
            data,
            sets=None if store.sets is None else store.sets[positions],
            blocks=store.blocks()[positions] if data.window else None,
        )
    if bad is None and data.bad_images == "replace":
        bad = BadImages(images)
    order = Order(
        images=images,
        batch=batch,
        seed=seed,
        rank=rank,
        world=world,
        chosen=chosen,
        bad=bad,
        shuffle=shuffle,
    )
    spec = LoaderSpec(data, store, order, augment, device, dtype, crop_transform)
    return backend_of(data).open(spec)


def _with_index(device: torch.device | str) -> torch.device:
    """Return the device; "cuda" is this thread's current GPU, and would be another thread's own.

    Raises:
        ValueError: images cannot be loaded to such a device.
    """
    import torch

    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"images are loaded to cpu or cuda, not to {device}: move them there")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def open_training_images(
    data: DataConfig,
    *,
    batch: int,
    chosen: NDArray[np.int64] | None = None,
    store: Store | None = None,
) -> Store:
    """Open the training images, and check that the pipeline can run and read them.

    Args:
        data: which images, by which pipeline.
        batch: global batch size, in images.
        chosen: positions of the images to train on; all by default.
        store: the images, if they are open already.

    Raises:
        BackendError: the pipeline's package is missing.
        DataError: the pipeline cannot read the images, or they are fewer than ``batch``.
        ValueError: ``chosen`` holds no ascending positions.
    """
    backend = None if data.pipeline == "auto" else backend_of(data)
    if backend:
        backend.check()
    if store is None:
        whole, kept, _ = open_training(data)
        store = picked(whole, kept)
    if backend:
        backend.check(store)
    images = len(_positions(store, chosen))
    if images < batch:
        part = "" if chosen is None else "the chosen part of "
        raise DataError(
            f"{part}{store.root} holds {images:,} {'image' if images == 1 else 'images'}, "
            f"fewer than one batch of {batch:,}: add images or choose a smaller --batch"
        )
    return store


def _positions(store: Store, chosen: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Return the positions of the chosen images, or of all."""
    if chosen is None:
        return np.arange(len(store))
    chosen = np.asarray(chosen)
    if not (np.diff(chosen, prepend=-1, append=len(store)) > 0).all():
        raise ValueError(f"chosen must be ascending positions among {len(store):,} images")
    return chosen


def build_eval_loader(
    data: DataConfig,
    split: Split,
    augment: AugmentConfig,
    *,
    resize: int,
    batch: int = 256,
    rank: int = 0,
    world: int = 1,
    in_turn: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    chosen: NDArray[np.int64] | None = None,
) -> EvalLoader:
    """Open one split as a loader of central crops, as kNN and linear evaluation use them.

    The crops are those of torchvision's ``Resize(resize)`` and ``CenterCrop`` on PIL images. DALI
    makes them if ``dali`` is chosen on a GPU and installed; else the engine does, to the last bit.

    Args:
        data: which images, by which pipeline, with how many workers.
        split: "train" or "val"; the latter are the images that ``data.holdout`` holds out, if any.
        augment: for the crop's side and the normalisation.
        resize: shorter side in pixels before the crop is taken.
        batch: images in a batch of this rank.
        rank: this process's number; it gets every ``world``-th part of the images.
        world: number of processes.
        in_turn: whether the processes take batches in turn; else each takes one contiguous part.
        device: device of the images.
        dtype: floating type of the images; float32 by default.
        chosen: ascending positions of the images to show; all by default.

    Raises:
        BackendError: fastsiam's kernels are missing and cannot be compiled.
        DataError: the split is missing or cannot be read, or has fewer images than there are
            processes, each of which takes a part.
        ValueError: ``chosen`` is not ascending.
    """
    import torch

    from .central import CentralCrops

    store, device = open_split(data, split), _with_index(device)
    chosen = _positions(store, chosen)
    if not in_turn and len(chosen) < world:
        raise DataError(
            f"{store} has too few {split} images for {world} processes, {len(chosen)}: run with "
            "fewer GPUs, or evaluate on more images"
        )
    own = chosen if in_turn else np.array_split(chosen, world)[rank]
    batches = [own[i : i + batch] for i in range(0, len(own), batch)]
    data = with_pipeline(data, store, device)
    return CentralCrops(
        store,
        backend_of(data).central_crops(data, store, resize, augment.crop, device),
        augment,
        chosen=chosen,
        batches=batches[rank::world] if in_turn else batches,
        device=device,
        dtype=dtype or torch.float32,
        skips_bad=data.bad_images == "replace",
    )
