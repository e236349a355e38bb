"""Runners take turns in their own processes after a warm-up; only their own work is timed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fastsiam.bench.config import BenchConfig
from fastsiam.bench.measure import (
    _cached_pages,
    cpu_seconds,
    drop_from_cache,
    host_memory,
    time_task,
)
from fastsiam.bench.measurements import Row
from fastsiam.bench.runner import Runner, RunnerError, Task, compare
from fastsiam.console import Console


def build_words(
    *, log: str, words: list[str], die: str = "", fail: bool = False
) -> dict[str, Task]:
    """Build tasks that append their word to a log; ``die`` exits at its third run."""
    if fail:
        raise FileNotFoundError("the thing is missing\nand more")

    def say(word: str) -> None:
        if word == die and Path(log).read_text().count(word) == 2:
            os._exit(3)
        with open(log, "a") as file:
            file.write(word)

    def facts(word: str) -> dict[str, Any]:
        return {"said": word, "pid": os.getpid()}

    return {word: Task(partial(say, word), 10, partial(facts, word)) for word in words}


def build_ranks(*, failing: int = -1) -> dict[str, Task]:
    place = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    if place["RANK"] == str(failing):
        raise RuntimeError(f"rank {failing} fails")
    if failing >= 0:
        time.sleep(600)  # as if blocked in a collective
    return {"meet": Task(lambda: time.sleep(0.1 * (int(place["RANK"]) + 1)), 4, lambda: place)}


def build_busy() -> Task:
    memory: list[Any] = []
    facts: dict[str, float] = {}

    def work() -> None:
        start, began = time.perf_counter(), time.process_time()
        while time.process_time() - began < 0.1:
            pass
        if not memory:
            memory.append(np.ones(50_000_000, np.uint8))
        facts["seconds"] = time.perf_counter() - start

    return Task(work, 1, lambda: facts, before=lambda: time.sleep(1.5))


@pytest.mark.parametrize("apart", [False, True])
def test_runners_are_interleaved_unless_apart(apart: bool, tmp_path: Path) -> None:
    """With ``apart`` they run one after the other; a failed or dead runner is reported."""
    from fastsiam.bench.session import Session  # imports torch, which fresh processes must not

    log = tmp_path / "log"
    log.touch()
    words = partial(build_words, log=str(log))
    runners = {
        "one": partial(words, words=["a", "b"]),
        "fails": partial(words, words=["y"], fail=True),
        "dies": partial(words, words=["x"], die="x"),
        "two": partial(words, words=["c"]),
    }
    rows = [
        Row(
            case="words", name=word, runner=runner, build=build, ceiling=("b", ["y", "b"]),
            in_the_clock="", config={},
        )
        for runner, build in runners.items()
        for word in build.keywords["words"]
    ]  # fmt: skip
    session = Session(BenchConfig(repeats=2), "cpu", tmp_path, Console())
    records, failed = compare(session, rows, apart=apart), session.failures
    assert log.read_text() == ("ab" * 3 + "xx" + "ccc" if apart else "abxc" + "abxc" + "abc")
    assert [one.name for one in records] == ["a", "b", "c"]
    assert all(one.n == 2 and one.images == 10 and one.ceiling == "b" for one in records)
    pids = [one.facts.pop("pid") for one in records]
    expected = {"said": "b"} | ({"apart": True} if apart else {})
    assert records[1].facts == expected and records[1].share_of_ceiling == 1
    assert failed["fails"] == "the thing is missing" and "killed or crashed" in failed["dies"]
    assert not any(map(psutil.pid_exists, pids))


def test_runner_starts_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastsiam.bench.runner._PATIENCE", 0.5)
    with closing(Runner("ranks", build_ranks, ranks=2)) as runner:
        assert runner.run("meet").wall >= 0.2  # the time of the slowest rank
        facts = runner.facts("meet")
        assert (facts["RANK"], facts["WORLD_SIZE"]) == ("0", "2") and int(facts["MASTER_PORT"])
    began = time.monotonic()
    with pytest.raises(RunnerError, match="rank 1 fails"):
        Runner("ranks", partial(build_ranks, failing=1), ranks=2)
    assert time.monotonic() - began < 300  # rank 0 sleeps for 600 s


def build_nothing() -> Task:
    return Task(lambda: None, 1, lambda: {"torch": "torch" in sys.modules})


def test_fresh_process_has_not_imported_torch() -> None:
    with closing(Runner("nothing", build_nothing, fresh=True)) as runner:
        assert runner.facts("nothing") == {"torch": False}


@pytest.mark.alone
def test_sample_has_time_and_memory_of_task() -> None:
    with closing(Runner("work", build_busy)) as runner:
        sample, seconds = runner.run("work"), runner.facts("work")["seconds"]
        assert 0.05 <= sample.cpu < 1.5  # preparation is not timed
        assert 0.1 <= seconds <= sample.wall < seconds + 1.4
        assert 50e6 < sample.host < 50e6 + host_memory() + 100e6


def test_cpu_time_of_running_children_counts() -> None:
    before = cpu_seconds()
    script = (
        "import sys, time\nwhile time.process_time() < 0.5: pass\n"
        "print(flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout and child.stdin
        child.stdout.readline()
        assert cpu_seconds() - before > 0.4
        child.stdin.close()


def test_cpu_time_of_task_leaves_out_search_for_children(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0

    def spend(seconds: int) -> list[psutil.Process]:
        nonlocal clock
        clock += seconds
        return []

    monkeypatch.setattr(time, "process_time", lambda: clock)
    monkeypatch.setattr("fastsiam.bench.measure.children", partial(spend, 10))
    assert time_task(partial(spend, 1)).cpu == pytest.approx(1)


def test_cached_pages_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(2**20))
    assert 0 <= drop_from_cache([path]) <= 1
    path.read_bytes()
    with path.open("rb") as file:
        assert _cached_pages(file.fileno(), 2**20) == [1] * 256
