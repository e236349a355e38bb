"""Work is shared among threads: all of it, once, and errors come out."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest
import torch

from fastsiam.kernels import library
from fastsiam.kernels import threads as kernel_threads
from fastsiam.kernels.threads import in_threads, run_all, submit_all


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100_000])
def test_all_is_done_once(count: int, threads: int) -> None:
    """By compiled code, which takes an image of one pixel after the other."""
    levels = np.random.default_rng(0).integers(0, 256, (count, 3), np.uint8)
    table = np.arange(256, dtype=np.uint16)[:, None].repeat(3, 1) + 1
    out, taken = np.zeros((count, 3), np.uint16), np.zeros(1, np.int64)
    look_up, at = library.kernels().fastsiam_normalize, library.at

    def work() -> None:
        look_up(at(levels), count, 1, at(table), 2, at(out), at(taken))

    in_threads(work, count)
    assert (out == levels.astype(np.uint16) + 1).all()
    assert count <= taken[0] <= count + threads


def test_it_is_done_at_the_same_time(threads: int) -> None:
    together = threading.Barrier(threads)
    in_threads(lambda: together.wait(timeout=60), threads)


def test_errors_come_out(threads: int) -> None:
    def work() -> None:
        raise KeyError("5")

    with pytest.raises(KeyError):
        in_threads(work, 10)


def test_nobody_is_left_at_work_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is pressed: what threads work on may go away after that."""
    end, pressed = threading.Event(), 0

    def interrupted(futures: object) -> None:
        nonlocal pressed
        pressed += 1
        if pressed < 4:
            raise KeyboardInterrupt
        end.set()
        wait(futures)  # type: ignore[arg-type]

    monkeypatch.setattr(kernel_threads, "wait", interrupted)
    with ThreadPoolExecutor(1) as pool:
        future: Future[object] = pool.submit(end.wait, 60)
        with pytest.raises(KeyboardInterrupt):
            run_all([future])
        left_at_work = not future.done()
        end.set()
    assert not left_at_work


@pytest.mark.parametrize("queued", [False, True])
def test_no_call_is_left_when_another_cannot_start(
    queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one that runs nor one that the pool queued before it failed to start its thread."""
    running, calls, ended = threading.Event(), 0, 0

    def work() -> None:
        nonlocal calls, ended
        calls += 1
        running.set()
        let_go.wait(60)
        ended += 1

    let_go = threading.Event()

    def awaited(futures: Sequence[Future[object]]) -> None:
        let_go.set()
        wait(futures)

    monkeypatch.setattr(kernel_threads, "wait", awaited)
    with ThreadPoolExecutor(1) as pool:
        submit = pool.submit

        def one_and_no_more(*call: Any) -> Future[object]:
            if not running.is_set():
                future = submit(*call)
                assert running.wait(60)
                return future
            if queued:
                submit(*call)
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(pool, "submit", one_and_no_more)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            submit_all(pool, work, 3)
        ended_in_time = ended
        let_go.set()
    assert ended_in_time == calls == 1
