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

Device = Literal["H100", "H200"]
DEVICES: tuple[Device, ...] = get_args(Device)
Bounds = tuple[float | None, float | None]
"""Where a figure was expected to lie; one of the ends may be open."""


@dataclass(frozen=True)
class Found:
    """What the stages left."""

    records: Mapping[str, Sequence[Record]]
    """Records by stage."""
    metrics: Sequence[Mapping[str, Any]] = ()
    """Lines of the CIFAR-10 run's metrics.jsonl."""


Find = Callable[[Found], float | None]
"""Finds a measured figure; None where nothing was measured."""


class Expectation(NamedTuple):
    """A figure that was expected to lie within bounds, which differ by device."""

    what: str
    unit: str
    h100: Bounds
    h200: Bounds
    find: Find

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


def device_of(gpu: str) -> Device | None:
    """Return the device of which something is expected, by a GPU's name; None for others."""
    return next((device for device in DEVICES if device in gpu), None)


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


def _unit(unit: str) -> str:
    return unit if unit == "%" else f" {unit}".rstrip()


def _one(stage: str, name: str, value: Callable[[Record], float | None]) -> Find:
    """Return what finds a value of the record of some stage and name."""

    def find(found: Found) -> float | None:
        records = (one for one in found.records.get(stage, ()) if one.name == name)
        return next((value(one) for one in records), None)

    return find


def _rate(stage: str, name: str) -> Find:
    return _one(stage, name, lambda one: one.images_per_second)


def _milliseconds(stage: str, name: str, images: int) -> Find:
    """Return what finds the milliseconds that so many images take."""
    return _one(stage, name, lambda one: 1000 * images / one.images_per_second)


def _fact(stage: str, name: str, fact: str, scale: float = 1.0) -> Find:
    return _one(stage, name, lambda one: scale * one.facts[fact] if fact in one.facts else None)


def _times(one: Find, other: Find) -> Find:
    """Return what finds how many times as fast one is as another."""

    def find(found: Found) -> float | None:
        first, second = one(found), other(found)
        return first / second if first and second else None

    return find


def _best_jpeg_share(found: Found) -> float | None:
    records = found.records.get("jpeg-engine", ())
    rates = [one.images_per_second for one in records if one.name.startswith("dali, jpeg-engine ")]
    return max(rates, default=None)


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


def _same(what: str, unit: str, low: float | None, high: float | None, find: Find) -> Expectation:
    """Return what was expected of both devices alike."""
    return Expectation(what, unit, (low, high), (low, high), find)


_DEFAULT, _EAGER = _rate("step-512", "default"), _rate("step-512", "eager")
_AUTHORS = _rate("step-authors", "authors")
EXPECTED = (
    Expectation("copy within memory", "GB/s", (2850, 3150), (4100, 4500),
                _fact("machine", "copy within memory", "value")),
    _same("matrix product, bfloat16", "TFLOP/s", 750, 820,
          _fact("machine", "matrix product, bfloat16", "value")),
    Expectation("photometric stage of 512 images", "ms", (0.7, 1.1), (0.55, 0.9),
                _milliseconds("photometric-512", "fastsiam", 512)),
    Expectation("step of ResNet-50, batch 512, compiled", "images/s", (2000, 2600), (2400, 3300),
                _DEFAULT),
    Expectation("... not compiled", "images/s", (1400, 1800), (1700, 2300), _EAGER),
    Expectation("... as the paper's authors take it (H100: batch 256)", "images/s",
                (650, 850), (800, 1050), _AUTHORS),
    _same("... compiled, times the authors'", "", 2.7, 3.5, _times(_DEFAULT, _AUTHORS)),
    _same("... compiled, times not compiled", "", 1.25, None, _times(_DEFAULT, _EAGER)),
    _same("... peak memory in bfloat16", "GB", 45, 55,
          _fact("step-512", "default", "peak_gpu_bytes", 1e-9)),
    Expectation("... peak memory in float32 (H100: batch 256)", "GB", (40, 50), (80, 95),
                _fact("step-fp32", "fp32", "peak_gpu_bytes", 1e-9)),
    Expectation("dali alone, views of ImageNet's JPEGs, the best share of the JPEG engine",
                "images/s", (6000, 9000), (8000, 10000), _best_jpeg_share),
    _same("ffcv alone, crops", "images/s", 5000, 8000, _rate("loader", "ffcv crops")),
    _same("torchvision alone, views", "images/s", 900, 1200, _rate("loader", "torchvision views")),
    _same("training by dali, of ready tensors' speed", "%", 0.96, None,
          _one("train", "dali", lambda one: one.share_of_ceiling)),
    _same("training by ffcv, of ready tensors' speed", "%", 0.95, None,
          _one("train", "ffcv", lambda one: one.share_of_ceiling)),
    _same("cores busy while dali feeds training", "", None, 4.0,
          _one("train", "dali", lambda one: one.cores_busy)),
    _same("longest gap of the GPU, of a step", "%", None, 0.02, _gap),
    Expectation("step of CIFAR-10's ResNet-18, batch 512", "ms", (13, 18), (11, 16),
                _milliseconds("step-cifar10", "default", 512)),
    _same("800 epochs of CIFAR-10, extrapolated", "minutes", None, 25, _minutes),
    _same("kNN on CIFAR-10 after 25 of 800 epochs (k 200, T 0.2)", "top-1", 39, 56, _knn(25)),
    _same("... after 50", "top-1", 56, 66, _knn(50)),
    _same("... after 75", "top-1", 64, 73, _knn(75)),
    _same("... after 100", "top-1", 71, 77, _knn(100)),
    _same("... after 800", "top-1", 88, 92, _knn(800)),
)  # fmt: skip
"""All that was written down beforehand."""
