"""Worker processes, and the signals that stop a conversion."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from fastsiam.errors import Interrupted, WorkerError
from fastsiam.pipelines.convert.command import stoppable
from fastsiam.pipelines.workers import process_pool
from fastsiam.signals import ECHO, STOPS
from tests.conftest import ROOT
from tests.processes import Forked, signals_handled, wait_until


def test_signal_during_worker_start_kills_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the command without an error of the pool, and workers are killed."""
    before = multiprocessing.active_children()
    start = Mock(side_effect=Interrupted("stopped", signal.SIGINT))
    monkeypatch.setattr("concurrent.futures.process._ExecutorManagerThread.start", start)
    with pytest.raises(Interrupted), process_pool(2, abs) as run:
        list(run([1]))
    for worker in set(multiprocessing.active_children()) - set(before):
        worker.join(30)
        assert worker.exitcode == -signal.SIGKILL


def _mark_and_sleep(path: str) -> None:
    Path(path).with_name(f"{os.getpid()}.worker").touch()
    time.sleep(600)


def _run_two_workers(folder: str, forks: bool) -> None:
    with process_pool(2, _mark_and_sleep, forks=forks) as run:
        list(run([f"{folder}/a", f"{folder}/b"]))


def test_workers_exit_with_parent(tmp_path: Path) -> None:
    """Whatever ends the parent, even if a fork server starts the workers, as for remote data."""
    processes = []
    for number, forks in ((signal.SIGKILL, True), (signal.SIGTERM, True), (signal.SIGKILL, False)):
        (folder := tmp_path / f"{number.name}-{forks}").mkdir()
        processes.append((Forked(_run_two_workers, str(folder), forks), number))
    for process, _ in processes:
        wait_until(process, lambda: len(list(tmp_path.glob("*/*.worker"))) == 2 * len(processes))
    workers = [psutil.Process(int(path.stem)) for path in tmp_path.glob("*/*.worker")]
    for process, number in processes:
        process.send(number)
    assert not psutil.wait_procs(workers, timeout=60)[1]


@pytest.mark.parametrize("forks", [True, False])
def test_workers_ignore_signals_meant_for_parent(forks: bool) -> None:
    """A terminal sends SIGINT and SIGHUP to all processes of a command; SLURM sends SIGUSR1."""
    numbers = [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]
    with process_pool(1, signal.raise_signal, forks=forks) as run:
        assert list(run(numbers)) == [None, None, None]


def test_killed_worker_raises_error_with_advice() -> None:
    error = pytest.raises(WorkerError, match=r"a worker process died .*: lower --workers, or give")
    with error, process_pool(2, signal.raise_signal) as run:
        list(run([signal.SIGKILL] * 5))


def test_fork_server_ignores_sigint_during_import(tmp_path: Path) -> None:
    """The fork server ignores the signal: only the command reports that it stops."""
    sent = tmp_path / "sent"
    (tmp_path / "slow.py").write_text(
        "import time; from pathlib import Path; print('importing', flush=True)\n"
        f"while not Path({str(sent)!r}).exists(): time.sleep(0.02)"
    )
    script = (
        "import time\n"
        "from fastsiam.pipelines.workers import server_context\n"
        "server_context('slow')\n"
        "try: print('started', flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt: time.sleep(3)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        process_group=0,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    assert {process.stdout.readline() for _ in range(2)} == {"importing\n", "started\n"}
    os.killpg(process.pid, signal.SIGINT)
    sent.touch()
    assert process.communicate(timeout=60) == ("", "") and process.returncode == 0


def _stop_slowly(folder: Path) -> None:
    """Take a minute to stop, like a process that waits for a lost disk."""
    with stoppable("on"):
        try:
            (folder / "begun").touch()
            time.sleep(60)
        finally:
            (folder / "leaving").touch()
            time.sleep(60)


def test_second_sigint_ends_conversion_immediately(tmp_path: Path) -> None:
    process = Forked(_stop_slowly, tmp_path)
    for mark in ("begun", "leaving"):
        wait_until(process, (tmp_path / mark).exists)
        time.sleep(2 * ECHO if mark == "leaving" else 0)
        process.send(signal.SIGINT)
    assert process.wait(30).returncode == 128 + signal.SIGINT


def test_ignored_signals_stay_ignored() -> None:
    with signals_handled(signal.SIG_IGN, *STOPS), stoppable("on"):
        for number in STOPS:
            signal.raise_signal(number)
