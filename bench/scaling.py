"""What a run on many GPUs asks of network, storage and patience, computed: docs/scaling.md.

``python -m fastsiam.bench.scaling`` prints that page's tables. What is counted here (parameters,
BN's layers) is that of the program's own networks; tests hold the counts to what a run exchanges
and saves. What is assumed is in ``Cluster``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fastsiam.config import ModelConfig
from fastsiam.methods import method_skeleton
from fastsiam.report.markdown import markdown

FLOAT = 4
"""Bytes of a float32: weights, gradients and BN's statistics."""
MACHINE = 8
"""GPUs of a machine."""
DAY = 24 * 60
"""Minutes."""
IMAGES = 1_281_167
"""Training images of ImageNet-1k."""
TAR = 147_897_477_120
"""Bytes of ILSVRC2012_img_train.tar, in which they are."""


@dataclass(frozen=True)
class Cluster:
    """What is assumed of the machines."""

    speed: float = 2_000.0
    """Images/s of one GPU by itself: expected of an H200 (docs/benchmarks/gpu.md), not measured."""
    network: float = 50e9
    """Bytes/s of each GPU to other machines: a 400 Gb/s card for each, as in NVIDIA's DGX H100."""
    latency: float = 25e-6
    """Seconds of one small exchange of all GPUs of several machines."""
    latency_inside: float = 10e-6
    """The same within a machine."""
    answer: float = 0.03
    """Seconds until a store in the network answers a request for one image."""
    disk: float = 1e9
    """Bytes/s at which a checkpoint is written."""
    restart: float = 5.0
    """Minutes from a fault until the run trains again: noticed, started, compiled, data opened."""


@dataclass(frozen=True)
class Training:
    """A run: how many GPUs, and images of a global batch."""

    gpus: int
    batch: int

    @property
    def is_one_machine(self) -> bool:
        """Whether no exchange leaves the machine."""
        return self.gpus <= MACHINE

    @property
    def each(self) -> int:
        """Images of a rank."""
        return self.batch // self.gpus


TRAININGS = Training(8, 512), Training(64, 2048), Training(512, 2048)
"""2048 is the largest batch with which the paper's table 2 loses next to nothing: 67.9, where 512
has 68.1 and 4096 has 64.0."""


@dataclass(frozen=True)
class Sizes:
    """What is counted in a network and its heads."""

    parameters: int
    buffers: int
    """Bytes of its buffers."""
    channels: tuple[int, ...]
    """Of each BN layer."""
    views: int = 2

    @property
    def gradients(self) -> int:
        """Bytes of gradients that are averaged over the ranks in each step."""
        return self.parameters * FLOAT

    @property
    def checkpoint(self) -> int:
        """Bytes of a checkpoint: weights, momentum, and buffers."""
        return 2 * self.parameters * FLOAT + self.buffers

    @property
    def exchanges(self) -> int:
        """BN's exchanges of a step: of each layer forward and backward, both views at once."""
        return 2 * len(self.channels)

    def gathered(self, joint: int) -> int:
        """Bytes of means, variances and their gradients that a GPU gets from ``joint - 1``."""
        return (joint - 1) * self.statistics

    @property
    def statistics(self) -> int:
        """Bytes of means and variances that a rank sends in a step."""
        return 2 * sum(self.channels) * 2 * self.views * FLOAT


def sizes(model: ModelConfig) -> Sizes:
    """Count a model, without its memory."""
    method = method_skeleton(model)
    layers = [x for x in method.modules() if isinstance(x, _BatchNorm)]
    return Sizes(
        parameters=_count(method),
        buffers=sum(x.numel() * x.element_size() for x in method.buffers()),
        channels=tuple(x.num_features for x in layers),
    )


def _count(module: nn.Module) -> int:
    return sum(x.numel() for x in module.parameters())


def sent(gradients: int, gpus: int) -> float:
    """Return the bytes that each GPU sends in a step: those of a ring's all-reduce."""
    return 2 * (gpus - 1) / gpus * gradients


def bn_seconds(joint: int, model: Sizes, here: Cluster) -> float:
    """Return the time of BN's exchanges in a step, among so many GPUs.

    Means and variances are gathered, and their gradients summed where they came from: what a GPU
    gets grows with their number. Within a machine that is nothing beside the latency.
    """
    if joint <= MACHINE:
        return model.exchanges * here.latency_inside
    return model.exchanges * here.latency + model.gathered(joint) / here.network


def step_seconds(run: Training, model: Sizes, here: Cluster, *, grouped: bool) -> float:
    """Return the least time of a step.

    Gradients are exchanged beside the backward pass, so the longer of both counts; BN's exchanges
    stand in the way of each layer, so they add up.

    Args:
        run: GPUs and batch.
        model: what is exchanged.
        here: the machines.
        grouped: whether BN's statistics are those of one machine (``--sync-bn-ranks 8``).
    """
    gradients = 0.0 if run.is_one_machine else sent(model.gradients, run.gpus) / here.network
    joint = MACHINE if grouped else run.gpus
    return max(run.each / here.speed, gradients) + bn_seconds(joint, model, here)


