"""Runners take turns, warmed up, each in processes of its own."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastsiam.bench.measure import host_memory
from fastsiam.bench.runner import Comparison, Runner, RunnerError, Task


def build_words(
    *, log: str, words: list[str], die: str = "", fail: bool = False
) -> dict[str, Task]:
    """Write down each word when its task runs; a word to ``die`` at is run twice."""
    if fail:
        raise FileNotFoundError("the thing is missing\nand more")

    def say(word: str) -> None:
        if word == die and Path(log).read_text().count(word) == 2:
            os._exit(3)
        with open(log, "a") as file:
            file.write(word)

    return {w: Task(lambda w=w: say(w), 10, lambda w=w: {"said": w}) for w in words}  # type: ignore[misc]


def build_ranks(*, failing: int = -1) -> dict[str, Task]:
    place = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    if place["RANK"] == str(failing):
        raise RuntimeError(f"rank {failing} fails")
    if failing >= 0:
        time.sleep(600)  # as in a collective
    return {"meet": Task(lambda: time.sleep(0.1 * (int(place["RANK"]) + 1)), 4, lambda: place)}


def build_busy() -> dict[str, Task]:
    held: list[Any] = []

    def work() -> None:
        began = time.process_time()
        while time.process_time() - began < 0.1:
            pass
        if not held:
            held.append(np.ones(50_000_000, np.uint8))

    return {"work": Task(work, 1, before=lambda: time.sleep(1.5))}


@pytest.mark.parametrize("apart", [False, True])
def test_runners_take_turns(apart: bool, tmp_path: Path) -> None:
    """Or, apart, one after the other; one that fails or dies is left out and named."""
    log = tmp_path / "log"
    log.touch()
    with Comparison(lambda _: None, apart=apart) as comparison:
        comparison.add("one", build_words, log=str(log), words=["a", "b"])
        comparison.add("fails", build_words, log=str(log), words=["y"], fail=True)
        comparison.add("dies", build_words, log=str(log), words=["x"], die="x")
        comparison.add("two", build_words, log=str(log), words=["c"])
        assert bool(comparison.runners) != apart
        timings = comparison.run(2)
        processes = [p for r in comparison.runners.values() for p in r._processes.values()]
    assert log.read_text() == ("ab" * 3 + "xx" + "ccc" if apart else "abxc" + "abxc" + "abc")
    assert set(timings) == {("one", "a"), ("one", "b"), ("two", "c")}
    assert all(len(t.samples) == 2 and t.images == 10 for t in timings.values())
    said = {"said": "b"} | ({"apart": True} if apart else {})
    assert timings["one", "b"].facts == said
    assert comparison.failed["fails"] == "the thing is missing"
    assert "code 3" in comparison.failed["dies"]
    assert not any(process.is_alive() for process in processes)


def test_ranks_work_together() -> None:
    runner = Runner(build_ranks, {}, ranks=2)
    try:
        assert runner.run("meet").wall >= 0.2  # as long as the slowest
        facts = runner.facts("meet")
        assert (facts["RANK"], facts["WORLD_SIZE"]) == ("0", "2") and int(facts["MASTER_PORT"])
    finally:
        runner.close()
    began = time.monotonic()
    with pytest.raises(RunnerError, match="rank 1 fails"):
        Runner(build_ranks, {"failing": 1}, ranks=2)
    assert time.monotonic() - began < 60  # rank 0 is not waited for


def build_nothing() -> dict[str, Task]:
    return {"nothing": Task(lambda: None, 1, lambda: {"torch": "torch" in sys.modules})}


@pytest.mark.parametrize("fresh", [True, False])
def test_a_fresh_process_has_not_imported_torch(fresh: bool) -> None:
    runner = Runner(build_nothing, {}, fresh=fresh)
    try:
        assert runner.facts("nothing") == {"torch": not fresh}
    finally:
        runner.close()


@pytest.mark.alone
def test_time_and_memory_are_those_of_the_runner() -> None:
    runner = Runner(build_busy, {})
    try:
        found = runner.run("work")
        assert 0.05 <= found.cpu < 1.5 and 0.1 <= found.wall < 1.5  # preparing does not count
        assert 50e6 < found.host < 50e6 + host_memory() + 100e6
    finally:
        runner.close()
