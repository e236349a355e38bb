"""Contenders work in turns, warmed up, each in processes of its own."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastsiam.bench.contest import Contender, ContenderFailed, Contest, Work
from fastsiam.bench.measure import children, host_memory

pytestmark = pytest.mark.usefixtures("forked_contenders")


def build_words(
    *, log: str, words: list[str], die: str = "", fail: bool = False
) -> dict[str, Work]:
    """A contender that writes down when it works."""
    if fail:
        raise FileNotFoundError("the thing is missing\nand more")

    def say(word: str) -> None:
        if word == die and Path(log).read_text().count(word) == 2:
            os._exit(3)
        with open(log, "a") as file:
            file.write(word)

    return {w: Work(lambda w=w: say(w), 10, lambda w=w: {"said": w}) for w in words}  # type: ignore[misc]


def build_ranks(*, log: str) -> dict[str, Work]:
    place = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    return {"meet": Work(lambda: time.sleep(0.1 * (int(place["RANK"]) + 1)), 4, lambda: place)}


def build_failing_rank(*, log: str) -> dict[str, Work]:
    if os.environ["RANK"] == "1":
        raise RuntimeError("rank 1 fails")
    time.sleep(600)  # in a collective, say
    return {}


def build_timed(*, log: str) -> dict[str, Work]:
    held: list[Any] = []

    def work() -> None:
        began = time.process_time()
        while time.process_time() - began < 0.1:
            pass
        if not held:
            held.append(np.ones(50_000_000, np.uint8))

    return {"work": Work(work, 1, before=lambda: time.sleep(1.5))}


def build_started(*, log: str) -> dict[str, Work]:
    import multiprocessing

    return {"say": Work(lambda: None, 1, lambda: {"start": multiprocessing.get_start_method()})}


def test_contenders_take_turns_after_warming_up(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    with Contest(lambda _: None) as contest:
        assert contest.enter("one", build_words, log=str(log), words=["a", "b"])
        assert contest.enter("two", build_words, log=str(log), words=["c"])
        assert not contest.enter("three", build_words, log=str(log), words=[], fail=True)
        timings = contest.run(2)
        assert contest.contenders["one"].facts("b") == {"said": "b"}
        processes = [p.process for c in contest.contenders.values() for p in c._processes]
    assert log.read_text() == "abc" + "abc" * 2
    assert set(timings) == {("one", "a"), ("one", "b"), ("two", "c")}
    assert all(len(t.samples) == 2 and t.images == 10 for t in timings.values())
    assert contest.failed == {"three": "the thing is missing"}
    assert not any(process.is_alive() for process in processes)


def test_apart_a_contender_ends_before_the_next_starts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    with Contest(lambda _: None, apart=True) as contest:
        assert contest.enter("one", build_words, log=str(log), words=["a", "b"])
        assert contest.enter("fails", build_words, log=str(log), words=[], fail=True)
        assert contest.enter("dies", build_words, log=str(log), words=["x"], die="x")
        assert contest.enter("two", build_alone, log=str(log), word="c")
        assert not log.read_text() and not contest.contenders  # until it is their turn
        timings = contest.run(2)
    facts = timings["one", "b"].facts, timings["two", "c"].facts
    assert log.read_text() == "ab" * 3 + "xx" + "ccc"
    # Beside it is the one that imports for the next, and holds nothing yet.
    assert facts == ({"said": "b", "apart": True}, {"others": 1, "apart": True})
    assert set(timings) == {("one", "a"), ("one", "b"), ("two", "c")}
    assert set(contest.failed) == {"fails", "dies"}


def build_alone(*, log: str, word: str) -> dict[str, Work]:
    """A contender that counts the others of its parent's processes."""
    others = [p for p in children(os.getppid()) if p != os.getpid() and not _is_helper(p)]

    def say() -> None:
        with open(log, "a") as file:
            file.write(word)

    return {word: Work(say, 10, lambda: {"others": len(others)})}


def _is_helper(process: int) -> bool:
    """Tell whether it is multiprocessing's own, which tracks what processes leave behind."""
    return "resource_tracker" in Path(f"/proc/{process}/cmdline").read_text()


def test_a_contender_that_dies_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    with Contest(lambda _: None) as contest:
        contest.enter("dies", build_words, log=str(log), words=["x"], die="x")
        contest.enter("lives", build_words, log=str(log), words=["y"])
        timings = contest.run(4)
    assert list(timings) == [("lives", "y")] and log.read_text() == "xyxyyyy"
    assert "code 3" in contest.failed["dies"]


def test_ranks_work_together(tmp_path: Path) -> None:
    contender = Contender(build_ranks, {"log": ""}, ranks=2)
    try:
        assert contender.run("meet").wall >= 0.2  # as long as the slowest
        facts = contender.facts("meet")
        assert (facts["RANK"], facts["WORLD_SIZE"]) == ("0", "2") and int(facts["MASTER_PORT"])
    finally:
        contender.close()


def test_a_rank_that_fails_is_not_waited_for() -> None:
    began = time.monotonic()
    with pytest.raises(ContenderFailed, match="rank 1 fails"):
        Contender(build_failing_rank, {"log": ""}, ranks=2)
    assert time.monotonic() - began < 60


@pytest.mark.alone
def test_time_and_memory_are_those_of_the_contender() -> None:
    contender = Contender(build_timed, {"log": ""})
    try:
        found = contender.run("work")
        assert 0.05 <= found.cpu < 1.5 and 0.1 <= found.wall < 1.5  # preparing does not count
        assert 50e6 < found.host < 50e6 + host_memory() + 100e6
    finally:
        contender.close()


def test_contenders_start_processes_as_any_program_does() -> None:
    import multiprocessing

    contender = Contender(build_started, {"log": ""})
    assert contender.facts("say")["start"] == multiprocessing.get_context().get_start_method()
    contender.close()
