"""Print the tables of docs/scaling.md: `python docs/scripts/scaling.py`.

Parameters and BN layers are counted in fastsiam's networks. The constants below are assumptions
about the machines: edit them to describe yours.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn.modules.batchnorm import _BatchNorm

from fastsiam.config import ModelConfig
from fastsiam.markdown import markdown
from fastsiam.methods import method_skeleton

SPEED = 3_000.0  # images/s of one GPU: measured on an H100 (docs/benchmarks/gpu.md)
NETWORK = 50e9  # bytes/s of each GPU to other machines: a 400 Gb/s card each, as in a DGX H100
LATENCY, LATENCY_INSIDE = 25e-6, 10e-6  # seconds of a small exchange between / within machines
ANSWER = 0.03  # seconds until object storage answers a request for one image
DISK = 1e9  # bytes/s at which a checkpoint is written
RESTART = 5.0  # minutes from a fault until training resumes
MACHINE = 8  # GPUs per machine
RUNS = (8, 512), (64, 2048), (512, 2048)  # GPUs, batch; up to 2048 accuracy is unchanged
IMAGES, TAR = 1_281_167, 147_897_477_120  # ImageNet-1k's training images, and bytes of their tar
LLAMA = 419 / 16_384 / 54  # faults per GPU and day: arXiv 2407.21783, section 3.3.4
OPT = (35 + 70) / 992 / 61  # hardware restarts per GPU and day: arXiv 2205.01068, sec. 2.5


@dataclass(frozen=True)
class Sizes:
    """Sizes of a network and its heads."""

    parameters: int
    buffers: int
    """Bytes of buffers."""
    channels: tuple[int, ...]
    """Channels of each BN layer."""
    views: int = 2

    @property
    def gradients(self) -> int:
        """Bytes of float32 gradients that are averaged over the ranks in each step."""
        return 4 * self.parameters

    @property
    def checkpoint(self) -> int:
        """Bytes of a checkpoint: weights, momentum, and buffers."""
        return 2 * 4 * self.parameters + self.buffers

    @property
    def exchanges(self) -> int:
        """BN's exchanges per step: one per layer and direction, for both views at once."""
        return 2 * len(self.channels)

    @property
    def statistics(self) -> int:
        """Bytes of means, variances and their gradients that a rank sends per step."""
        return 2 * sum(self.channels) * 2 * self.views * 4


def sizes(model: ModelConfig) -> Sizes:
    """Count the sizes of a model without allocating it."""
    method = method_skeleton(model)
    return Sizes(
        parameters=sum(x.numel() for x in method.parameters()),
        buffers=sum(x.numel() * x.element_size() for x in method.buffers()),
        channels=tuple(x.num_features for x in method.modules() if isinstance(x, _BatchNorm)),
    )


def sent(model: Sizes, gpus: int) -> float:
    """Return the bytes of gradients that each GPU sends per step in a ring all-reduce."""
    return 2 * (gpus - 1) / gpus * model.gradients


def bn_seconds(joint: int, model: Sizes) -> float:
    """Return the seconds per step of BN's exchanges among ``joint`` GPUs.

    Statistics are all-gathered, so a GPU receives more with more GPUs. Within a machine, that
    transfer is short compared with the latency.
    """
    if joint <= MACHINE:
        return model.exchanges * LATENCY_INSIDE
    return model.exchanges * LATENCY + (joint - 1) * model.statistics / NETWORK


def step_seconds(gpus: int, batch: int, model: Sizes, *, grouped: bool) -> float:
    """Return the least seconds per step.

    Gradient exchange overlaps with the backward pass, so the longer of the two counts. BN's
    exchanges block each layer, so their times are added. ``grouped`` is ``--sync-bn-ranks 8``.
    """
    exchange = 0.0 if gpus <= MACHINE else sent(model, gpus) / NETWORK
    return max(batch / gpus / SPEED, exchange) + bn_seconds(MACHINE if grouped else gpus, model)


def lost(faults: float, minutes: float, model: Sizes) -> float:
    """Return the share of time lost with ``faults`` a day and a checkpoint every ``minutes``."""
    return faults * (minutes / 2 + RESTART) / (24 * 60) + model.checkpoint / DISK / 60 / minutes


