"""Which pipeline ``--pipeline auto`` is: the fastest that can run here and read the images.

``memory``, if all images fit, for it decodes nothing while training; on a GPU then what decodes
there; else the fastest on a CPU, by what the table of pipelines says of each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import DataConfig, Pipeline
from fastsiam.console import size
from fastsiam.errors import DataError
from fastsiam.kernels.cores import local_ranks

from .backends import BACKENDS, BASELINE, SPEEDS, Backend, how_to_convert
from .room import LOADING_PEAK, USABLE, free_bytes
from .store import Store

if TYPE_CHECKING:
    import torch

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
    """What would be faster, and how to get it; empty if nothing is known to be."""

    def __str__(self) -> str:
        """One line for people."""
        return f"pipeline {self.name}: {self.why}" + f"; faster: {self.faster}" * bool(self.faster)


def choose_pipeline(
    data: DataConfig,
    store: Store,
    *,
    device: torch.device,
    chosen: NDArray[np.int64] | None = None,
    free: float | None = None,
    model: float | None = None,
    keeps: bool = True,
) -> Choice:
    """Choose the pipeline of a data set's images.

    What is not installed, is broken or cannot read the images is passed over.

    Args:
        data: the settings, for what is suggested.
        store: the images.
        device: where the views shall lie.
        chosen: positions of the images that are wanted; all by default.
        free: bytes of the device that this rank may take; by default what is free now, shared
            equally among the ranks of this machine that are on a CPU.
        model: bytes that training needs there besides; by default half of ``free``.
        keeps: whether all images are wanted often enough to keep them decoded.
    """
    gpu = device.type == "cuda"
    order = sorted(
        (backend for backend in BACKENDS.values() if backend.real),
        key=lambda one: (not one.resident, not (gpu and one.decodes_on_gpu), -(one.cpu_speed or 0)),
    )
    reasons: list[str] = []
    better: list[Backend] = []
    for backend in order:
        if backend.resident:
            if not keeps:
                continue
            fits, reason = _fit(store, chosen, device, free, model)
            reasons.append(reason)
            if fits:
                return Choice(backend.name, reason)
            continue
        if backend.reads(store):
            if not (trouble := backend.trouble()):
                why = "; ".join(reasons) or f"the fastest here for {store}"
                return Choice(backend.name, why, _faster(better, backend, store, data, gpu))
            reasons.append(trouble)
        better.append(backend)
    raise AssertionError(f"{BASELINE} reads everything")


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


def _faster(
    better: list[Backend], chosen: Backend, store: Store, data: DataConfig, gpu: bool
) -> str:
    """Say how to get the fastest of those that were passed over for want of something."""
    for backend in better:
        if step := _how_to_use(backend, store, data):
            if gpu or not (backend.cpu_speed and chosen.cpu_speed):
                return f"{step}, {backend.name}"
            times = backend.cpu_speed / chosen.cpu_speed
            return f"{step}, {backend.name}, {times:.1f} times the images/s in {SPEEDS}"
    return ""


def _how_to_use(backend: Backend, store: Store, data: DataConfig) -> str:
    """Say what to do so that a pipeline can run here and read a store.

    Empty if nothing is to be done, or if its package takes root to install.
    """
    if backend.needs_root and not backend.installed:
        return ""
    steps = []
    if not backend.installed:
        steps.append(f"pip install 'fastsiam[{backend.extra}]'")
    if not backend.reads(store):
        steps.append(f"convert to .beton ({how_to_convert(data)})")
    return " and ".join(steps)
