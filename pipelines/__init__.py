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
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.errors import BackendError, DataError

from .order import Order
from .store import Split, Store, open_store
from .store.beton import BetonStore

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
        with _importing("ffcv"):
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
        with _importing("dali"):
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


def open_training_images(data: DataConfig, *, batch: int) -> Store:
    """Open the training images, and check that the pipeline can run and read them.

    Raises:
        BackendError: the pipeline's package is missing.
        DataError: they cannot be read, at all or by this pipeline, or are fewer than ``batch``.
    """
    if data.pipeline in _PACKAGES and _is_missing(_PACKAGES[data.pipeline]):
        raise BackendError(_how_to_install(data.pipeline, "it is not installed"))
    store = open_store(data.root, "train")
    if data.pipeline == "ffcv" and not isinstance(store, BetonStore):
        raise DataError(
            f"--pipeline ffcv reads one .beton file, and {store} is none: make it with "
            f"fastsiam convert folder --source {data.root} --out DIR and train with --data DIR, "
            "or choose --pipeline dali"
        )
    if len(store) < batch:
        raise DataError(
            f"{store.root} holds {len(store):,} {'image' if len(store) == 1 else 'images'}, "
            f"fewer than one batch of {batch:,}: add images or choose a smaller --batch"
        )
    return store


_PACKAGES = {"ffcv": "ffcv", "dali": "nvidia.dali"}


def _is_missing(module: str) -> bool:
    try:
        return find_spec(module) is None
    except ModuleNotFoundError:  # the package that it is part of
        return True


def _how_to_install(pipeline: str, reason: object) -> str:
    also = " or, with CUDA 13, 'fastsiam[dali13]'" if pipeline == "dali" else ""
    return (
        f"the {pipeline} pipeline cannot be loaded ({reason}); "
        f"install it with: pip install 'fastsiam[{pipeline}]'{also}"
    )


@contextlib.contextmanager
def _importing(pipeline: str) -> Iterator[None]:
    """Say what to do where a package is there, but broken: a library that it needs, say."""
    try:
        yield
    except ImportError as error:
        raise BackendError(_how_to_install(pipeline, error)) from error


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
