"""What was expected of an H100 and an H200 before fastsiam had run on any GPU.

Each figure was worked out or taken from what others published; docs/benchmarks/gpu.md says how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from fastsiam.bench.records import Record
from fastsiam.bench.tables import number
from fastsiam.report.markdown import markdown


@dataclass(frozen=True)
class Found:
    """What the stages of a campaign left."""

    records: Mapping[str, Sequence[Record]]
    """Records by stage."""
    metrics: Sequence[Mapping[str, Any]] = ()
    """Lines of the CIFAR-10 run's metrics.jsonl."""

    def record(self, stage: str, name: str) -> Record | None:
        """Return a record by the names of its stage and its own."""
        return next((one for one in self.records.get(stage, ()) if one.name == name), None)


Find = Callable[[Found], float | None]


Device = Literal["H100", "H200"]
DEVICES: tuple[Device, ...] = get_args(Device)


def device_of(gpu: str) -> Device | None:
    """Return the device of which something is expected, by a GPU's name; None for others."""
    return next((device for device in DEVICES if device in gpu), None)


class Bounds(NamedTuple):
    """Where a figure was expected to lie; one of the ends may be open."""

    low: float | None
    high: float | None


@dataclass(frozen=True)
class Expectation:
    """A figure that was expected to lie within bounds, which differ by device."""

    what: str
    unit: str
    h100: Bounds
    h200: Bounds
    find: Find
    """Finds the measured figure; None where nothing was measured."""

    def bounds(self, device: Device) -> Bounds:
        """Return the bounds on a device."""
        return self.h100 if device == "H100" else self.h200

    def bounds_text(self, device: Device) -> str:
        """Return the bounds on a device for people."""
        scale, (low, high) = 100 if self.unit == "%" else 1, self.bounds(device)
        ends = [f"{scale * end:,g}" for end in (low, high) if end is not None]
        word = "" if len(ends) == 2 else "at least " if high is None else "at most "
        return f"{word}{' to '.join(dict.fromkeys(ends))}{_unit(self.unit)}"

    def verdict(self, value: float | None, device: Device) -> str:
        """Say where a measured figure lies."""
        if value is None:
            return "not measured"
        low, high = self.bounds(device)
        if low is not None and value < low:
            return "below"
        return "above" if high is not None and value > high else "as expected"

    def written(self, value: float) -> str:
        """Write a measured figure for people."""
        text = f"{100 * value:.1f}" if self.unit == "%" else number(value)
        return f"{text}{_unit(self.unit)}"


def _unit(unit: str) -> str:
    return unit if unit == "%" else f" {unit}".rstrip()


def _rate(stage: str, name: str) -> Find:
    def find(found: Found) -> float | None:
        one = found.record(stage, name)
        return one.images_per_second if one else None

    return find


def _fact(stage: str, name: str, fact: str, scale: float = 1.0) -> Find:
    def find(found: Found) -> float | None:
        one = found.record(stage, name)
        return scale * one.facts[fact] if one and fact in one.facts else None

    return find


def _milliseconds(stage: str, name: str, images: int) -> Find:
    """Return what finds the milliseconds that so many images take."""

    def find(found: Found) -> float | None:
        one = found.record(stage, name)
        return 1000 * images / one.images_per_second if one else None

    return find


def _fastest(stage: str, start: str) -> Find:
    """Return what finds the highest rate of a stage's records whose names begin so."""

    def find(found: Found) -> float | None:
        records = found.records.get(stage, ())
        rates = [one.images_per_second for one in records if one.name.startswith(start)]
        return max(rates, default=None)

    return find


def _times(one: tuple[str, str], other: tuple[str, str]) -> Find:
    """Return what finds how many times as fast as another one is, each by stage and name."""

    def find(found: Found) -> float | None:
        first, second = found.record(*one), found.record(*other)
        return first.images_per_second / second.images_per_second if first and second else None

    return find


def _share(name: str) -> Find:
    def find(found: Found) -> float | None:
        one = found.record("train", name)
        return one.share_of_ceiling if one else None

    return find


def _cores(name: str) -> Find:
    def find(found: Found) -> float | None:
        one = found.record("train", name)
        return one.cores_busy if one else None

    return find


def _gap(found: Found) -> float | None:
    records = found.records.get("profile", ())
    return next((one.facts.get("gap_of_a_step") for one in records), None)


def _minutes(found: Found) -> float | None:
    """Return the minutes of 800 epochs at the run's speed so far, evaluation left out."""
    lines = [line for line in found.metrics if line["kind"] == "train"]
    if not lines or lines[-1]["epoch"] < 1:
        return None
    return float(lines[-1]["seconds"] / lines[-1]["epoch"] * 800 / 60)


def _knn(epoch: int) -> Find:
    def find(found: Found) -> float | None:
        lines = (line for line in found.metrics if line["kind"] == "knn")
        return next((line["top1"] for line in lines if line["epoch"] == epoch), None)

    return find


