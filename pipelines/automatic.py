"""Which pipeline ``--pipeline auto`` is.

``memory`` if all images fit, because it decodes nothing while training. Otherwise ``native``, or
``dali`` on a GPU with fewer than ``CORES_PER_GPU`` cores, because it decodes there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import DataConfig, Pipeline
from fastsiam.console import size
from fastsiam.environment import LOADING_PEAK, USABLE, free_bytes
from fastsiam.errors import BackendError
from fastsiam.kernels import library
from fastsiam.kernels.cores import own_cores

from .backends import BACKENDS, BASELINE, ENGINE
from .store import Store
from .survey import decoded_bytes

if TYPE_CHECKING:
    import torch

CORES_PER_GPU = 6
"""Cores from which on ``native`` feeds a GPU.

On the host of an H100 a pair of crops takes 1.5 ms of a core, from ImageNet's photographs (``native
crops`` in bench/results/h100/loader-imagenet.json). The GPU trains 3,019 images a second, which
keeps 4.4 cores busy, and the training process another one."""
_WHILE_LOADING = USABLE / LOADING_PEAK
"""Share of the free memory that pixels may take, so that there is enough to load them."""
_BESIDE_THE_MODEL = 0.9
"""Share of the free memory that pixels and model may take together."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A pipeline that was chosen, and why."""

    name: Pipeline
    why: str

    def __str__(self) -> str:
        """One line for people."""
        return f"pipeline {self.name}: {self.why}"


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
        device: device of the views.
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
    if device.type == "cuda" and (cores := own_cores()) < CORES_PER_GPU:
        reasons.append(f"{cores} {'core' if cores == 1 else 'cores'} for this GPU")
        if not (trouble := BACKENDS["dali"].trouble()):
            return Choice("dali", "; ".join(reasons))
        reasons.append(trouble)
    try:
        library.kernels()
    except BackendError as error:
        return Choice(BASELINE, "; ".join([*reasons, str(error)]))
    return Choice(ENGINE, "; ".join(reasons) or f"reads {store}")


def with_pipeline(data: DataConfig, store: Store, device: torch.device) -> DataConfig:
    """Replace the pipeline "auto" by one that keeps no images; see ``choose_pipeline``."""
    if data.pipeline != "auto":
        return data
    return replace(data, pipeline=choose_pipeline(store, device=device, keeps=False).name)


def _fit(
    store: Store,
    chosen: NDArray[np.int64] | None,
    device: torch.device,
    free: float | None,
    model: float | None,
) -> tuple[bool, str]:
    """Tell whether all images fit the device's memory, decoded; and say how much they take."""
    if free is None:
        free = free_bytes(device)
    beside = free / 2 if model is None else model
    budget = max(0.0, min(_WHILE_LOADING * free, _BESIDE_THE_MODEL * free - beside))
    where = "the GPU" if device.type == "cuda" else "the CPU"
    count = len(store) if chosen is None else len(chosen)
    taken, exact = decoded_bytes(store, chosen)
    if not taken:
        return False, "sizes of the images are unknown: no header of them can be read"
    take = "1 image takes" if count == 1 else f"{count:,} images take"
    text = f"{take} {'' if exact else 'about '}{size(taken)}"
    if taken > budget:
        much = f"more than the {size(budget)} that {where} has for them beside the model"
        return False, f"{text} decoded, {much}"
    return True, f"{text} of {size(budget)} on {where}"
