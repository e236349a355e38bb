"""Forked processes: what a signal does while they are being started."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fastsiam.errors import Interrupted
from fastsiam.pipelines.convert.command import stoppable
from fastsiam.pipelines.processes import forked, leave_signals_to_the_parent, signals_held
from fastsiam.signals import ECHO, STOPS
from tests.processes import Forked


@contextlib.contextmanager
def as_if(handler: Any) -> Iterator[None]:
    """Have the signals handled so, also where whatever began the tests has them ignored."""
    before = {number: signal.signal(number, handler) for number in STOPS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@pytest.mark.parametrize("number", STOPS)
def test_a_held_signal_comes_at_the_end(number: signal.Signals) -> None:
    came: list[str] = []
    with as_if(lambda *_: came.append("signal")):
        with signals_held():
            signal.raise_signal(number)
            signal.raise_signal(number)
            came.append("within")
        assert came == ["within", "signal"]  # as the system does, one for all that waited
        signal.raise_signal(number)
    assert came == ["within", "signal", "signal"]


def test_signals_that_are_ignored_stay_so_and_other_threads_hold_none() -> None:
    with as_if(signal.SIG_IGN), signals_held():
        signal.raise_signal(signal.SIGHUP)
    seen: list[Any] = []

    def look() -> None:
        with signals_held():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


@pytest.mark.parametrize("number", STOPS)
def test_a_child_leaves_signals_to_its_parent(number: signal.Signals) -> None:
    """Ctrl-C does not reach it; the others end it some seconds later."""
    for prepare in (bool, leave_signals_to_the_parent):
        with as_if(signal.SIG_DFL), signals_held():
            child = os.fork()
            if not child:
                prepare()
                signal.raise_signal(number)
                os._exit(3 if signal.alarm(0) else 4)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == (4 if number == signal.SIGINT else 3)


def test_a_child_is_deaf_to_what_its_parent_is_deaf_to() -> None:
    child = os.fork()
    if not child:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        leave_signals_to_the_parent()
        signal.raise_signal(signal.SIGHUP)
        os._exit(3 if signal.alarm(0) else 4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4


def _twice(number: int) -> int:
    return 2 * number


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_signal_while_processes_are_forked_ends_them_all(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool's own start, cut in the middle, left a process that nobody told to end."""
    original: Callable[..., None] = ProcessPoolExecutor._spawn_process  # type: ignore[attr-defined]
    begun: list[int] = []

    def spawn(self: ProcessPoolExecutor) -> None:
        if len(begun) == after:
            os.kill(os.getpid(), signal.SIGTERM)
        begun.append(1)
        original(self)

    monkeypatch.setattr(ProcessPoolExecutor, "_spawn_process", spawn)
    ended = pytest.raises(Interrupted)
    with ended, as_if(signal.SIG_DFL), stoppable("on"), forked(3, _twice) as run:
        list(run(range(20)))
    assert len(begun) == 3 and not multiprocessing.active_children()


def test_results_come_whatever_their_number() -> None:
    with forked(2, _twice) as run:
        assert sorted(run(range(50))) == [2 * number for number in range(50)]
        assert list(run(())) == []


def _slow_to_leave(folder: Path) -> None:
    """Take a minute to end, as one that waits for a disk that is gone."""
    with stoppable("on"):
        try:
            (folder / "begun").touch()
            time.sleep(60)
        finally:
            (folder / "leaving").touch()
            time.sleep(60)


def test_a_second_ctrl_c_ends_a_conversion_at_once(tmp_path: Path) -> None:
    process = Forked(_slow_to_leave, tmp_path)
    for mark in ("begun", "leaving"):
        while not (tmp_path / mark).exists():
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(2 * ECHO if mark == "leaving" else 0)
        process.send(signal.SIGINT)
    assert process.wait(30).returncode == 128 + signal.SIGINT


def test_nohup_is_heeded() -> None:
    with as_if(signal.SIG_IGN), stoppable("on"):
        for number in STOPS:
            signal.raise_signal(number)