EXPECTED = (
    Expectation(
        "copy within memory",
        "GB/s",
        Bounds(2850, 3150),
        Bounds(4100, 4500),
        _fact("machine", "copy within memory", "value"),
    ),
    Expectation(
        "matrix product, bfloat16",
        "TFLOP/s",
        Bounds(750, 820),
        Bounds(750, 820),
        _fact("machine", "matrix product, bfloat16", "value"),
    ),
    Expectation(
        "photometric stage of 512 images",
        "ms",
        Bounds(0.7, 1.1),
        Bounds(0.55, 0.9),
        _milliseconds("photometric-512", "fastsiam", 512),
    ),
    Expectation(
        "step of ResNet-50, batch 512, compiled",
        "images/s",
        Bounds(2000, 2600),
        Bounds(2400, 3300),
        _rate("step-512", "default"),
    ),
    Expectation(
        "... not compiled",
        "images/s",
        Bounds(1400, 1800),
        Bounds(1700, 2300),
        _rate("step-512", "eager"),
    ),
    Expectation(
        "... as the paper's authors take it (H100: batch 256)",
        "images/s",
        Bounds(650, 850),
        Bounds(800, 1050),
        _rate("step-authors", "authors"),
    ),
    Expectation(
        "... compiled, times the authors'",
        "",
        Bounds(2.7, 3.5),
        Bounds(2.7, 3.5),
        _times(("step-512", "default"), ("step-authors", "authors")),
    ),
    Expectation(
        "... compiled, times not compiled",
        "",
        Bounds(1.25, None),
        Bounds(1.25, None),
        _times(("step-512", "default"), ("step-512", "eager")),
    ),
    Expectation(
        "... peak memory in bfloat16",
        "GB",
        Bounds(45, 55),
        Bounds(45, 55),
        _fact("step-512", "default", "peak_gpu_bytes", 1e-9),
    ),
    Expectation(
        "... peak memory in float32 (H100: batch 256)",
        "GB",
        Bounds(40, 50),
        Bounds(80, 95),
        _fact("step-fp32", "fp32", "peak_gpu_bytes", 1e-9),
    ),
    Expectation(
        "dali alone, views of ImageNet's JPEGs, the best share of the JPEG engine",
        "images/s",
        Bounds(6000, 9000),
        Bounds(8000, 10000),
        _fastest("jpeg-engine", "dali, jpeg-engine "),
    ),
    Expectation(
        "ffcv alone, crops",
        "images/s",
        Bounds(5000, 8000),
        Bounds(5000, 8000),
        _rate("loader", "ffcv crops"),
    ),
    Expectation(
        "torchvision alone, views",
        "images/s",
        Bounds(900, 1200),
        Bounds(900, 1200),
        _rate("loader", "torchvision views"),
    ),
    Expectation(
        "training by dali, of ready tensors' speed",
        "%",
        Bounds(0.96, None),
        Bounds(0.96, None),
        _share("dali"),
    ),
    Expectation(
        "training by ffcv, of ready tensors' speed",
        "%",
        Bounds(0.95, None),
        Bounds(0.95, None),
        _share("ffcv"),
    ),
    Expectation(
        "cores busy while dali feeds training",
        "",
        Bounds(None, 4.0),
        Bounds(None, 4.0),
        _cores("dali"),
    ),
    Expectation(
        "longest gap of the GPU, of a step", "%", Bounds(None, 0.02), Bounds(None, 0.02), _gap
    ),
    Expectation(
        "step of CIFAR-10's ResNet-18, batch 512",
        "ms",
        Bounds(13, 18),
        Bounds(11, 16),
        _milliseconds("step-cifar10", "default", 512),
    ),
    Expectation(
        "800 epochs of CIFAR-10, extrapolated",
        "minutes",
        Bounds(None, 25),
        Bounds(None, 25),
        _minutes,
    ),
    Expectation(
        "kNN on CIFAR-10 after 25 of 800 epochs (k 200, T 0.2)",
        "top-1",
        Bounds(39, 56),
        Bounds(39, 56),
        _knn(25),
    ),
    Expectation("... after 50", "top-1", Bounds(56, 66), Bounds(56, 66), _knn(50)),
    Expectation("... after 75", "top-1", Bounds(64, 73), Bounds(64, 73), _knn(75)),
    Expectation("... after 100", "top-1", Bounds(71, 77), Bounds(71, 77), _knn(100)),
    Expectation("... after 800", "top-1", Bounds(88, 92), Bounds(88, 92), _knn(800)),
)
"""All that was written down beforehand."""


def table(found: Found | None = None, *, gpu: str = "") -> str:
    """Return the expectations as a Markdown table, beside what was measured if something was.

    Args:
        found: by the stages.
        gpu: name of the GPU that was measured. The table says where each figure lies if something
            is expected of that device.
    """
    device = device_of(gpu)
    expected = (device,) if device else DEVICES
    heads = ["what", *(f"expected of an {one}" for one in expected)]
    rows = [[one.what, *map(one.bounds_text, expected)] for one in EXPECTED]
    if found is not None:
        values = [one.find(found) for one in EXPECTED]
        heads += ["measured", ""] if device else ["measured"]
        for row, one, value in zip(rows, EXPECTED, values, strict=True):
            row.append("" if value is None else one.written(value))
            if device:
                row.append(one.verdict(value, device))
    return markdown(heads, rows)
