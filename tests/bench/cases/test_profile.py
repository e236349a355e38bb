"""A trace has fastsiam's ranges alongside torch's, on one clock."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastsiam.bench.cases import profile
from fastsiam.bench.cases.profile import gpu_use
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.measurements import read
from fastsiam.config.recipes import RECIPES
from tests.bench.sample_records import bench
from tests.configs import with_settings


@pytest.mark.parametrize("pipeline", ["torchvision", "native"])
def test_trace_has_named_ranges(pipeline: str, bench_config: BenchConfig, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    result = bench(
        "profile", "--pipeline", pipeline, "--data", bench_config.data, "--recipe", "demo",
        "--batch", "2", "--steps", "3", "--workers", "1", "--device", "cpu", "--out", str(out),
        "--json", str(tmp_path / "record.json"),
    )  # fmt: skip
    events = json.loads(out.read_text())["traceEvents"]
    ours = [event for event in events if event.get("cat") == "fastsiam"]
    named = {event["name"] for event in ours}
    names = {"forward", "backward", "optimizer", "wait for data", "decode", "crop", "photometric"}
    assert names <= named and ("read" in named or pipeline == "native")  # native maps its files
    assert [event["name"] for event in ours].count("forward") == 3
    theirs = [e for e in events if e.get("name") == "aten::convolution_backward"]
    backward = [e for e in ours if e["name"] == "backward"]
    assert theirs and all(  # fastsiam's and torch's events share a clock
        any(b["ts"] - 2e3 <= e["ts"] <= b["ts"] + b["dur"] + 2e3 for b in backward) for e in theirs
    )
    (record,) = read(tmp_path / "record.json")
    assert (record.case, record.name, record.images, record.n) == ("profile", pipeline, 6, 1)
    assert record.config["data"].startswith("24 of the 24 images of data")
    assert record.cores_busy > 0 and record.host_bytes > 0
    assert "| backward" in result.stdout and "aten::convolution_backward" in result.stdout


def test_steps_with_prefetched_batches_are_not_traced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torchvision's workers prefetch two batches each."""
    taken: list[torch.Tensor] = []
    loader = SimpleNamespace(epoch=lambda _: iter(torch.ones(100)))
    setup = SimpleNamespace(loader=loader, place=SimpleNamespace(device=torch.device("cpu")))
    monkeypatch.setattr(profile, "training_setup", lambda _: setup)
    monkeypatch.setattr(profile, "step_of", lambda _: SimpleNamespace(take=taken.append))
    monkeypatch.setenv("FASTSIAM_TRACE", "")
    monkeypatch.setattr("importlib.reload", lambda _: None)
    for pipeline, warm in (("torchvision", 16), ("native", 6)):
        taken.clear()
        config = with_settings(RECIPES["demo"](), pipeline=pipeline, workers=8)
        profile.build_profile(config=config, steps=2, folder=str(tmp_path)).run()
        assert len(taken) == warm + 2


def test_gpu_busy_share_and_longest_gap() -> None:
    def kernel(start: float, end: float, cat: str = "kernel") -> dict[str, Any]:
        return {"ts": start, "dur": end - start, "cat": cat}

    events = [
        kernel(900, 1000),
        {"ts": 0, "dur": 1000, "cat": "cpu_op"},
        kernel(100, 400),
        kernel(200, 300),  # on another stream
        kernel(420, 700, "gpu_memcpy"),
        kernel(1000, 1100),
    ]
    use = gpu_use(events, 4)
    assert use["gpu_busy"] == pytest.approx(0.78)
    assert (use["longest_gap"], use["gap_of_a_step"]) == (2e-4, 0.8)
    assert not gpu_use(events[1:2], 4)
    starts = (0, 700, 1000, 1110, 1300, 1400)  # the profiler starts during the first step
    use = gpu_use([{"ts": ts, "dur": 100, "cat": "kernel"} for ts in starts], 3)
    assert use["longest_gap"] == pytest.approx(9e-5)
    assert use["gpu_busy"] == pytest.approx(600 / 1500)
