"""The expected figures are in the docs and can be read from the stages' records."""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import ClassVar

import pytest

from fastsiam.bench.config import GpuConfig
from fastsiam.bench.expected import EXPECTED, Found, table
from fastsiam.bench.gpu import stages
from fastsiam.bench.measurements import Record
from tests.bench.sample_records import build_record
from tests.conftest import ROOT


def test_docs_contain_table_of_expected_figures() -> None:
    text = (ROOT / "docs" / "benchmarks" / "gpu.md").read_text()
    assert table() in text, "docs/benchmarks/gpu.md: put in the table of bench/expected.py"


def test_expected_ranges_depend_on_device() -> None:
    results = Found({"step-512": [build_rate_record("step", "default", 2300)]})
    row, h100 = "| step of ResNet-50, batch 512, compiled |", "2,000 to 2,600 images/s"
    for gpu, expected in {
        "NVIDIA H100 80GB HBM3": f"{row} {h100} | 2,300 images/s | as expected |",
        "NVIDIA H200": f"{row} 2,400 to 3,300 images/s | 2,300 images/s | below |",
        "": f"{row} {h100} | 2,400 to 3,300 images/s | 2,300 images/s |",
    }.items():
        assert expected in " ".join(table(results, gpu=gpu).split())


def build_rate_record(case: str, name: str, images_per_second: float) -> Record:
    return build_record(name, case, 8 / images_per_second)


class CompleteResults(Found):
    """Results of a campaign that measured every figure."""

    asked: ClassVar[set[str]] = set()

    def value(self, stage: str, name: str, key: str = "images_per_second") -> float:
        self.asked.add(stage)
        return {"default": 2000.0, "eager": 1600.0, "authors": 500.0}.get(name, 256_000.0)

    def best(self, stage: str, prefix: str) -> float:
        return 9000.0


def test_every_expected_figure_is_found_in_stages(tmp_path: Path) -> None:
    metrics = [{"kind": "knn", "epoch": e, "top1": float(e)} for e in (25, 50, 75, 100, 800)]
    metrics.append({"kind": "train", "epoch": 100.0, "seconds": 150.0})
    values = {one.what: one.find(CompleteResults({}, metrics)) for one in EXPECTED}
    assert not any(map(isnan, values.values())), values
    assert values["photometric stage of 512 images"] == pytest.approx(2.0)
    assert values["... compiled, relative to the authors' code"] == pytest.approx(4.0)
    assert values["800 epochs of CIFAR-10, extrapolated"] == pytest.approx(20)
    assert values["... after 75"] == 75
    assert CompleteResults.asked <= {
        x.name for x in stages(GpuConfig(out=str(tmp_path)), gpu_bytes=8e10)
    }
    results = Found({"s": [build_rate_record("sweep", f"dali, {x}", x) for x in (65, 90)]})
    assert results.best("s", "dali") == pytest.approx(90) and isnan(results.best("s", "native"))
    assert results.value("s", "dali, 65") == pytest.approx(65) == results.value("s", "")
    assert table(Found({}), gpu="H200").count("not measured") == len(EXPECTED)
