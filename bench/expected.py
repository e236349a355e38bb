"""Performance expected on an H100 and an H200, written down before fastsiam had run on any GPU.

Each figure was calculated or taken from published measurements; docs/benchmarks/gpu.md says how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan, nan
from typing import Any, NamedTuple

from fastsiam.bench.measurements import Record
from fastsiam.bench.tables import number
from fastsiam.markdown import markdown

DEVICES = ("H100", "H200")
Bounds = tuple[float, float]
"""Lower and upper bound of an expected figure; inf leaves one end open."""


@dataclass(frozen=True)
class Found:
    """Results of the stages. Figures that were not measured are nan."""

    records: Mapping[str, Sequence[Record]]
    """Records by stage."""
    metrics: Sequence[Mapping[str, Any]] = ()
    """Lines of the CIFAR-10 run's metrics.jsonl."""

    def value(self, stage: str, name: str, key: str = "images_per_second") -> float:
        """Return a fact or field of a stage's record; of its first record if ``name`` is empty."""
        for one in self.records.get(stage, ()):
            if name in ("", one.name):
                value = one.facts.get(key, getattr(one, key, None))
                return nan if value is None else float(value)
        return nan

    def best(self, stage: str, prefix: str) -> float:
        """Return the highest images/s of a stage's records whose names start with ``prefix``."""
        records = [one for one in self.records.get(stage, ()) if one.name.startswith(prefix)]
        return max((one.images_per_second for one in records), default=nan)

    def minutes(self) -> float:
        """Estimate the minutes for 800 epochs from the run so far, without evaluations."""
        lines = [line for line in self.metrics if line["kind"] == "train"]
        if not lines or lines[-1]["epoch"] < 1:
            return nan
        return float(lines[-1]["seconds"] / lines[-1]["epoch"] * 800 / 60)

    def knn(self, epoch: int) -> float:
        """Return the kNN accuracy after an epoch."""
        lines = (line for line in self.metrics if line["kind"] == "knn")
        return next((line["top1"] for line in lines if line["epoch"] == epoch), nan)


class Expectation(NamedTuple):
    """A figure and its expected bounds, which can differ by device."""

    what: str
    unit: str
    """Text that follows the figure, such as " GB/s" or "%"."""
    h100: Bounds
    h200: Bounds | None
    """None: the same as on an H100."""
    find: Callable[[Found], float]

    def bounds(self, device: str) -> Bounds:
        """Return the bounds on a device."""
        return self.h200 if self.h200 and device == "H200" else self.h100

    def bounds_text(self, device: str) -> str:
        """Format the bounds on a device for display."""
        low, high = self.bounds(device)
        if high == inf:
            return f"at least {low:,g}{self.unit}"
        if low == -inf:
            return f"at most {high:,g}{self.unit}"
        return f"{low:,g} to {high:,g}{self.unit}"

    def verdict(self, value: float, device: str) -> str:
        """Describe how a measured value compares with the bounds, such as "as expected"."""
        low, high = self.bounds(device)
        if isnan(value):
            return "not measured"
        if value < low:
            return "below"
        return "above" if value > high else "as expected"


def table(found: Found | None = None, *, gpu: str = "") -> str:
    """Return the expectations as a Markdown table, next to the results of the stages.

    If ``gpu`` names one of ``DEVICES``, the table also says whether figures are within its bounds.
    """
    device = next((device for device in DEVICES if device in gpu), "")
    expected = (device,) if device else DEVICES
    heads = ["what", *(f"expected of an {one}" for one in expected)]
    rows = [[one.what, *map(one.bounds_text, expected)] for one in EXPECTED]
    if found is not None:
        heads += ["measured", ""] if device else ["measured"]
        for row, one in zip(rows, EXPECTED, strict=True):
            value = one.find(found)
            row.append("" if isnan(value) else number(value) + one.unit)
            if device:
                row.append(one.verdict(value, device))
    return markdown(heads, rows)


EXPECTED = (
    Expectation("copy within memory", " GB/s", (2850, 3150), (4100, 4500),
                lambda f: f.value("machine", "copy within memory", "value")),
    Expectation("matrix product, bfloat16", " TFLOP/s", (750, 820), None,
                lambda f: f.value("machine", "matrix product, bfloat16", "value")),
    Expectation("photometric stage of 512 images", " ms", (0.7, 1.1), (0.55, 0.9),
                lambda f: 512_000 / f.value("photometric-512", "fastsiam")),
    Expectation("step of ResNet-50, batch 512, compiled", " images/s", (2000, 2600), (2400, 3300),
                lambda f: f.value("step-512", "default")),
    Expectation("... not compiled", " images/s", (1400, 1800), (1700, 2300),
                lambda f: f.value("step-512", "eager")),
    Expectation("... as in the paper authors' code (H100: batch 256)", " images/s",
                (650, 850), (800, 1050), lambda f: f.value("step-authors", "authors")),
    Expectation("... compiled, relative to the authors' code", "", (2.7, 3.5), None,
                lambda f: f.value("step-512", "default") / f.value("step-authors", "authors")),
    Expectation("... compiled, relative to not compiled", "", (1.25, inf), None,
                lambda f: f.value("step-512", "default") / f.value("step-512", "eager")),
    Expectation("... peak memory in bfloat16", " GB", (45, 55), None,
                lambda f: f.value("step-512", "default", "peak_gpu_bytes") / 1e9),
    Expectation("... peak memory in float32 (H100: batch 256)", " GB", (40, 50), (80, 95),
                lambda f: f.value("step-fp32", "fp32", "peak_gpu_bytes") / 1e9),
    Expectation("dali alone, views of ImageNet's JPEGs, the best share of the JPEG engine",
                " images/s", (6000, 9000), (8000, 10000), lambda f: f.best("jpeg-engine", "dali")),
    Expectation("native alone, crops", " images/s", (5000, 8000), None,
                lambda f: f.value("loader", "native crops")),
    Expectation("torchvision alone, views", " images/s", (900, 1200), None,
                lambda f: f.value("loader", "torchvision views")),
    Expectation("training with dali, relative to ready tensors", "%", (96, inf), None,
                lambda f: 100 * f.value("train", "dali", "share_of_ceiling")),
    Expectation("training with native, relative to ready tensors", "%", (95, inf), None,
                lambda f: 100 * f.value("train", "native", "share_of_ceiling")),
    Expectation("cores busy while dali feeds training", "", (-inf, 4.0), None,
                lambda f: f.value("train", "dali", "cores_busy")),
    Expectation("longest idle time of the GPU, as a share of a step", "%", (-inf, 2), None,
                lambda f: 100 * f.value("profile", "", "gap_of_a_step")),
    Expectation("step of CIFAR-10's ResNet-18, batch 512", " ms", (13, 18), (11, 16),
                lambda f: 512_000 / f.value("step-cifar10", "default")),
    Expectation("800 epochs of CIFAR-10, extrapolated", " minutes", (-inf, 25), None,
                Found.minutes),
    Expectation("kNN on CIFAR-10 after 25 of 800 epochs (k 200, T 0.2)", " top-1", (39, 56), None,
                lambda f: f.knn(25)),
    Expectation("... after 50", " top-1", (56, 66), None, lambda f: f.knn(50)),
    Expectation("... after 75", " top-1", (64, 73), None, lambda f: f.knn(75)),
    Expectation("... after 100", " top-1", (71, 77), None, lambda f: f.knn(100)),
    Expectation("... after 800", " top-1", (88, 92), None, lambda f: f.knn(800)),
)  # fmt: skip
"""All expectations, in the order of the table."""
