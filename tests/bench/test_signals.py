"""Signals end the processes that benchmarks started, and benchmarks remove their temporary files.

A second signal during the cleanup changes nothing. Children have their own process groups, so that
signals from a terminal do not reach them.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from fastsiam.bench import gpu, soak
from fastsiam.bench.config import GpuConfig, SoakConfig
from fastsiam.bench.gpu import Stage
from tests.bench.sample_records import wait_for_text
from tests.processes import Forked


def sleep_for_ever(pid: Path) -> str:
    """Return Python code that writes its process ID and sleeps."""
    return f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"


def run_campaign(pid: Path, *, ignores_sigterm: bool = False) -> None:
    """Run a campaign of one stage, which can ignore SIGTERM, like its child process."""
    code = sleep_for_ever(pid)
    if ignores_sigterm:
        code = (
            "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            f"print('begun'); subprocess.run([sys.executable, '-c', {code!r}])"
        )
    vars(gpu).update(stages=lambda *_, **__: [Stage("one", 1, ("-c", code))], _GRACE=3.0)
    gpu.run(GpuConfig(out=str(pid.parent), device="cpu"))


def run_stubborn_campaign(pid: Path) -> None:
    run_campaign(pid, ignores_sigterm=True)


def run_soak(pid: Path) -> None:
    vars(soak)["make_images"] = lambda *_: None
    kill = soak.Run.kill

    def kill_late(run: soak.Run) -> None:
        while not pid.with_name("all-sent").exists():
            time.sleep(0.02)
        kill(run)

    vars(soak)["Run"].kill = kill_late
    soak.Run.command = [sys.executable, "-c", sleep_for_ever(pid)]  # type: ignore[assignment, method-assign]
    soak.soak(SoakConfig(out=str(pid.with_name("soak.json")), pipelines=("memory",)))


def run_with_own_folder(work: Callable[[Path], None], pid: Path) -> None:
    tempfile.tempdir = None  # the value of the parent may be cached
    work(pid)


@pytest.mark.parametrize(
    ("work", "signals", "code"),
    [
        (run_soak, (signal.SIGINT, signal.SIGTERM), 128 + signal.SIGINT),
        (run_stubborn_campaign, (signal.SIGTERM, signal.SIGTERM), 128 + signal.SIGTERM),
        (run_campaign, (signal.SIGKILL,), -signal.SIGKILL),
    ],
)
def test_signal_ends_child_processes(
    work: Callable[[Path], None], signals: Sequence[int], code: int, tmp_path: Path
) -> None:
    pid, folders = tmp_path / "pid", tmp_path / "folders"
    folders.mkdir()
    process = Forked(run_with_own_folder, work, pid, environment={"TMPDIR": str(folders)})
    child = psutil.Process(int(wait_for_text(pid, process)))
    try:
        for number in signals:
            process.send(number)
            time.sleep(0.5)
        (tmp_path / "all-sent").touch()
        assert process.wait(60).returncode == code
        assert not any(folders.iterdir())
        assert not psutil.wait_procs([child], timeout=30)[1]
    finally:
        if child.is_running():
            child.kill()
