"""End-to-end training speed with each pipeline, compared with ready tensors, the ceiling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count, islice
from statistics import mean
from typing import TYPE_CHECKING, Any

from fastsiam.bench.cases.step import step_of, steps_in_time, training_setup
from fastsiam.bench.config import ORIGINAL, with_form
from fastsiam.bench.measure import wait_for_gpu
from fastsiam.bench.measurements import Record, Row
from fastsiam.bench.runner import Task, compare
from fastsiam.config import DataConfig, TrainConfig
from fastsiam.pipelines.backends import BASELINE, CEILING, backend_of
from fastsiam.pipelines.workers import count as count_workers
from fastsiam.train.clock import Clock
from fastsiam.views.batch import Batch

if TYPE_CHECKING:  # not imported in the processes that are measured
    from fastsiam.bench.session import Session

_WARM = 2
"""Minimum steps before the clock starts on a GPU: they reallocate the memory that was released."""
_AHEAD = 6
"""Maximum batches that pipelines other than torchvision's prefetch."""
_STEADY = 12
"""Minimum steps to time on a GPU if nothing is prefetched."""


def measure(session: Session) -> list[Record]:
    """Measure each pipeline on each form of the images that it reads."""
    batch = session.trained_batch
    may_be_short = session.config.images or not session.gpu
    least = 4 if may_be_short else 2 * batches_ahead(DataConfig(workers=session.workers))
    images = session.images(batch, at_least=least)
    config = session.train_config(batch)

    def row(name: str, data: DataConfig) -> Row:
        return Row(
            case="train",
            name=name,
            build=partial(build_training, config=replace(config, data=data)),
            torchvision=BASELINE,
            ceiling=("ready tensors", [CEILING]),
            pipeline=data.pipeline,
            in_the_clock="steps in the middle of an epoch: waiting for the batch, forward, "
            "backward, optimizer",
            config=session.settings(images, batch=batch, backbone=config.model.backbone),
        )

    rows = [row(CEILING, DataConfig(pipeline=CEILING))]
    for pipeline in session.config.pipeline_names:
        for form in session.forms(pipeline) or [ORIGINAL]:
            rows.append(row(with_form(pipeline, form), session.data(images, pipeline, form)))
    return compare(session, rows)


def build_training(*, config: TrainConfig) -> Task:
    """Build a model and a loader; the task runs some steps in the middle of an epoch."""
    setup = training_setup(config)
    stepper, epochs = step_of(setup), map(setup.loader.epoch, count())
    for batch in islice(next(epochs), 2):
        stepper.take(batch)
    timed_steps = steps_in_time(partial(stepper.take, batch), setup.place)
    on_gpu = setup.place.device.type == "cuda"
    warm, steps = window(timed_steps, setup.loader.steps, setup.config.data, whole=on_gpu)
    feed: Iterator[Batch] = iter(())
    clock, waits = Clock(device=setup.place.device), list[float]()

    def before() -> None:
        nonlocal feed
        feed = next(epochs)
        for batch in islice(feed, warm):
            stepper.take(batch)
        wait_for_gpu()

    def run() -> None:
        clock.resume()
        for batch in clock.over(islice(feed, steps)):
            stepper.take(batch)
        wait_for_gpu()
        clock.pause()
        waits.append(clock.read(setup.config.optim.batch)["data_wait"])

    def facts() -> dict[str, Any]:
        wait = mean(waits[1:])  # without the first run, the warm-up
        return setup.facts | {"data_wait": wait, "steps": steps, "settings": stepper.settings}

    return Task(run, steps * config.optim.batch, facts, before)


def batches_ahead(data: DataConfig) -> int:
    """Return the maximum number of batches that a pipeline prefetches: torchvision 2 per process.

    "auto" may choose torchvision.
    """
    is_baseline = data.pipeline in (BASELINE, "auto")
    return max(_AHEAD, 2 * count_workers(data.workers)) if is_baseline else _AHEAD


def window(wanted: int, there: int, data: DataConfig, *, whole: bool) -> tuple[int, int]:
    """Return how many steps of an epoch come before the clock starts, and how many are timed.

    An epoch begins with prefetched batches, which are ready at once. They do not show how fast
    later batches arrive, which matters if a loader can be slower than a step.

    Args:
        wanted: number of steps that take long enough to be timed.
        there: number of steps in the epoch.
        data: has the pipeline and its number of workers.
        whole: time steps to the end of the epoch, so that no runner loads during another's turn.
    """
    makes_ahead = data.loads_images and not backend_of(data).resident
    ahead = batches_ahead(data) if makes_ahead else 0
    if whole:
        warm = min(max(ahead, _WARM), there // 2)
        return warm, there - warm if ahead else min(max(wanted, _STEADY), there - warm)
    warm = min(ahead, wanted, there // 2)
    return warm, min(wanted, there - warm)
