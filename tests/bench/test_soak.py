"""A soak finds every difference between two runs, and leftover files and processes."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastsiam.bench import soak as module
from fastsiam.bench.config import SoakConfig
from fastsiam.bench.soak import FAULTS, Fault, Run, Soak, as_markdown, read_record, soak
from fastsiam.config import TrainConfig
from fastsiam.config.settings_files import parse_assignments
from fastsiam.errors import BackendError, FastSiamError
from fastsiam.pipelines.backends import Backend
from fastsiam.run.checkpoint import last
from fastsiam.run.log import read_metrics
from fastsiam.train.command import train_here
from tests.commands import check_usage
from tests.configs import with_settings


@pytest.mark.slow
def test_soak_for_90_seconds(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    config = SoakConfig(
        minutes=1.5, seed=4, pipelines=("torchvision", "memory"), ranks=2, seconds=20, every=6,
        out=str(out),
    )  # fmt: skip
    assert soak(config) == out
    record = read_record(out)
    assert not record["findings"] and record["ranks"] == 2 and record["minutes"] > 0
    runs = record["runs"]
    assert any(run["faults"] for run in runs)  # not in all: ``memory`` has no worker to kill
    assert all(run["steps"] >= 30 and not run["left"] for run in runs)
    assert {fault for run in runs for fault in run["faults"]} <= {one.name for one in FAULTS}


def build_run(out: Path) -> Run:
    return Run(out, out.parent, pipeline="memory", steps=12, ranks=1, seed=0)


def test_soak_detects_differences_corruption_and_leftovers(
    small: TrainConfig, tmp_path: Path
) -> None:
    config = with_settings(small, knn_every=0, save_every=5)
    one = train_here(with_settings(config, out=str(tmp_path / "one")), "imagenet")
    calm = build_run(one)

    other = Path(shutil.copytree(one, tmp_path / "other"))
    lines = read_metrics(one)

    def difference(*changed: dict[str, Any]) -> str:
        """Return how a run with these log lines differs from the undisturbed run."""
        text = "".join(json.dumps(line) + "\n" for line in changed)
        (other / "metrics.jsonl").write_text(text)
        return build_run(other).difference(calm)

    *before, fourth = lines[:4]
    assert difference(*lines) == ""
    message = difference(*before, fourth | {"loss": fourth["loss"] + 1e-7}, *lines[4:])
    assert message.startswith("line 4: ")
    assert difference(*lines[:-1]).startswith("line 13: None for ")
    assert difference(*before, fourth | {"seconds": 1e9}, *lines[4:]) == ""
    assert difference({"kind": "alarm", "step": 0, "epoch": 0.0, "name": "disk"}, *lines) == ""
    module._flip_a_bit(other, random.Random(1))
    pairs = zip(last(one).read_bytes(), last(other).read_bytes(), strict=True)
    assert sum((x ^ y).bit_count() for x, y in pairs) == 1
    assert "is corrupt" in difference(*lines)

    for name in ("lock", "checkpoints/last.pt.tmp"):
        (one / name).touch()
    variables = {**os.environ, "FASTSIAM_SOAK": str(one)}
    process = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=variables
    )
    try:
        left = [f"process {process.pid}", "checkpoints/last.pt.tmp", "lock"]
        assert calm.left_behind(0, files=True) == left
        assert calm.left_behind(0, files=False) == left[:1]
    finally:
        process.kill()
        process.wait()


def test_command_of_soak_run_parses(tmp_path: Path) -> None:
    for pipeline in ("memory", "synthetic"):
        run = Run(tmp_path / "run", tmp_path, pipeline, steps=300, ranks=4, seed=1)
        check_usage(run.command[3:])
        words = run.command
        assignments = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        settings = parse_assignments(assignments)
    assert settings["epochs"] == "1" and settings["gpus"] == "4"


def test_faults_are_injected_equally_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if one fault is impossible: many pipelines have no loader workers."""
    tried: list[Fault] = []

    def inject(fault: Fault, *_: object) -> None:
        tried.append(fault)
        if fault.target == "worker":
            raise IndexError

    monkeypatch.setattr(Fault, "inject", inject)
    run: Any = SimpleNamespace(
        start=lambda: None,
        kill=lambda: None,
        child=SimpleNamespace(wait=lambda _: None if len(tried) < 3 * len(FAULTS) else 0),
    )
    work = Soak(SoakConfig(seed=4), tmp_path, math.inf)
    monkeypatch.setattr(work, "_finish", lambda *_: 0)
    monkeypatch.setattr(work, "_note", lambda *_: None)
    injected_names = work._hurt(run, random.Random(0))
    assert all(injected_names.count(x.name) == (0 if x.target == "worker" else 3) for x in FAULTS)


@pytest.mark.parametrize(("code", "flips"), [(0, 0), (137, 1)])
def test_checkpoint_of_finished_run_stays_intact(
    code: int, flips: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a run is not started again, so it would differ from the undisturbed one."""
    flipped: list[Path] = []
    monkeypatch.setattr(module, "_flip_a_bit", lambda out, _: flipped.append(out))
    child = SimpleNamespace(wait=lambda _: code)
    run: Any = SimpleNamespace(out=tmp_path, kill=lambda: None, child=child)
    FAULTS[-1].inject(run, random.Random(0))
    assert len(flipped) == flips


def test_finding_is_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Soak, "run", lambda work: work.findings.append("memory: it hangs"))
    out = tmp_path / "soak.json"
    with pytest.raises(FastSiamError, match=r"1 findings, the first: memory.*; see .*soak\.json"):
        soak(SoakConfig(out=str(out)))
    record = read_record(out)
    assert record["findings"] == ["memory: it hangs"]
    assert as_markdown(record).endswith("\n\n- memory: it hangs")


def test_missing_backend_or_unwritable_output_is_rejected_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Soak, "run", lambda work: pytest.fail("it runs"))
    out = tmp_path / "soak.json"
    out.write_text("{}")
    monkeypatch.setattr(Backend, "_module", lambda backend: import_module("missing_package"))
    with pytest.raises(BackendError, match=r"^the ffcv pipeline cannot be loaded .* install it "):
        soak(SoakConfig(out=str(out), pipelines=("ffcv",)))
    assert out.read_text() == "{}"
    with pytest.raises(FastSiamError, match=r"^cannot write "):
        soak(SoakConfig(out=str(tmp_path)))
