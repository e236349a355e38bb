"""Speed of the photometric stage, compared with its reference and one pass over the bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from fastsiam.bench.measurements import Record, Row
from fastsiam.bench.runner import Task, compare
from fastsiam.bench.session import Session
from fastsiam.config import AugmentConfig
from fastsiam.views.draws import ViewParams, draw_views
from fastsiam.views.photometric import photometric, reference

_ON_GPU = 51200
"""Images per repeat on a GPU, which processes them in a tenth of a second."""
REFERENCE = "reference, in torch operations"
ONCE = "one pass over the bytes"


def measure(session: Session) -> list[Record]:
    """Measure the stage, its reference and one pass on the same crops, in one process."""
    return measure_stage(
        session,
        "photometric",
        build_photometric,
        baseline=("reference", REFERENCE),
        once=ONCE,
        on_gpu=_ON_GPU,
        in_the_clock="uint8 crops on the device to normalised float32 views (GPU: bfloat16)",
    )


def measure_stage(
    session: Session,
    case: str,
    build: Callable[..., Mapping[str, Task]],
    *,
    baseline: tuple[str, str],
    once: str,
    on_gpu: int,
    in_the_clock: str,
) -> list[Record]:
    """Measure a stage between decoding and the model, in one process.

    ``baseline`` is as in ``Row``, ``once`` the task that only touches the bytes, and ``on_gpu`` the
    number of images per repeat on a GPU.
    """
    batch = session.loaded_batch
    build = partial(
        build,
        augment=session.config.augment,
        batch=batch,
        batches=max(1, on_gpu // batch) if session.gpu else 2,
        device=session.device,
    )
    rows = (
        Row(
            case=case,
            name=name,
            runner=case,
            build=build,
            baseline=baseline,
            ceiling=("one pass", [once]),
            in_the_clock=in_the_clock,
            config=session.settings(batch=batch),
        )
        for name in ("fastsiam", baseline[1], once)
    )
    return compare(session, rows)


def build_photometric(
    *, augment: AugmentConfig, batch: int, batches: int, device: str
) -> dict[str, Task]:
    """Build tasks on uint8 crops: the photometric stage, its reference, and a plain conversion."""
    crops = tuple(
        torch.randint(0, 256, (len(views), batch, side, side, 3), dtype=torch.uint8, device=device)
        for side, views in augment.by_side.items()
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    params = draws(augment, batches, np.full((batch, 2), 400))
    copies = [torch.empty_like(of_side, dtype=dtype) for of_side in crops]
    reference_images = min(batch, 256 if device == "cuda" else 8)  # it is slow
    reference_params, reference_crops = (
        params[0].rows(slice(0, reference_images)),
        tuple(of_side[:, :reference_images] for of_side in crops),
    )

    def run_reference() -> None:
        reference.photometric(reference_crops, reference_params, augment, dtype=dtype)

    def touch(_: ViewParams) -> None:
        for copy, of_side in zip(copies, crops, strict=True):
            copy.copy_(of_side)

    return {
        "fastsiam": for_each(params, lambda p: photometric(crops, p, augment, dtype=dtype)),
        REFERENCE: Task(run_reference, reference_images, before=run_reference),
        ONCE: for_each(params, touch),
    }


def draws(augment: AugmentConfig, batches: int, size: NDArray[np.int64]) -> list[ViewParams]:
    """Draw view parameters for batches of images whose sizes are (N, 2), height and width."""
    index = np.arange(len(size))
    return [draw_views(augment, seed=0, epoch=i, index=index, size=size) for i in range(batches)]


def for_each(batches: Sequence[ViewParams], one: Callable[[ViewParams], object]) -> Task:
    """Return a task that calls ``one`` with the parameters of each batch."""

    def run() -> None:
        for params in batches:
            one(params)  # its result is freed before the next call

    images = sum(params.flip.shape[1] for params in batches)
    return Task(run, images, before=lambda: one(batches[0]))
