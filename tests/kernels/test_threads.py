"""Work is split among threads: each item is done exactly once, and errors are raised."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from fastsiam.kernels import library
from fastsiam.kernels.threads import in_threads, run_all, submit_all, wait_all


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100_000])
def test_each_item_is_processed_once(count: int, threads: int) -> None:
    """Compiled code takes one image after the other; here an image is one pixel."""
    levels = np.random.default_rng(0).integers(0, 256, (count, 3), np.uint8)
    table = np.arange(256, dtype=np.uint16)[:, None].repeat(3, 1) + 1
    out, counter = np.zeros((count, 3), np.uint16), np.zeros(1, np.int64)
    look_up, at = library.kernels().fastsiam_normalize, library.at

    def work() -> None:
        look_up(at(levels), count, 1, at(table), 2, at(out), at(counter))

    in_threads(work, count)
    assert (out == levels.astype(np.uint16) + 1).all()
    assert count <= counter[0] <= count + threads


def test_errors_propagate(threads: int) -> None:
    with pytest.raises(KeyError):
        in_threads(Mock(side_effect=KeyError("5")), 10)


def test_run_all_waits_for_threads_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread may still work when ``run_all`` returns, as its arrays may then be freed."""
    end, pressed = threading.Event(), 0

    with ThreadPoolExecutor(1) as pool:
        future: Future[object] = pool.submit(end.wait, 60)
        wait_for = future.exception

        def interrupted() -> BaseException | None:
            nonlocal pressed
            pressed += 1
            if pressed < 4:
                raise KeyboardInterrupt
            end.set()
            return wait_for()

        monkeypatch.setattr(future, "exception", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_all([future])
        left_at_work = not future.done()
        end.set()
    assert not left_at_work


def is_waiting(thread: threading.Thread) -> bool:
    """Return whether a thread waits for a result, an event or another condition."""
    frame = sys._current_frames()[thread.ident or 0]
    return frame.f_code is threading.Condition.wait.__code__


def test_wait_ends_if_another_thread_shuts_down_the_pool() -> None:
    pool, release = ThreadPoolExecutor(1), threading.Event()
    pool.submit(release.wait, 60)
    queued = submit_all(pool, lambda: None, 1)
    waiting = threading.Thread(target=wait_all, args=(queued,), daemon=True)
    waiting.start()
    while not is_waiting(waiting):
        time.sleep(0.001)
    pool.shutdown(wait=False, cancel_futures=True)
    waiting.join(20)
    release.set()
    assert not waiting.is_alive()
