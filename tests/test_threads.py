"""Work is shared among threads: all of it, once, and errors come out."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from fastsiam.threads import in_threads


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100])
def test_all_is_done_once(count: int, threads: int) -> None:
    seen: list[int] = []
    in_threads(lambda first, last: seen.extend(range(first, last)), count)
    assert sorted(seen) == list(range(count))


def test_it_is_done_at_the_same_time(threads: int) -> None:
    together = threading.Barrier(threads)
    in_threads(lambda first, last: together.wait(timeout=10), threads * 4)


def test_errors_come_out(threads: int) -> None:
    def work(first: int, last: int) -> None:
        if first <= 5 < last:
            raise KeyError("5")

    with pytest.raises(KeyError):
        in_threads(work, 10)
