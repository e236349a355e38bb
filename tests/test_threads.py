"""Work is shared among threads: all of it, once, and errors come out."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numba import njit
from numpy.typing import NDArray

from fastsiam.threads import in_threads, take


@njit(nogil=True)
def count_up(done: NDArray[np.int64], counter: NDArray[np.int64]) -> None:
    while True:
        number = take(counter.ctypes.data)  # type: ignore[call-arg, var-annotated]
        if number >= len(done):
            return
        done[number] += 1


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100_000])
def test_all_is_done_once(count: int, threads: int) -> None:
    done = np.zeros(count, np.int64)
    in_threads(lambda counter: count_up(done, counter), count)
    assert (done == 1).all()


def test_it_is_done_at_the_same_time(threads: int) -> None:
    together = threading.Barrier(threads)
    in_threads(lambda counter: together.wait(timeout=10), threads)


def test_errors_come_out(threads: int) -> None:
    def work(counter: NDArray[np.int64]) -> None:
        raise KeyError("5")

    with pytest.raises(KeyError):
        in_threads(work, 10)
