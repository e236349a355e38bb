"""The commands as users type them, on their data, with everything small."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastsiam.bench import suite
from fastsiam.bench.cases.decode import OUR_PART, OURS
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.measure import children
from fastsiam.bench.records import read
from fastsiam.errors import BackendError
from fastsiam.pipelines.backends import BACKENDS
from tests.bench.contenders import bench
from tests.processes import Forked, fastsiam
from tests.tiers import rest_slow


def test_nothing_measured_is_an_error(little: BenchConfig, monkeypatch: Any) -> None:
    monkeypatch.setattr("fastsiam.bench.cases.loader.measure", lambda _: [])
    with pytest.raises(BackendError, match="nothing could be measured"):
        suite.run("loader", little)


def test_a_variant_that_cannot_be_measured_ends_with_an_error(
    little: BenchConfig, tmp_path: Path, monkeypatch: Any
) -> None:
    """The others are measured and written all the same."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    config = replace(little, variants="default,eager", json=str(tmp_path / "out.json"), repeats=1)
    with pytest.raises(BackendError, match=r"not measured: default \(.*torch\.compile"):
        suite.run("step", config)
    assert "eager" in {one.name for one in read(tmp_path / "out.json")}


@pytest.mark.ffcv
@pytest.mark.dali
@pytest.mark.parametrize("everything", rest_slow([False, True]), ids=["some", "everything"])
def test_bench_alone_measures_all(everything: bool, little: BenchConfig, tmp_path: Path) -> None:
    """The command on a user's data, with everything small; at first with some pipelines, once."""
    file, repeats = tmp_path / "out.json", 2 if everything else 1
    others = {"native", "ffcv", "dali", "memory"} if everything else {"dali", "memory"}
    chosen = () if everything else ("--pipelines", ",".join(others))
    done = (fastsiam if everything else bench)(
        *(["bench"] if everything else []), *chosen,
        "--data", little.data, "--recipe", "demo", "--batch", "8", "--images", "24",
        "--workers", "1", "--repeats", str(repeats), "--device", "cpu", "--json", str(file),
        "--stored", "original,pixels256",
    )  # fmt: skip
    assert "| loader" in done.stdout and "dali views" in done.stdout
    assert "torchvision's loader delivers" in done.stdout.splitlines()[-1]
    assert not Path(next(w for w in done.stderr.split() if "fastsiam-bench-" in w)[:-1]).exists()
    records = read(file)
    assert records[0].command.startswith("fastsiam bench --")
    assert all(one.n == repeats and one.host_bytes > 0 for one in records)
    assert {one.case for one in records} == {"decode", "loader", "train"}

    loaded = {one.name: one for one in records if one.case in ("decode", "loader")}
    assert {"PIL", "torchvision.io", "libjpeg-turbo", "DALI", OURS, OUR_PART} <= set(loaded)
    assert {one.decoder for one in BACKENDS.values() if one.decoder} <= set(loaded)
    for pipeline in {"torchvision", *others}:
        assert {f"{pipeline} crops", f"{pipeline} views"} <= set(loaded)
    for pipeline in others - {"memory"}:
        assert {f"{pipeline} crops, pixels256", f"{pipeline} views, pixels256"} <= set(loaded)
    assert ("ffcv views" in loaded) == everything
    assert all(one.images == 24 for one in loaded.values())
    views, base = loaded["dali views"], loaded["torchvision views"]
    bare = {"PIL", "torchvision.io", "libjpeg-turbo", "DALI", "SPDL"}
    fastest = max(one.images_per_second for one in records if one.name in bare)
    assert views.ratio == pytest.approx(views.images_per_second / base.images_per_second)
    assert views.share_of_ceiling == pytest.approx(views.images_per_second / fastest)
    assert loaded["memory views"].share_of_ceiling is None
    assert loaded["dali views, pixels256"].share_of_ceiling is None
    assert base.facts["processes"] >= 2 and base.facts["workers"] == 1

    fed = {one.name: one for one in records if one.case == "train"}
    if everything:  # torchvision's and the fastest
        assert len({one.pipeline for one in fed.values()}) == 3
    else:
        assert set(fed) == {"synthetic", "torchvision", *others}
    assert fed["synthetic"].share_of_ceiling == 1 and fed["torchvision"].ratio_to_torchvision == 1
    assert all(0 <= one.facts["data_wait"] <= 1 for one in fed.values())
    assert fed["torchvision"].images == fed["torchvision"].facts["steps"] * 8
    used = [one.config["numerics"]["precision"] for one in fed.values()]
    assert len(set(used)) == 1 and used[0] in ("bf16", "fp32")  # what ran, not "auto"

    fastsiam("bench", "report", str(file), "--out", str(tmp_path / "report"))
    assert (tmp_path / "report" / "index.html").exists()


def test_a_signal_leaves_nothing_behind(little: BenchConfig, tmp_path: Path) -> None:
    temporary, said = tmp_path / "tmp", tmp_path / "said"
    temporary.mkdir()
    process = Forked(_measure_for_ever, little.data, said, environment={"TMPDIR": str(temporary)})
    try:
        deadline = time.monotonic() + 120
        while not said.exists() or "\nmeasuring" not in said.read_text():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        started = children(process.pid)
        assert started and any(temporary.glob("fastsiam-bench-*"))
    finally:
        process.send(signal.SIGTERM)
        code = process.wait(60).returncode
    assert code == 143
    assert not any(temporary.glob("fastsiam-bench-*"))
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{child}/exe").exists() for child in started):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _measure_for_ever(data: str, said: Path) -> None:
    """Run the command as users do: its contenders are started by itself."""
    from fastsiam.cli import main

    tempfile.tempdir = None  # it may be known already
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    sys.argv = [
        "fastsiam", "bench", "decode", "--data", data, "--images", "24", "--batch", "8",
        "--repeats", "100000", "--device", "cpu",
    ]  # fmt: skip
    main()


def test_wrong_usage(tmp_path: Path) -> None:
    assert "pipelines are some of" in fastsiam("bench", "--pipelines", "x", code=2).stderr
    assert "No such command" in fastsiam("bench", "fast", code=2).stderr
    missing = fastsiam("bench", "decode", "--data", str(tmp_path / "none"), code=1).stderr
    assert missing.splitlines()[-1].startswith("error: ") and "Traceback" not in missing
    assert "name files" in fastsiam("bench", "report", code=2).stderr
    said = fastsiam("bench", "machine", "--json", str(tmp_path), code=1).stderr
    assert said == f"error: cannot write {tmp_path}: it is a folder, or not yours to write\n"
