"""Runs as programs: signals to one process and to ranks, the launcher, torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastsiam.cli import main
from fastsiam.config import TrainConfig
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from tests.configs import flags, with_settings
from tests.conftest import ROOT
from tests.processes import Forked, command, fastsiam
from tests.tiers import slow
from tests.train.runs import history


@pytest.mark.parametrize(
    ("processes", "number", "code"),
    [
        (1, signal.SIGTERM, 143),
        (1, signal.SIGUSR1, 138),
        (2, signal.SIGTERM, 143),
        slow((2, signal.SIGINT, 130)),
        slow((1, signal.SIGHUP, 129)),
    ],
)
def test_signals_save_and_leave(
    processes: int, number: int, code: int, small: TrainConfig, tmp_path: Path
) -> None:
    config = with_settings(
        small, epochs=3000, save_every=10**6, knn_every=0, pipeline="torchvision", gpus=processes
    )
    run = tmp_path / "run"
    process = command("train", *flags(config), "--workers", "1", session=True)
    while len(history(run)) < 5:
        assert process.poll() is None
        time.sleep(0.05)
    if number in (signal.SIGINT, signal.SIGHUP):
        os.killpg(process.pid, number)  # as a terminal does: to every process of the group
    else:
        process.send(number)
    done = process.wait(60)
    errors = done.stderr
    assert done.returncode == code, errors
    assert f"{signal.Signals(number).name}: stopped after step" in errors
    assert "Traceback" not in errors
    state = checkpoints.load(run)
    assert state.step >= 5 and state.step == read_metrics(run)[-1]["step"]


def _under_nohup(*arguments: str) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.argv = ["fastsiam", *arguments]
    main()


def test_under_nohup_a_closed_terminal_is_nothing(small: TrainConfig, tmp_path: Path) -> None:
    config = with_settings(
        small, epochs=3000, save_every=10**6, knn_every=0, pipeline="torchvision", gpus=2
    )
    run = tmp_path / "run"
    process = Forked(_under_nohup, "train", *flags(config), "--workers", "1", session=True)
    for number in (signal.SIGHUP, signal.SIGTERM):
        seen = len(history(run))
        while len(history(run)) < seen + 5:
            assert process.poll() is None, process.wait().stderr
            time.sleep(0.05)
        os.killpg(process.pid, number)
    done = process.wait(60)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "SIGTERM: stopped after step" in done.stderr and "SIGHUP" not in done.stderr


def test_a_signal_to_launcher_and_ranks_at_once_still_saves(
    small: TrainConfig, tmp_path: Path
) -> None:
    """As a scheduler does: every process of the job gets SIGTERM, so the ranks get it twice."""
    config = with_settings(
        small, epochs=3000, save_every=10**6, knn_every=0, pipeline="torchvision", gpus=2
    )
    run = tmp_path / "run"
    process = command("train", *flags(config), session=True)
    while len(history(run)) < 5:
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    errors = process.wait(60).stderr
    assert "SIGTERM: stopped after step" in errors
    assert checkpoints.load(run).step >= 5


def test_two_cpu_ranks_by_the_launcher(small: TrainConfig, tmp_path: Path) -> None:
    """``--gpus 2 --device cpu`` gives the losses of one process, to float32's rounding."""
    config = with_settings(small, epochs=2)
    fastsiam("train", *flags(config), "--out", str(tmp_path / "one"))
    fastsiam("train", *flags(config), "--gpus", "2", "--out", str(tmp_path / "two"))
    one, two = (
        [line for line in read_metrics(tmp_path / name) if line["kind"] != "initial"]
        for name in ("one", "two")
    )
    assert [line["kind"] for line in one] == [line["kind"] for line in two]
    for a, b in zip(one, two, strict=True):
        if a["kind"] == "train":
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-3)
            assert a["z_std"] == pytest.approx(b["z_std"], abs=1e-3)
        else:
            assert a["bank"] == b["bank"] == 24


def test_plain_torchrun_works(small: TrainConfig, tmp_path: Path) -> None:
    config = with_settings(small, epochs=1, knn_every=0)
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    line += ["-m", "fastsiam", "train", *flags(config), "--out", str(tmp_path / "run")]
    subprocess.run(line, cwd=ROOT, check=True, capture_output=True, timeout=120)
    assert len(history(tmp_path / "run")) == 3
