"""What was expected stands in the docs, and is found in what the stages leave."""

from __future__ import annotations

from dataclasses import replace
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest

from fastsiam.bench.config import GpuConfig
from fastsiam.bench.expected import EXPECTED, Expectation, Found, table
from fastsiam.bench.gpu import stages
from fastsiam.bench.records import Record
from tests.bench.made import made
from tests.conftest import ROOT


def test_the_docs_have_the_table() -> None:
    text = (ROOT / "docs" / "benchmarks" / "gpu.md").read_text()
    assert table() in text, "docs/benchmarks/gpu.md: put in the table of bench/expected.py"


def test_bounds_and_verdicts() -> None:
    one = Expectation("a thing", "ms", (2.0, 4.0), (9.0, None), lambda _: nan)
    assert one.bounds_text("H100") == "2 to 4 ms" and one.bounds_text("H200") == "at least 9 ms"
    assert [one.verdict(x, "H100") for x in (1, 3, 5, nan)] == [
        "below", "as expected", "above", "not measured",
    ]  # fmt: skip
    share = Expectation("a share", "%", (None, 0.97), (None, 0.97), lambda _: nan)
    assert (share.bounds_text("H200"), share.value_text(0.9612)) == ("at most 97%", "96.1%")


def test_figures_are_judged_by_the_device() -> None:
    found = Found({"step-512": [rate("step", "default", 2300)]})
    row, h100 = "| step of ResNet-50, batch 512, compiled |", "2,000 to 2,600 images/s"
    for gpu, expected in {
        "NVIDIA H100 80GB HBM3": f"{row} {h100} | 2,300 images/s | as expected |",
        "NVIDIA H200": f"{row} 2,400 to 3,300 images/s | 2,300 images/s | below |",
        "": f"{row} {h100} | 2,400 to 3,300 images/s | 2,300 images/s |",
    }.items():
        assert expected in " ".join(table(found, gpu=gpu).split())


def rate(case: str, name: str, images_per_second: float, **more: Any) -> Record:
    """Return a record of some speed; ``made`` has 8 images, one repeat."""
    return made(name, case, wall=8 / images_per_second, **more)


def test_every_figure_is_found(tmp_path: Path) -> None:
    """By the names of the stages as they are, and of the records as the cases make them."""
    peak = {"peak_gpu_bytes": 50e9}
    records = {
        "machine": [
            made("copy within memory", "machine", facts={"value": 4300.0}),
            made("matrix product, bfloat16", "machine", facts={"value": 790.0}),
        ],
        "photometric-512": [rate("photometric", "fastsiam", 256_000)],
        "step-512": [
            rate("step", "default", 2000, facts=peak),
            rate("step", "eager", 1600),
        ],
        "step-authors": [rate("step", "authors", 500)],
        "jpeg-engine": [
            rate("sweep", f"dali, jpeg-engine {share}", 100 * share) for share in (65, 90)
        ],
        "step-fp32": [rate("step", "fp32", 700, facts={"peak_gpu_bytes": 100e9})],
        "step-cifar10": [rate("step", "default", 512 / 0.015)],
        "loader": [
            rate("loader", "native crops", 6000),
            rate("loader", "torchvision views", 1000),
        ],
        "train": [
            replace(rate("train", name, 1900), share_of_ceiling=0.98, cores_busy=3.5)
            for name in ("dali", "native")
        ],
        "profile": [made("dali", "profile", facts={"gap_of_a_step": 0.011})],
    }
    metrics = [{"kind": "knn", "epoch": e, "top1": float(e)} for e in (25, 50, 75, 100, 800)]
    metrics.append({"kind": "train", "epoch": 100.0, "seconds": 150.0})
    found = Found(records, metrics)
    values = {one.what: one.find(found) for one in EXPECTED}
    assert not any(map(isnan, values.values())), values
    assert values["photometric stage of 512 images"] == pytest.approx(2.0)
    assert values["... compiled, relative to the authors' code"] == pytest.approx(4.0)
    assert values["... compiled, relative to not compiled"] == pytest.approx(1.25)
    assert values["... peak memory in float32 (H100: batch 256)"] == pytest.approx(100)
    assert values["step of CIFAR-10's ResNet-18, batch 512"] == pytest.approx(15)
    assert values["800 epochs of CIFAR-10, extrapolated"] == pytest.approx(20)
    assert values["... after 75"] == 75
    names = {one.name for one in stages(GpuConfig(out=str(tmp_path)), gpu_bytes=80e9)}
    assert set(records) - {"jpeg-engine"} <= names  # which needs DALI
    best = "dali alone, views of ImageNet's JPEGs, the best share of the JPEG engine"
    assert values[best] == pytest.approx(9000)
    assert table(Found({}), gpu="H200").count("not measured") == len(EXPECTED)