def counts(model: Sizes) -> str:
    """Return the table of sizes."""
    rows = [
        ["parameters of ResNet-50 and SimSiam's heads", f"{model.parameters:,}"],
        ["gradients, float32", f"{model.gradients / 1e6:.1f} MB"],
        ["BN layers", f"{len(model.channels)}, {sum(model.channels):,} channels in all"],
        ["BN exchanges per step",
         f"{model.exchanges}, {model.statistics / 1e3:.0f} kB sent by each rank"],
        ["checkpoint", f"{model.checkpoint / 1e6:.0f} MB, {model.checkpoint / DISK:.1f} s at "
         f"{DISK / 1e9:g} GB/s"],
        ["order of an ImageNet epoch", f"{IMAGES * 8 / 1e6:.1f} MB per rank, not sent"],
    ]  # fmt: skip
    return markdown(["", ""], rows)


def network(model: Sizes) -> str:
    """Return the table of steps and their network traffic."""
    heads = [
        "GPUs", "batch", "images per GPU", "compute, ms", "gradients sent per GPU, MB", "ms",
        "BN exchanges", "statistics received per GPU, MB", "ms", "images/s at most", "of ideal",
        "with --sync-bn-ranks 8",
    ]  # fmt: skip
    rows = []
    for gpus, batch in RUNS:
        sent_bytes, ideal = sent(model, gpus), gpus * SPEED
        joint, grouped = (
            batch / step_seconds(gpus, batch, model, grouped=x) for x in (False, True)
        )
        rows.append([
            f"{gpus}", f"{batch:,}", f"{batch // gpus}", f"{batch / gpus / SPEED * 1e3:.0f}",
            f"{sent_bytes / 1e6:.0f}",
            "NVLink" if gpus <= MACHINE else f"{sent_bytes / NETWORK * 1e3:.1f}",
            f"{model.exchanges}", f"{(gpus - 1) * model.statistics / 1e6:.0f}",
            f"{bn_seconds(gpus, model) * 1e3:.1f}",
            f"{joint:,.0f}", f"{joint / ideal:.0%}", f"{grouped / ideal:.0%}",
        ])  # fmt: skip
    return markdown(heads, rows)


def storage(model: Sizes) -> str:
    """Return the table of storage requirements, for step times with BN within machines."""
    heads = [
        "GPUs", "images/s", "MB/s", "concurrent requests, one per image",
        "requests/s with 100 images each", "time per epoch", "MB/s per machine",
    ]  # fmt: skip
    rows = []
    for gpus, batch in RUNS:
        speed = batch / step_seconds(gpus, batch, model, grouped=True)
        bandwidth = speed * TAR / IMAGES / 1e6
        rows.append([
            f"{gpus}", f"{speed:,.0f}", f"{bandwidth:,.0f}", f"{speed * ANSWER:,.0f}",
            f"{speed / 100:,.0f}", f"{IMAGES / speed:,.0f} s",
            f"{bandwidth / max(1, gpus // MACHINE):,.0f}",
        ])  # fmt: skip
    return markdown(heads, rows)


def faults(model: Sizes) -> str:
    """Return the table of faults and the time they cost for several checkpoint intervals."""
    intervals = 5, 15, 60
    rows = []
    for gpus, _ in RUNS:
        rates = [rate * gpus for rate in (LLAMA, OPT)]
        rows.append([
            f"{gpus}", " to ".join(f"{x:.2g}" for x in rates),
            " to ".join(f"{1 / x:,.0f}" for x in reversed(rates)) + " days",
            *(" to ".join(f"{lost(x, m, model):.2%}" for x in rates) for m in intervals),
        ])  # fmt: skip
    heads = ["GPUs", "faults per day", "mean time between faults"]
    heads += [f"lost, saved every {x} min" for x in intervals]
    return markdown(heads, rows)


def tables() -> list[str]:
    """Return all tables of docs/scaling.md in Markdown."""
    model = sizes(ModelConfig())
    return [counts(model), network(model), storage(model), faults(model)]


if __name__ == "__main__":
    print("\n\n".join(tables()))
