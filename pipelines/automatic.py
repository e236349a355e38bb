"""Choice of the pipeline for ``--pipeline auto``.

``memory`` if all images fit, because it decodes nothing while training. Otherwise ``native``, or
``dali`` for a GPU with fewer than ``CORES_PER_GPU`` CPU cores, because DALI decodes on the GPU.
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
"""Fewest CPU cores with which ``native`` keeps up with a GPU.

On the host of an H100, a pair of crops of an ImageNet photograph takes 1.5 ms of one core
(``native crops`` in bench/results/h100/loader-imagenet.json). The GPU trains on 3,019 images per
second, which keeps 4.4 cores busy. The training process takes another one."""
_SHARE_WHILE_LOADING = USABLE / LOADING_PEAK
"""Share of the free memory that decoded images may take, given the peak while loading."""
_SHARE_WITH_MODEL = 0.9
"""Share of the free memory that decoded images and the model may take together."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen pipeline and the reason for it."""

    name: Pipeline
    why: str

    def __str__(self) -> str:
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
    """Choose the pipeline for a data set.

    Args:
        store: the images.
        device: device of the views.
        chosen: positions of the images to load; all by default.
        free: bytes of device memory that this rank may use; by default the memory that is free
            now. The ranks of a machine share a CPU's memory equally.
        model: bytes that training needs in addition to the images; by default half of ``free``.
        keeps: whether images are used often enough to keep them all decoded in memory.
    """
    reasons: list[str] = []
    if keeps:
        fits, reason = _fit(store, chosen, device, free, model)
        if fits:
            return Choice("memory", reason)
        reasons.append(reason)
    if device.type == "cuda" and (cores := own_cores()) < CORES_PER_GPU:
        reasons.append(f"{cores} {'core' if cores == 1 else 'cores'} for this GPU")
        if not (problem := BACKENDS["dali"].problem()):
            return Choice("dali", "; ".join(reasons))
        reasons.append(problem)
    try:
        library.kernels()
    except BackendError as error:
        return Choice(BASELINE, "; ".join([*reasons, str(error)]))
    return Choice(ENGINE, "; ".join(reasons) or f"reads {store}")


def with_pipeline(data: DataConfig, store: Store, device: torch.device) -> DataConfig:
    """Replace pipeline "auto" by one that keeps no images; see ``choose_pipeline``."""
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
    """Return whether the decoded images fit the device's memory, and how much they take."""
    if free is None:
        free = free_bytes(device)
    model_bytes = free / 2 if model is None else model
    budget = max(0.0, min(_SHARE_WHILE_LOADING * free, _SHARE_WITH_MODEL * free - model_bytes))
    processor = "the GPU" if device.type == "cuda" else "the CPU"
    count = len(store) if chosen is None else len(chosen)
    decoded_size, exact = decoded_bytes(store, chosen)
    if not decoded_size:
        return False, "image sizes are unknown: no header can be read"
    take = "1 image takes" if count == 1 else f"{count:,} images take"
    text = f"{take} {'' if exact else 'about '}{size(decoded_size)}"
    if decoded_size > budget:
        limit = f"more than the {size(budget)} that {processor} can hold besides the model"
        return False, f"{text} decoded, {limit}"
    return True, f"{text} of {size(budget)} on {processor}"
