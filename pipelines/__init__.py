"""From a data set to batches of two views, whatever the back-end.

    from fastsiam.pipelines import build_loader

    loader = build_loader(DataConfig(data="/data/imagenet"), batch=256, device="cuda")
    for epoch in range(100):
        for batch in loader.epoch(epoch):
            loss = model(batch.view1, batch.view2)

Every pipeline applies the parameters that ``fastsiam.views.draws.draw_views`` gives it to the
images that ``order.Order`` names, so they differ in speed and not in what they show.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.errors import BackendError, DataError

from .order import Order
from .store import Split, Store, open_store
from .store.beton import BetonStore
from .subsets import choose, read_list

if TYPE_CHECKING:  # torch is loaded with a loader: fastsiam convert does without
    import torch

    from fastsiam.views.batch import EvalLoader, Loader

    from .evaluation import Crops

log = logging.getLogger(__name__)

__all__ = [
    "Order",
    "Store",
    "build_eval_loader",
    "build_loader",
    "choose",
    "open_store",
    "open_training_images",
    "read_list",
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
        chosen: positions in the data set, ascending, of the images to train on, as
            ``choose`` and ``read_list`` return them; all by default.

    Raises:
        BackendError: the pipeline's package is missing.
        DataError: the data cannot be read, or holds fewer images than a batch.
        ValueError: the batch cannot be shared equally among the ranks, or ``chosen`` is no
            ascending list of positions.
    """
    import torch

    augment, device, dtype = (
        augment or AugmentConfig(),
        torch.device(device),
        dtype or torch.float32,
    )
    if data.pipeline == "synthetic":
        from .synthetic_backend import IMAGES, SyntheticLoader

        return SyntheticLoader(
            augment,
            batch=batch,
            seed=seed,
            rank=rank,
            world=world,
            device=device,
            dtype=dtype,
            images=IMAGES if chosen is None else len(chosen),
        )
    store = open_training_images(data, batch=batch, chosen=chosen)
    images = len(store) if chosen is None else len(chosen)
    order = Order(images=images, batch=batch, seed=seed, rank=rank, world=world, chosen=chosen)
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


def open_training_images(
    data: DataConfig, *, batch: int, chosen: NDArray[np.int64] | None = None
) -> Store:
    """Open the training images, and check that the pipeline can run and read them.

    Raises:
        BackendError: the pipeline's package is missing.
        DataError: they cannot be read, at all or by this pipeline, or are fewer than ``batch``, or
            of the ``chosen`` there are fewer.
        ValueError: ``chosen`` is no ascending list of positions.
    """
    if _lacks_package(data):
        raise BackendError(_how_to_install(data.pipeline, "it is not installed"))
    store = open_store(data.root, "train")
    if data.pipeline == "ffcv" and not isinstance(store, BetonStore):
        raise DataError(
            f"--pipeline ffcv reads one .beton file, and {store} is none: make it with "
            f"fastsiam convert folder --source {data.root} --out DIR and train with --data DIR, "
            "or choose --pipeline dali"
        )
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
    if not (np.diff(chosen, prepend=-1, append=len(store)) > 0).all():
        raise ValueError(f"chosen must be ascending positions among {len(store):,} images")
    return chosen


_PACKAGES = {"ffcv": "ffcv", "dali": "nvidia.dali"}


def _lacks_package(data: DataConfig) -> bool:
    try:
        return data.pipeline in _PACKAGES and find_spec(_PACKAGES[data.pipeline]) is None
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
    dtype: torch.dtype | None = None,
    chosen: NDArray[np.int64] | None = None,
) -> EvalLoader:
    """Open one split as a loader of central crops, as kNN and linear evaluation use them.

    The crops are those of torchvision's ``Resize(resize)`` and ``CenterCrop`` on PIL images, to the
    last bit where they are made on the CPU. Two pipelines have a fast way to them: ``ffcv`` from a
    .beton file, ``dali`` from anything. The rest is left to PIL, also where their package is not
    installed: a run can be evaluated on another machine than it was made on.

    Args:
        data: which images, by which pipeline, with how many workers.
        split: "train" or "val".
        augment: for the crop's side and the normalisation.
        resize: shorter side in pixels before the crop is taken.
        batch: images in a batch of this rank.
        rank: this process's number; it gets every ``world``-th part of the images.
        world: number of processes.
        device: where the images shall lie.
        dtype: floating type of the images; float32 by default.
        chosen: positions in the data set, ascending, of the images to show; all by default.

    Raises:
        BackendError: the pipeline's package is there, but cannot be loaded.
        DataError: the split is missing or cannot be read.
        ValueError: ``chosen`` is no ascending list of positions.
    """
    import torch

    from .evaluation import CentralCrops

    store, device = open_store(data.root, split), torch.device(device)
    return CentralCrops(
        store,
        _central_crops(data, store, resize, augment.crop, device),
        augment,
        chosen=_positions(store, chosen),
        batch=batch,
        rank=rank,
        world=world,
        device=device,
        dtype=dtype or torch.float32,
    )


def _central_crops(
    data: DataConfig, store: Store, resize: int, side: int, device: torch.device
) -> Crops:
    """Return what makes central crops of a store, by the pipeline if it can."""
    lacking = _lacks_package(data)
    if lacking:
        log.warning(
            f"{data.pipeline} is not installed here: PIL makes the central crops, which is slower"
        )
    if data.pipeline == "ffcv" and isinstance(store, BetonStore) and not lacking:
        with _importing("ffcv"):
            from . import ffcv_backend

        return partial(
            ffcv_backend.central_crops,
            store,
            resize=resize,
            side=side,
            workers=data.workers,
            prefetch=data.prefetch,
            device=device,
        )
    if data.pipeline == "dali" and not lacking:
        with _importing("dali"):
            from . import dali_backend

            return partial(
                dali_backend.central_crops,
                store,
                resize=resize,
                side=side,
                workers=data.workers,
                prefetch=data.prefetch,
                hw_decoder_load=data.dali_hw_decoder_load,
                device=device,
            )
    from .evaluation import central_crops

    return partial(
        central_crops, store, resize=resize, side=side, workers=data.workers, device=device
    )