def network_table(model: Sizes, here: Cluster) -> str:
    """Return the table of steps and what they exchange."""
    heads = [
        "GPUs", "batch", "images of a GPU", "compute, ms", "gradients sent by a GPU, MB", "ms",
        "BN's exchanges", "statistics that it gets, MB", "ms", "images/s at most", "of ideal",
        "with --sync-bn-ranks 8",
    ]  # fmt: skip
    rows = []
    for run in TRAININGS:
        moved = sent(model.gradients, run.gpus)
        speeds = [
            run.batch / step_seconds(run, model, here, grouped=grouped) for grouped in (False, True)
        ]
        ideal = run.gpus * here.speed
        rows.append([
            f"{run.gpus}", f"{run.batch:,}", f"{run.each}", f"{run.each / here.speed * 1e3:.0f}",
            f"{moved / 1e6:.0f}",
            "NVLink" if run.is_one_machine else f"{moved / here.network * 1e3:.1f}",
            f"{model.exchanges}", f"{model.gathered(run.gpus) / 1e6:.0f}",
            f"{bn_seconds(run.gpus, model, here) * 1e3:.1f}",
            f"{speeds[0]:,.0f}", f"{speeds[0] / ideal:.0%}", f"{speeds[1] / ideal:.0%}",
        ])  # fmt: skip
    return markdown(heads, rows)


def storage_table(model: Sizes, here: Cluster) -> str:
    """Return the table of what is asked of storage, at the speeds of ``network_table``."""
    heads = [
        "GPUs", "images/s", "MB/s", "requests at a time, one an image",
        "requests/s with 100 images each", "an epoch", "of each machine, MB/s",
    ]  # fmt: skip
    rows = []
    for run in TRAININGS:
        speed = run.batch / step_seconds(run, model, here, grouped=True)
        bandwidth, machines = speed * TAR / IMAGES / 1e6, max(1, run.gpus // MACHINE)
        rows.append([
            f"{run.gpus}", f"{speed:,.0f}", f"{bandwidth:,.0f}", f"{speed * here.answer:,.0f}",
            f"{speed / 100:,.0f}", f"{IMAGES / speed:,.0f} s", f"{bandwidth / machines:,.0f}",
        ])  # fmt: skip
    return markdown(heads, rows)


@dataclass(frozen=True)
class Log:
    """Faults of a published run."""

    name: str
    faults: int
    gpus: int
    days: int

    @property
    def rate(self) -> float:
        """Faults of a GPU in a day."""
        return self.faults / self.gpus / self.days


LLAMA = Log("Llama 3", faults=419, gpus=16_384, days=54)
"""Unexpected interruptions, section 3.3.4 and table 5 of arXiv 2407.21783."""
OPT = Log("OPT-175B", faults=35 + 70, gpus=992, days=61)
"""Restarts for hardware, by hand and (estimated) by themselves, in two months: section 2.5 of arXiv
2205.01068."""


def lost(faults: float, minutes: float, model: Sizes, here: Cluster) -> float:
    """Return the share of the time that is lost to faults and checkpoints.

    Args:
        faults: a day.
        minutes: between two checkpoints: half of that is lost at a fault, on average.
        model: what is saved.
        here: the machines.
    """
    to_faults = faults * (minutes / 2 + here.restart) / DAY
    return to_faults + model.checkpoint / here.disk / 60 / minutes


def fault_table(model: Sizes, here: Cluster, *, every: Sequence[int] = (5, 15, 60)) -> str:
    """Return the table of faults, and of what they cost with a checkpoint every so many minutes."""
    heads = ["GPUs", "faults a day", "one in", *(f"lost, saved every {x} min" for x in every)]
    rows = []
    for run in TRAININGS:
        rates = [log.rate * run.gpus for log in (LLAMA, OPT)]
        rows.append([
            f"{run.gpus}", " to ".join(f"{x:.2g}" for x in rates),
            " to ".join(f"{1 / x:,.0f}" for x in reversed(rates)) + " days",
            *(" to ".join(f"{lost(x, m, model, here):.2%}" for x in rates) for m in every),
        ])  # fmt: skip
    return markdown(heads, rows)


def counts(model: Sizes, here: Cluster) -> str:
    """Return the table of what is counted."""
    values = {
        "parameters of ResNet-50 and SimSiam's heads": f"{model.parameters:,}",
        "gradients, float32": f"{model.gradients / 1e6:.1f} MB",
        "BN layers": f"{len(model.channels)}, {sum(model.channels):,} channels in all",
        "BN's exchanges of a step": f"{model.exchanges}, "
        f"{model.statistics / 1e3:.0f} kB sent by each rank",
        "checkpoint": f"{model.checkpoint / 1e6:.0f} MB, "
        f"{model.checkpoint / here.disk:.1f} s at {here.disk / 1e9:g} GB/s",
        "an epoch's order, of ImageNet": f"{IMAGES * 8 / 1e6:.1f} MB on each rank, none sent",
    }
    return markdown(["", ""], [[name, text] for name, text in values.items()])


def tables() -> list[str]:
    """Return the tables of the page."""
    model, here = sizes(ModelConfig()), Cluster()
    made = (counts, network_table, storage_table, fault_table)
    return [make(model, here) for make in made]


if __name__ == "__main__":
    print("\n\n".join(tables()))
