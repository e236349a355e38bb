"""The training step: alone on ready tensors, which is the ceiling, and fed by each pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fastsiam import distributed
from fastsiam.bench import roofline
from fastsiam.bench.contest import Work
from fastsiam.bench.loading import data_of
from fastsiam.bench.machine import build_machine, rates
from fastsiam.bench.measure import Sample, Timing
from fastsiam.bench.records import Record, record
from fastsiam.bench.session import Session
from fastsiam.config import DataConfig, NumericsConfig, RunConfig, TrainConfig
from fastsiam.distributed import Place
from fastsiam.errors import BackendError
from fastsiam.methods import build_method
from fastsiam.pipelines import build_loader
from fastsiam.pipelines.workers import count as count_workers
from fastsiam.training.optim import peak_lr
from fastsiam.training.step import TrainingStep, autocast_type, keep_freed_memory
from fastsiam.views.batch import Batch

_SECONDS = 1.0
"""What a repeat takes at least, if steps are short."""
_MOST_STEPS = 50


AUTHORS = "authors"
_PLAIN: dict[str, Any] = {
    "precision": "fp32",
    "channels_last": False,
    "compile": "off",
    "keep_memory": False,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "eager": {"compile": "off"},
    "views-apart": {"batch_views": False},
    "fp32": {"precision": "fp32"},
    "fp16": {"precision": "fp16"},
    "nchw": {"channels_last": False},
    "memory-returned": {"keep_memory": False},
    "recompute": {"activation_memory": 0.5},
    "cuda-graphs": {"cuda_graphs": True},
    "plain": _PLAIN,
    "plain-bf16": _PLAIN | {"precision": "bf16"},
    "plain-channels-last": _PLAIN | {"channels_last": True},
    "plain-compiled": _PLAIN | {"compile": "on"},
    "plain-keeping-memory": _PLAIN | {"keep_memory": True},
    "syncbn": {"sync_bn": True},
    AUTHORS: _PLAIN,
}
"""Ways to take the same training step, by the settings in which they differ from the default, which
is what a long run does: compiled, in bfloat16 where there is such a thing, channels last. The plain
ones have none of the levers, or one; the authors' is their code's way, not ours."""

_ON_A_GPU = ("fp16", "cuda-graphs")
_ON_A_CPU = ("memory-returned", "plain-keeping-memory")


def step(session: Session) -> list[Record]:
    """Measure the training step on ready tensors, in several ways."""
    batch = session.trained_batch
    names = [name for name in session.config.variants.split(",") if name] or list(VARIANTS)
    with session.contest() as contest:
        contest.enter("machine", build_machine, device=session.device)
        for name in names:
            if name in (_ON_A_CPU if session.gpu else _ON_A_GPU):
                continue
            settings = {"compile": "on"} | VARIANTS[name]
            if name != "syncbn":
                contest.enter(
                    name, build_step, config=train_config(session, batch, **settings),
                    authors=name == AUTHORS,
                )  # fmt: skip
                continue
            if (ranks := most_ranks(session)) == 1:
                session.console.say(f"{name}: not measured: needs several GPUs")
                continue
            for what, more in (("syncbn", {}), ("BN of each", {"sync_bn": False})):
                config = train_config(session, batch, ranks=ranks, **settings | more)
                contest.enter(f"{ranks} ranks, {what}", build_step, ranks=ranks, config=config)
        timings = contest.run(session.config.repeats)
        contenders = contest.contenders
        facts = {name: contest.facts(name, work) for name, work in timings if name != "machine"}
        least, limits = None, rates(contest, timings)
        if limits:
            floor = roofline.floor(train_config(session, batch), roofline.measured(limits))
            least = Timing([Sample(floor, 0.0)], 1)
            limits["roofline, images/s"] = 1 / floor
    authors = timings.get((AUTHORS, "step"))
    return [
        record(
            "step",
            name,
            timing,
            baseline=(AUTHORS, authors) if authors else None,
            ceiling=("the roofline", _by(least, facts[name])) if least else None,
            gpu_bytes=contenders[name].gpu,
            facts=facts[name] | limits,
            in_the_clock="forward, backward and optimizer steps on tensors that are ready",
            config=_settings(session, batch),
        )
        for (name, _), timing in timings.items()
        if name != "machine"
    ]


def _by(least: Timing, facts: Mapping[str, Any]) -> Timing:
    """Return the least time of one device for as many as there are."""
    return replace(least, images=least.images * facts.get("devices", 1))


def train(session: Session) -> list[Record]:
    """Measure training end to end, fed by each pipeline, beside ready tensors: the ceiling."""
    batch = session.trained_batch
    images = session.images(batch, at_least=4)
    config = train_config(session, batch)
    with session.contest() as contest:
        ready = DataConfig(pipeline="synthetic")
        contest.enter("synthetic", build_fed, config=replace(config, data=ready))
        for pipeline in session.config.pipeline_names:
            for form in session.config.forms if pipeline == "ffcv" else ("original",):
                name = pipeline if form == "original" else f"{pipeline}, {form}"
                data = data_of(session, images, pipeline, form)
                contest.enter(name, build_fed, config=replace(config, data=data))
        timings = contest.run(session.config.repeats)
        contenders = contest.contenders
        facts = {name: contest.facts(name, work) for name, work in timings}
    torchvision, ceiling = (timings.get((name, "train")) for name in ("torchvision", "synthetic"))
    return [
        record(
            "train",
            name,
            timing,
            torchvision=torchvision,
            ceiling=("ready tensors", ceiling) if ceiling else None,
            pipeline=name.partition(",")[0],
            gpu_bytes=contenders[name].gpu,
            facts=facts[name],
            in_the_clock="steps in the middle of an epoch: waiting for the batch, forward, "
            "backward, optimizer",
            config=_settings(session, batch, workers=session.workers, data=images.about),
        )
        for (name, _), timing in timings.items()
    ]


def build_step(*, config: TrainConfig, authors: bool = False) -> dict[str, Work]:
    """Build a model, an optimizer and a few batches; its work is some steps."""
    place = distributed.start(config.run)
    batch = config.optim.batch
    data = DataConfig(pipeline="synthetic")
    began = time.perf_counter()
    take, _ = (authors_step if authors else step_of)(config, place)
    started = time.perf_counter() - began
    dtype = autocast_type(config, place)
    loader = build_loader(
        data, config.augment, batch=batch, rank=place.rank, world=place.world,
        device=place.device, dtype=dtype,
    )  # fmt: skip
    batches = list(islice(loader.epoch(0), 2))
    take(batches[0])
    steps = _steps_of(_SECONDS, lambda: take(batches[1]), place)

    def run() -> None:
        for i in range(steps):
            take(batches[i % len(batches)])

    facts = {
        "precision": str(dtype).removeprefix("torch."),
        "batch": batch,
        "ranks": place.world,
        "devices": place.world if place.device.type == "cuda" else 1,
        "seconds_to_build": started,
    }
    before = partial(take, batches[0])  # its memory is there before the clock starts
    return {"step": Work(run, steps * batch, lambda: facts, before)}


def build_fed(*, config: TrainConfig) -> dict[str, Work]:
    """Build a model and a loader; its work is some steps in the middle of an epoch."""
    place = distributed.start(config.run)
    batch = config.optim.batch
    loader = build_loader(
        config.data, config.augment, batch=batch, rank=place.rank,
        world=place.world, device=place.device, dtype=autocast_type(config, place),
    )  # fmt: skip
    take, _ = step_of(config, place)
    epochs = count()
    for fed in islice(loader.epoch(next(epochs)), 2):
        take(fed)
    steps = _steps_of(_SECONDS, lambda: take(fed), place)
    warm, steps = window(
        steps, loader.steps, made_ahead(config.data), whole=place.device.type == "cuda"
    )
    feed: Iterator[Batch] = iter(())
    waited: list[float] = []
    ran: list[float] = []

    def before() -> None:
        nonlocal feed
        feed = loader.epoch(next(epochs))
        for fed in islice(feed, warm):
            take(fed)
        _finish(place)

    def run() -> None:
        began, wait = time.perf_counter(), 0.0
        for _ in range(steps):
            asked = time.perf_counter()
            fed = next(feed)
            wait += time.perf_counter() - asked
            take(fed)
        _finish(place)
        waited.append(wait)
        ran.append(time.perf_counter() - began)

    def facts() -> dict[str, Any]:
        return {
            "data_wait": sum(waited[1:]) / sum(ran[1:]),
            "steps": steps,
            "compile": config.step.compile,
            "precision": str(autocast_type(config, place)).removeprefix("torch."),
            "batch": batch,
            "ranks": place.world,
        }

    return {"train": Work(run, steps * batch, facts, before)}


def window(wanted: int, there: int, ahead: int, *, whole: bool) -> tuple[int, int]:
    """Return how many steps of an epoch come before the clock starts, and how many are timed.

    An epoch begins with as many batches as are made ahead, all at once: these say nothing of how
    fast the others come, which matters where a step is not slower than any loader.

    Args:
        wanted: steps that take long enough to be timed.
        there: steps of the epoch.
        ahead: batches that are made ahead, 0 if none are.
        whole: go to the epoch's end, so that nobody loads in others' turns.
    """
    if whole and ahead:
        warm = min(ahead, there // 2)
        return warm, there - warm
    warm = min(ahead, wanted, there // 2)
    return warm, min(wanted, there - warm)


def made_ahead(data: DataConfig) -> int:
    """Return how many batches a pipeline makes ahead of the one that is trained on."""
    if data.pipeline == "torchvision":
        return 2 * max(1, count_workers(data.workers))  # DataLoader's prefetch_factor
    return 0 if data.pipeline in ("memory", "synthetic") else data.prefetch + 1


def most_ranks(session: Session) -> int:
    """Return how many ranks are tried: all GPUs of the machine, or two processes on a CPU."""
    return torch.cuda.device_count() if session.gpu else 2


Take = Callable[[Batch], object]
"""Takes one training step."""


def step_of(config: TrainConfig, place: Place) -> tuple[Take, nn.Module]:
    """Return the step of ``fastsiam train``, and the model that it trains.

    Raises:
        BackendError: it was to be compiled and cannot be.
    """
    if place.device.type == "cpu" and config.step.keep_memory:
        keep_freed_memory()
    torch.manual_seed(0)
    step = TrainingStep(config, build_method(config.model), place)
    line = step.prepare()
    if step.compiled != (config.step.compile == "on"):
        raise BackendError(line)
    rates = {"encoder": peak_lr(config.optim), "predictor": peak_lr(config.optim)}
    return lambda batch: step(batch, rates), step.method


def authors_step(config: TrainConfig, place: Place) -> tuple[Take, nn.Module]:
    """Return the step as the paper's authors take it, and the model that it trains.

    Float32 (TF32 in convolutions, as torch has it on its own), NCHW, eager, one forward for each
    view, a plain SGD with one kernel for each operation on each parameter.
    """
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    method = build_method(config.model).to(place.device).train()
    optimizer = torch.optim.SGD(
        method.parameters(),
        lr=peak_lr(config.optim),
        momentum=config.optim.momentum,
        weight_decay=config.optim.weight_decay,
        foreach=False,
        fused=False,
    )

    def take(batch: Batch) -> None:
        views = (batch.view1.float().contiguous(), batch.view2.float().contiguous())
        z1, z2 = (method.projector(method.backbone(view)) for view in views)
        p1, p2 = method.predictor(z1), method.predictor(z2)
        similarity = F.cosine_similarity(p1, z2.detach()) + F.cosine_similarity(p2, z1.detach())
        optimizer.zero_grad()
        (-similarity.mean() / 2).backward()
        optimizer.step()

    return take, method


def train_config(session: Session, batch: int, *, ranks: int = 1, **settings: Any) -> TrainConfig:
    """Return the recipe with a batch for each rank.

    It is compiled on a GPU, as long runs are; on a CPU, where that takes longer than measuring, if
    ``settings`` say so.

    Args:
        session: what is trained.
        batch: images of each rank.
        ranks: how many there are.
        settings: fields of ``numerics`` and ``step``.
    """
    config = session.config.train
    settings = {"compile": "on" if session.gpu else "off"} | settings
    numerics = {name: settings.pop(name) for name in NumericsConfig.__slots__ if name in settings}
    return replace(
        config,
        optim=replace(config.optim, batch=batch * ranks, warmup_epochs=0.0),
        numerics=replace(config.numerics, **numerics),
        step=replace(config.step, **settings),
        run=RunConfig(device="cuda" if session.gpu else "cpu"),
    )


def _steps_of(seconds: float, one: Callable[[], object], place: Place) -> int:
    """Take one step, and return how many take so many seconds, the same on all ranks."""
    _finish(place)
    began = time.perf_counter()
    one()
    _finish(place)
    steps = torch.tensor(seconds / (time.perf_counter() - began), device=place.device)
    return max(1, min(_MOST_STEPS, round(distributed.minimum_across_ranks(steps).item())))


def _settings(session: Session, batch: int, **more: Any) -> dict[str, Any]:
    return session.settings(batch=batch, backbone=session.config.train.model.backbone, **more)


def _finish(place: Place) -> None:
    if place.device.type == "cuda":
        torch.cuda.synchronize()
