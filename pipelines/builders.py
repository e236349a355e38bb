"""Opening a data set as a loader of batches, for training and for evaluation."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
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
from .store import Split, Store
from .subsets import open_split, open_training

if TYPE_CHECKING:  # torch is imported when a loader opens, not by fastsiam convert
    import torch

    from fastsiam.views.batch import EvalLoader, Loader

    from .loaders import CropTransform

log = logging.getLogger(__name__)


def build_loader(
    data: DataConfig | Path | str,
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
        data: the images, the pipeline and the number of workers, or only the path or address of
            the images. With pipeline ``auto``, each process chooses one; see ``automatic``.
        augment: ranges and probabilities of the augmentations; the SimSiam paper's by default.
        batch: *global* batch size, in images; each rank gets ``batch // world`` of them.
        seed: seed of the order and of the augmentations.
        rank: rank of this process.
        world: number of ranks.
        device: device of the views.
        dtype: floating type of the views; float32 by default.
        chosen: ascending positions of the images to train on, as returned by ``choose`` and
            ``read_list``; all by default.
        store: the training images, if they are already open; by default they are opened here.
        bad: known bad images, which other images replace. By default the loader collects its own
            if ``data.bad_images`` is "replace".
        shuffle: how epochs are shuffled; by default derived from ``data`` and the current files.
        crop_transform: function that is called with the uint8 crops of each batch on the device,
            one tensor (V, N, S, S, 3) for each view size. It returns tensors of the same shapes,
            dtype and device, to which the colour operations are then applied. Later batches
            overwrite the crops, so clone what you keep. ``torchvision`` and ``synthetic`` do not
            support it.

    Raises:
        BackendError: the pipeline's package is missing.
        DataError: the data cannot be read, or has fewer images than a batch.
        ValueError: ``batch`` is not divisible by ``world``, ``rank`` is out of range, ``chosen`` is
            not ascending, ``dtype`` is not a floating type of two bytes or more, or the pipeline
            does not support ``crop_transform``.
    """
    from .loaders import LoaderSpec

    data, augment = DataConfig.of(data), augment or AugmentConfig()
    dtype, device = _view_type(dtype), _with_index(device)
    chosen = None if chosen is None else np.asarray(chosen)
    images = NOISE_IMAGES if chosen is None else len(chosen)
    if data.loads_images:
        store = open_training_images(data, batch=batch, chosen=chosen, store=store)
        if data.pipeline == "auto":
            choice = choose_pipeline(store, device=device, chosen=chosen)
            log.info(choice)
            data = replace(data, pipeline=choice.name)
        positions = _positions(store, chosen)
        chosen, images = None if chosen is None else positions, len(positions)
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


def _view_type(dtype: torch.dtype | None) -> torch.dtype:
    """Return the type of views, float32 by default.

    Raises:
        ValueError: it is not a floating type of two bytes or more.
    """
    import torch

    dtype = dtype or torch.float32
    is_dtype = isinstance(dtype, torch.dtype)  # not a name such as "bfloat16"
    if not is_dtype or not dtype.is_floating_point or dtype.itemsize == 1:
        raise ValueError(
            "dtype must be a floating type of two bytes or more, such as torch.bfloat16, "
            f"not {dtype!r}"
        )
    return dtype


def _with_index(device: torch.device | str) -> torch.device:
    """Return the device with an index, because plain "cuda" depends on the calling thread.

    Raises:
        ValueError: the device is neither a CPU nor a CUDA GPU.
    """
    import torch

    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, not {device}; move the batches to it")
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
        data: the images and the pipeline.
        batch: global batch size, in images.
        chosen: positions of the images to train on; all by default.
        store: the images, if they are already open.

    Raises:
        BackendError: the pipeline's package is missing.
        DataError: the pipeline cannot read the images, or there are fewer than ``batch``.
        ValueError: ``chosen`` is not ascending.
    """
    backend = None if data.pipeline == "auto" else backend_of(data)
    if backend:
        backend.check()
    if store is None:
        store = open_training(data).split("train")
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
    """Check and return ``chosen``; by default return all positions."""
    if chosen is None:
        return np.arange(len(store))
    chosen = np.asarray(chosen)
    positions = chosen.astype(np.int64)
    if (
        chosen.ndim != 1
        or chosen.dtype.kind not in "iu"
        or not (np.diff(positions, prepend=-1, append=len(store)) > 0).all()
    ):
        raise ValueError(
            f"chosen must be ascending positions among {len(store):,} images, in one dimension"
        )
    return positions


def build_eval_loader(
    data: DataConfig | Path | str,
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
    store: Store | None = None,
) -> EvalLoader:
    """Open one split as a loader of central crops, for kNN and linear evaluation.

    The crops are those of torchvision's ``Resize(resize)`` and ``CenterCrop`` on PIL images. With
    pipeline ``dali`` on a GPU, DALI makes them if installed; else the engine does, bit-identical.

    Args:
        data: the images, the pipeline and the number of workers, or only the path or address of
            the images.
        split: "train" or "val". With ``data.holdout``, "val" is the holdout set.
        augment: size of the crops, and their normalisation.
        resize: shorter side in pixels before the crop is taken.
        batch: images in a batch of this rank.
        rank: rank of this process, which gets a ``1 / world`` share of the images.
        world: number of ranks.
        in_turn: whether ranks take batches in turn; otherwise each takes one contiguous part.
        device: device of the images.
        dtype: floating type of the images; float32 by default.
        chosen: ascending positions of the images to load; all by default.
        store: the images of the split, if they are already open; by default they are opened here.

    Raises:
        BackendError: fastsiam's kernels are missing and cannot be compiled.
        DataError: the split is missing or cannot be read, or, without ``in_turn``, has fewer
            images than there are ranks.
        ValueError: ``chosen`` is not ascending, ``batch`` is not positive, ``rank`` is out of
            range, or ``dtype`` is not a floating type of two bytes or more.
    """
    from .central import CentralCrops

    data, dtype = DataConfig.of(data), _view_type(dtype)
    if batch < 1 or not 0 <= rank < world:
        raise ValueError(f"batch must be positive and rank below {world}, not {batch} and {rank}")
    store, device = open_split(data, split) if store is None else store, _with_index(device)
    chosen = _positions(store, chosen)
    if not in_turn and len(chosen) < world:
        raise DataError(
            f"{store} has {len(chosen)} {split} images, too few for {world} processes: run with "
            "fewer GPUs, or evaluate on more images"
        )
    positions = chosen if in_turn else np.array_split(chosen, world)[rank]
    batches = [positions[i : i + batch] for i in range(0, len(positions), batch)]
    data = with_pipeline(data, store, device)
    return CentralCrops(
        store,
        backend_of(data).central_crops(data, store, resize, augment.crop, device),
        augment,
        chosen=chosen,
        batches=batches[rank::world] if in_turn else batches,
        device=device,
        dtype=dtype,
        skips_bad=data.bad_images == "replace",
    )
