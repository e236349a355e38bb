"""Speed of the training step on ready tensors, in several variants and as in the authors' code."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from fastsiam import distributed
from fastsiam.bench.config import AUTHORS, ONLY_ON_GPU, SYNC_BN, VARIANTS
from fastsiam.bench.measure import time_task
from fastsiam.bench.measurements import Record, Row
from fastsiam.bench.runner import Task, compare
from fastsiam.config import DataConfig, TrainConfig
from fastsiam.distributed import Place
from fastsiam.errors import BackendError
from fastsiam.methods import build_method
from fastsiam.methods.optim import peak_lr
from fastsiam.methods.simsiam import SimSiam
from fastsiam.model.numerics import autocast_type, with_resolved_precision
from fastsiam.pipelines import build_loader
from fastsiam.pipelines.backends import CEILING
from fastsiam.train.step import TrainingStep
from fastsiam.views.batch import Batch, Loader

if TYPE_CHECKING:  # not imported in the processes that are measured
    from fastsiam.bench.session import Session

_SECONDS = 1.0
"""Target duration of a repeat if steps are short, within ``_MOST_STEPS``."""
_MOST_STEPS = 50


def measure(session: Session) -> list[Record]:
    """Measure each variant.

    On a GPU each variant ends before the next one starts: their activations would not fit into
    memory together, and a CUDA graph cannot release its memory between turns.
    """
    batch = session.trained_batch
    most_ranks = session.most_ranks

    def row(name: str, ranks: int = 1, **settings: Any) -> Row:
        config = session.train_config(batch, ranks=ranks, **{"compile": "on"} | settings)
        begin = authors_step if name == AUTHORS else step_of
        return Row(
            case="step",
            name=name,
            build=partial(build_step, config=config, begin=begin),
            ranks=ranks,
            baseline=(AUTHORS, AUTHORS),
            in_the_clock="forward, backward and optimizer steps on tensors that are ready",
            config=session.settings(batch=batch, backbone=config.model.backbone),
        )

    rows = []
    for name in session.config.names("variants"):
        if name in ONLY_ON_GPU and not session.gpu:
            session.skip(name, "needs a GPU")
        elif name != SYNC_BN:
            rows.append(row(name, **VARIANTS[name]))
        elif most_ranks == 1:
            session.skip(name, "needs several GPUs")
        else:
            for label, sync_bn in ((name, True), ("BN of each", False)):
                rows.append(row(f"{most_ranks} ranks, {label}", most_ranks, sync_bn=sync_bn))
    return compare(session, rows, apart=session.gpu)


@dataclass(frozen=True)
class Stepper:
    """A training step that is ready to run."""

    take: Callable[[Batch], object]
    method: nn.Module
    """The method that is trained."""
    settings: dict[str, Any]
    """The settings that are used, for the record."""


@dataclass(frozen=True)
class TrainingSetup:
    """Settings, place and loader of a process that trains."""

    config: TrainConfig
    """Resolved: ``precision`` is what the hardware computes in."""
    place: Place
    loader: Loader

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for the record."""
        dtype = autocast_type(self.config.numerics.precision, self.place.device)
        return {
            "precision": str(dtype).removeprefix("torch."),
            "batch": self.config.optim.batch,
            "ranks": self.place.world,
        }


def training_setup(config: TrainConfig) -> TrainingSetup:
    """Find this process's place, and open its loader."""
    place = distributed.start(config.run)
    config = with_resolved_precision(config, place.device)
    loader = build_loader(
        config.data,
        config.augment,
        batch=config.optim.batch,
        rank=place.rank,
        world=place.world,
        device=place.device,
        dtype=autocast_type(config.numerics.precision, place.device),
    )
    return TrainingSetup(config, place, loader)


def step_of(own: TrainingSetup) -> Stepper:
    """Return the step of ``fastsiam train``, at the schedule's first learning rate.

    Raises:
        BackendError: the step cannot be compiled, or recorded as a CUDA graph, as configured.
    """
    torch.manual_seed(0)
    method = build_method(own.config.model, images=own.loader.images)
    step = TrainingStep(own.config, method, own.place, steps_per_epoch=own.loader.steps)
    step.prepare()
    sections = step.config.to_dict()
    return Stepper(
        partial(step, at=0), method, {name: sections[name] for name in ("numerics", "step")}
    )


def authors_step(own: TrainingSetup) -> Stepper:
    """Return the step as in the paper authors' code.

    It is in float32 (with TF32 convolutions, torch's default), NCHW and eager, with one forward
    pass per view, and plain SGD with one kernel per operation and parameter.

    Raises:
        BackendError: the method is not the SimSiam of the paper.
    """
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    method, optim = build_method(own.config.model), own.config.optim
    if type(method) is not SimSiam:
        raise BackendError(f"the authors' step is for SimSiam, not for {type(method).__name__}")
    method = method.to(own.place.device).train()
    optimizer = torch.optim.SGD(
        method.parameters(),
        lr=peak_lr(optim),
        momentum=optim.momentum,
        weight_decay=optim.weight_decay,
        foreach=False,
        fused=False,
    )

    def take(batch: Batch) -> None:
        z1, z2 = (
            method.projector(method.backbone(view.float().contiguous())) for view in batch.views
        )
        p1, p2 = method.predictor(z1), method.predictor(z2)
        similarity = F.cosine_similarity(p1, z2.detach()) + F.cosine_similarity(p2, z1.detach())
        optimizer.zero_grad()
        (-similarity.mean() / 2).backward()
        optimizer.step()

    return Stepper(take, method, VARIANTS[AUTHORS])


def build_step(*, config: TrainConfig, begin: Callable[[TrainingSetup], Stepper] = step_of) -> Task:
    """Build a step and a few batches; the task runs some steps on these ready tensors."""
    setup = training_setup(replace(config, data=DataConfig(pipeline=CEILING)))
    start = time.perf_counter()
    stepper = begin(setup)
    seconds = time.perf_counter() - start
    batches = list(islice(setup.loader.epoch(0), 2))
    stepper.take(batches[0])
    steps = steps_in_time(partial(stepper.take, batches[1]), setup.place)
    on_gpu = setup.place.device.type == "cuda"
    if on_gpu:  # leave out the memory with which cuDNN tried its kernels
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def run() -> None:
        for i in range(steps):
            stepper.take(batches[i % len(batches)])

    # A CUDA graph's memory is reserved once, and replays do not count as allocations.
    graphs = stepper.settings.get("step", {}).get("cuda_graphs", False)
    peak_memory = torch.cuda.max_memory_reserved if graphs else torch.cuda.max_memory_allocated

    def facts() -> dict[str, Any]:
        peak = {"peak_gpu_bytes": peak_memory()} if on_gpu else {}
        return setup.facts | peak | {"seconds_to_build": seconds, "settings": stepper.settings}

    before = partial(stepper.take, batches[0])  # allocates memory before the clock starts
    return Task(run, steps * config.optim.batch, facts, before)


def steps_in_time(one: Callable[[], object], place: Place) -> int:
    """Time one step; return how many steps take about a second, the same number on all ranks."""
    steps = torch.tensor(_SECONDS / time_task(one).wall, device=place.device)
    return max(1, min(_MOST_STEPS, round(distributed.minimum_across_ranks(steps).item())))
