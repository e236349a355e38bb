"""`bench` of a training step on a GPU; `bench gpu` runs the other cases at full size."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastsiam.bench.cases import CASES
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.session import session
from tests.conftest import write_images

pytestmark = pytest.mark.gpu


def test_step_variants_report_ratio_and_peak_memory(tmp_path: Path) -> None:
    """Each variant is measured separately and reports its peak memory."""
    data = write_images(tmp_path / "data" / "train", classes=2, each=12, side=40)
    config = BenchConfig(
        data=str(data.parent), images=24, recipe="demo", batch=8, workers=1, repeats=1,
        device="cuda", variants=("nchw", "recompute", "cuda-graphs", "authors"),
    )  # fmt: skip
    with session(config) as bench_session:
        records = {one.name: one for one in CASES["step"].measure(bench_session)}
    assert {"nchw", "recompute", "cuda-graphs", "authors"} <= set(records)
    for one in records.values():
        assert one.facts["apart"] and one.facts["peak_gpu_bytes"] > 0 and one.ratio
    assert records["cuda-graphs"].config["step"]["cuda_graphs"]
