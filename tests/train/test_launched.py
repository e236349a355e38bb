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
from tests.processes import Forked, command, fork_programs
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
    if processes == 1:
        process.send(number)
    else:  # as a terminal or a scheduler does: to the launcher, which forwards it, and to ranks
        os.killpg(process.pid, number)
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
    fork_programs()
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
