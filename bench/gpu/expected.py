"""What was expected of an H200 before fastsiam had run on any GPU, and where it is found.

Each figure was worked out or taken from what others published; docs/benchmarks/gpu.md says how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Expectation:
    """A figure that was expected to lie between two bounds; one of them may be open."""

    what: str
    unit: str
    low: float | None
    high: float | None
    find: Find
    """Finds the measured figure; None where nothing was measured."""

    @property
    def bounds(self) -> str:
        """The bounds for people."""
        scale = 100 if self.unit == "%" else 1
        ends = [f"{scale * end:,g}" for end in (self.low, self.high) if end is not None]
        word = "" if len(ends) == 2 else "at least " if self.high is None else "at most "
        return f"{word}{' to '.join(dict.fromkeys(ends))}{_unit(self.unit)}"

    def verdict(self, value: float | None) -> str:
        """Say where a measured figure lies."""
        if value is None:
            return "not measured"
        if self.low is not None and value < self.low:
            return "below"
        return "above" if self.high is not None and value > self.high else "as expected"

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
        "copy within memory", "GB/s", 4100, 4500, _fact("machine", "copy within memory", "value")
    ),
    Expectation(
        "matrix product, bfloat16",
        "TFLOP/s",
        750,
        820,
        _fact("machine", "matrix product, bfloat16", "value"),
    ),
    Expectation(
        "photometric stage of 512 images",
        "ms",
        0.4,
        0.9,
        _milliseconds("photometric-512", "fastsiam", 512),
    ),
    Expectation(
        "step of ResNet-50, batch 512, compiled",
        "images/s",
        1800,
        2300,
        _rate("step-512", "default"),
    ),
    Expectation("... not compiled", "images/s", 1400, 1800, _rate("step-512", "eager")),
    Expectation(
        "... as the paper's authors take it", "images/s", 600, 750, _rate("step-authors", "authors")
    ),
    Expectation(
        "... compiled, times the authors'",
        "",
        4.0,
        None,
        _times(("step-512", "default"), ("step-authors", "authors")),
    ),
    Expectation(
        "... compiled, times not compiled",
        "",
        1.25,
        None,
        _times(("step-512", "default"), ("step-512", "eager")),
    ),
    Expectation(
        "... peak memory in bfloat16",
        "GB",
        45,
        55,
        _fact("step-512", "default", "peak_gpu_bytes", 1e-9),
    ),
    Expectation(
        "... peak memory in float32",
        "GB",
        90,
        110,
        _fact("step-fp32", "fp32", "peak_gpu_bytes", 1e-9),
    ),
    Expectation(
        "dali alone, views of ImageNet's JPEGs",
        "images/s",
        8000,
        12000,
        _rate("jpeg-engine", "dali, jpeg-engine 90"),
    ),
    Expectation("ffcv alone, crops", "images/s", 5000, 8000, _rate("loader", "ffcv crops")),
    Expectation(
        "torchvision alone, views", "images/s", 900, 1200, _rate("loader", "torchvision views")
    ),
    Expectation("training by dali, of ready tensors' speed", "%", 0.97, None, _share("dali")),
    Expectation("training by ffcv, of ready tensors' speed", "%", 0.95, None, _share("ffcv")),
    Expectation("cores busy while dali feeds training", "", None, 4.0, _cores("dali")),
    Expectation("longest gap of the GPU, of a step", "%", None, 0.02, _gap),
    Expectation(
        "step of CIFAR-10's ResNet-18, batch 512",
        "ms",
        13,
        17,
        _milliseconds("step-cifar10", "default", 512),
    ),
    Expectation("800 epochs of CIFAR-10, extrapolated", "minutes", None, 25, _minutes),
    Expectation("kNN on CIFAR-10 after 25 of 800 epochs (k 200, T 0.2)", "top-1", 39, 56, _knn(25)),
    Expectation("... after 50", "top-1", 56, 66, _knn(50)),
    Expectation("... after 75", "top-1", 64, 73, _knn(75)),
    Expectation("... after 100", "top-1", 71, 77, _knn(100)),
    Expectation("... after 800", "top-1", 88, 92, _knn(800)),
)
"""All that was written down beforehand."""


def table(found: Found | None = None, *, judged: bool = True) -> str:
    """Return the expectations as a Markdown table, beside what was measured if something was.

    Args:
        found: by the stages.
        judged: whether to say where each figure lies: on another device that means nothing.
    """
    heads = ["what", "expected"]
    rows = [[one.what, one.bounds] for one in EXPECTED]
    if found is not None:
        values = [one.find(found) for one in EXPECTED]
        heads.append("measured")
        for row, one, value in zip(rows, EXPECTED, values, strict=True):
            row.append("" if value is None else one.written(value))
        if judged:
            heads.append("")
            for row, one, value in zip(rows, EXPECTED, values, strict=True):
                row.append(one.verdict(value))
    return markdown(heads, rows)
