"""The commands as users type them, on their data, with everything small."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fastsiam.bench import suite
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.measure import children
from fastsiam.bench.records import read
from fastsiam.errors import BackendError
from fastsiam.pipelines.backends import BACKENDS
from tests.conftest import ROOT
from tests.processes import fastsiam


def test_nothing_measured_is_an_error(little: BenchConfig, monkeypatch: Any) -> None:
    monkeypatch.setattr("fastsiam.bench.cases.loader.measure", lambda _: [])
    with pytest.raises(BackendError, match="nothing could be measured"):
        suite.run("loader", little)


@pytest.mark.ffcv
@pytest.mark.dali
def test_bench_alone_measures_all(little: BenchConfig, tmp_path: Path) -> None:
    """The command as users type it, on their data, with everything small."""
    file = tmp_path / "out.json"
    done = fastsiam(
        "bench", "--data", little.data, "--recipe", "demo", "--batch", "8", "--images", "24",
        "--workers", "1", "--repeats", "2", "--device", "cpu", "--json", str(file),
        "--stored", "original,pixels256", "--variants", "eager,authors",
    )  # fmt: skip
    assert "| loader" in done.stdout and "ffcv views" in done.stdout
    assert "torchvision's loader delivers" in done.stdout.splitlines()[-1]
    assert not Path(next(w for w in done.stderr.split() if "fastsiam-bench-" in w)[:-1]).exists()
    records = read(file)
    assert records[0].command.startswith("fastsiam bench --data")
    assert all(one.n == 2 and one.host_bytes > 0 for one in records)
    cases = {one.case for one in records}
    assert cases == {"decode", "loader", "photometric", "train", "step"}

    loaded = {one.name: one for one in records if one.case in ("decode", "loader")}
    assert {"PIL", "torchvision.io", "libjpeg-turbo", "DALI"} <= set(loaded)
    assert {one.decoder for one in BACKENDS.values() if one.decoder} <= set(loaded)
    for pipeline in ("torchvision", "ffcv", "dali", "memory"):
        assert {f"{pipeline} crops", f"{pipeline} views"} <= set(loaded)
    assert {"ffcv views, pixels256", "dali crops, pixels256"} <= set(loaded)
    assert all(one.images == 24 for one in loaded.values())
    views, base = loaded["ffcv views"], loaded["torchvision views"]
    fastest = max(one.images_per_second for one in records if one.case == "decode")
    assert views.ratio == pytest.approx(views.images_per_second / base.images_per_second)
    assert views.share_of_ceiling == pytest.approx(views.images_per_second / fastest)
    assert loaded["memory views"].share_of_ceiling is None
    assert loaded["ffcv views, pixels256"].share_of_ceiling is None
    assert base.facts["processes"] >= 2 and base.facts["workers"] == 1

    stage = {one.name: one for one in records if one.case == "photometric"}
    assert stage["one pass over the bytes"].share_of_ceiling == 1
    assert stage["fastsiam"].ratio and stage["reference, in torch operations"].ratio == 1

    steps = {one.name: one for one in records if one.case == "step"}
    assert set(steps) == {"eager", "authors"} and steps["authors"].ratio == 1
    assert steps["eager"].facts["batch"] == 8 and steps["eager"].ceiling == "the roofline"
    assert steps["eager"].config["step"]["compile"] == "off"
    assert steps["authors"].config["precision"] == "fp32"
    fed = {one.name: one for one in records if one.case == "train"}
    assert set(fed) == {"synthetic", "torchvision", "ffcv", "ffcv, pixels256", "dali", "memory"}
    assert fed["synthetic"].share_of_ceiling == 1 and fed["torchvision"].ratio_to_torchvision == 1
    assert all(0 <= one.facts["data_wait"] <= 1 for one in fed.values())
    assert fed["torchvision"].images == fed["torchvision"].facts["steps"] * 8
    used = [one.config["numerics"]["precision"] for one in fed.values()]
    assert len(set(used)) == 1 and used[0] in ("bf16", "fp32")  # what ran, not "auto"

    fastsiam("bench", "report", str(file), "--out", str(tmp_path / "report"))
    assert (tmp_path / "report" / "index.html").exists()


def test_a_signal_leaves_nothing_behind(little: BenchConfig, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "fastsiam", "bench", "decode", "--data", little.data]
    with subprocess.Popen(
        [*command, "--images", "24", "--batch", "8", "--repeats", "100000", "--device", "cpu"],
        stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as process:  # fmt: skip
        assert process.stderr
        try:
            assert any(line.startswith("measuring") for line in process.stderr)
            started = children(process.pid)
            assert started and any(temporary.glob("fastsiam-bench-*"))
            process.terminate()
            assert process.wait(60) == 143
        finally:
            process.kill()
    assert not any(temporary.glob("fastsiam-bench-*"))
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{child}/exe").exists() for child in started):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_wrong_usage(tmp_path: Path) -> None:
    assert "pipelines are some of" in fastsiam("bench", "--pipelines", "x", code=2).stderr
    assert "No such command" in fastsiam("bench", "fast", code=2).stderr
    missing = fastsiam("bench", "decode", "--data", str(tmp_path / "none"), code=1).stderr
    assert missing.splitlines()[-1].startswith("error: ") and "Traceback" not in missing
    assert "name files" in fastsiam("bench", "report", code=2).stderr
    said = fastsiam("bench", "machine", "--json", str(tmp_path), code=1).stderr
    assert said == f"error: cannot write {tmp_path}: it is a folder, or not yours to write\n"
