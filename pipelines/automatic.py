"""Which pipeline ``--pipeline auto`` is.

``memory`` if all images fit, because it decodes nothing while training. Otherwise ``native``, or
``dali`` on a GPU with fewer than ``CORES_PER_GPU`` cores, because it decodes there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import DataConfig, Pipeline
from fastsiam.console import size
from fastsiam.errors import BackendError, DataError
from fastsiam.kernels import library
from fastsiam.kernels.cores import local_ranks, own_cores

from .backends import BACKENDS, BASELINE
from .room import LOADING_PEAK, USABLE, free_bytes
from .store import Store

if TYPE_CHECKING:
    import torch

CORES_PER_GPU = 4
"""From so many cores on, ``native`` feeds a GPU: the engine makes 810 pairs of crops a second on a
core from ImageNet's photographs (bench/results/loader-imagenet.json, ``ffcv crops``), an H100 is
expected to train 2,000 to 2,600, and one core is left for training."""
_SAMPLE = 256
"""Images whose headers are read where nothing else tells their sizes."""
_SAMPLE_GROUPS = 8
"""Pieces of a source that a sample comes from, where a piece is read as a whole."""
_MARGIN = 1.25
"""By so much the other images may be larger than those of a sample."""
_WHILE_LOADING = USABLE / LOADING_PEAK
"""Share of the free memory that pixels may take, so that there is enough to load them."""
_BESIDE_THE_MODEL = 0.9
"""Share of the free memory that pixels and model may take together."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A pipeline that was chosen, and why."""

    name: Pipeline
    why: str
    faster: str = ""
    """How to get what is faster; empty if nothing is known to be."""

    def __str__(self) -> str:
        """One line for people."""
        return f"pipeline {self.name}: {self.why}" + f"; faster: {self.faster}" * bool(self.faster)


def choose_pipeline(
    store: Store,
    *,
    device: torch.device,
    chosen: NDArray[np.int64] | None = None,
    free: float | None = None,
    model: float | None = None,
    keeps: bool = True,
) -> Choice:
    """Choose the pipeline of a data set's images.

    Args:
        store: the images.
        device: where the views shall lie.
        chosen: positions of the images that are wanted; all by default.
        free: bytes of the device that this rank may take; by default what is free now, shared
            equally among the ranks of this machine that are on a CPU.
        model: bytes that training needs there besides; by default half of ``free``.
        keeps: whether all images are wanted often enough to keep them decoded.
    """
    reasons: list[str] = []
    if keeps:
        fits, reason = _fit(store, chosen, device, free, model)
        if fits:
            return Choice("memory", reason)
        reasons.append(reason)
    faster = ""
    if device.type == "cuda" and (cores := own_cores()) < CORES_PER_GPU:
        reasons.append(f"{cores} {'core' if cores == 1 else 'cores'} for this GPU")
        dali = BACKENDS["dali"]
        if not (trouble := dali.trouble()):
            return Choice("dali", "; ".join(reasons))
        reasons.append(trouble)
        faster = "" if dali.installed else "pip install 'fastsiam[dali]'"
    try:
        library.kernels()
    except BackendError as error:
        return Choice(BASELINE, "; ".join([*reasons, str(error)]))
    return Choice("native", "; ".join(reasons) or f"reads {store}", faster)


def settled(data: DataConfig, name: str) -> DataConfig:
    """Write down the name of the pipeline that was chosen."""
    return replace(data, pipeline=cast(Pipeline, name))


def works_on(store: Store, name: Pipeline) -> bool:
    """Tell whether a pipeline can run here and read a store."""
    return BACKENDS[name].reads(store) and not BACKENDS[name].trouble()


def decoded_bytes(store: Store, chosen: NDArray[np.int64] | None = None) -> tuple[int, bool]:
    """Return how many bytes the decoded images take, and whether that is known exactly.

    By the sizes that the store knows; else by the headers of all images, if they are few, or of a
    sample, with a margin. Images that cannot be read count nothing.
    """
    wanted = np.arange(len(store)) if chosen is None else chosen
    if (size := store.dimensions()) is not None:
        return 3 * int(size[wanted].prod(1).sum()), True
    sample = _sample(store, wanted)
    found: list[int] = []
    for index in sample.tolist():
        try:
            own = store.header(index, store.read(index))
        except DataError:
            continue
        found.append(3 * own.height * own.width)
    if len(sample) == len(wanted):
        return sum(found), True
    if not found:
        return 2**63, False
    return int(len(wanted) * np.mean(found) * _MARGIN), False


def _sample(store: Store, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Choose images from all over a data set; from few pieces, where a piece is read as a whole."""
    if len(wanted) <= _SAMPLE:
        return wanted
    if store.groups is None:
        return wanted[_evenly(len(wanted), _SAMPLE)]
    groups = store.groups[wanted]
    known = np.unique(groups)
    each = _SAMPLE // _SAMPLE_GROUPS
    few = known[_evenly(len(known), _SAMPLE_GROUPS)]
    return np.concatenate([wanted[groups == group][:each] for group in few])


def _evenly(count: int, most: int) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, count - 1, most).astype(np.int64))


def _fit(
    store: Store,
    chosen: NDArray[np.int64] | None,
    device: torch.device,
    free: float | None,
    model: float | None,
) -> tuple[bool, str]:
    """Tell whether all images fit the device's memory, decoded; and say how much they take."""
    if free is None:
        free = free_bytes(device) / (1 if device.type == "cuda" else local_ranks())
    beside = free / 2 if model is None else model
    room = max(0.0, min(_WHILE_LOADING * free, _BESIDE_THE_MODEL * free - beside))
    count = len(store) if chosen is None else len(chosen)
    where = "the GPU" if device.type == "cuda" else "the CPU"
    if store.groups is not None and store.dimensions() is None:
        # Before pieces are read for a sample: pixels take more bytes than an encoded image.
        sizes = store.sizes()
        if (encoded := int((sizes if chosen is None else sizes[chosen]).sum())) > room:
            return False, (
                f"{count:,} images take {size(encoded)} encoded already, more than the "
                f"{size(room)} that {where} has for them"
            )
    taken, exact = decoded_bytes(store, chosen)
    about = "" if exact else "about "
    if taken <= room:
        return True, f"{count:,} images take {about}{size(taken)} of {size(room)} on {where}"
    return False, (
        f"{count:,} images take {about}{size(taken)} decoded, more than the {size(room)} that "
        f"{where} has for them"
    )
