"""Work is shared among threads: all of it, once, and errors come out."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit
from numpy.typing import NDArray

from fastsiam.kernels.jit import compiled
from fastsiam.kernels.threads import in_threads, take
from tests.processes import Forked


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
    in_threads(lambda counter: together.wait(timeout=60), threads)


def test_errors_come_out(threads: int) -> None:
    def work(counter: NDArray[np.int64]) -> None:
        raise KeyError("5")

    with pytest.raises(KeyError):
        in_threads(work, 10)


def test_compiled_code_is_made_anew_when_what_it_calls_changed(tmp_path: Path) -> None:
    """numba alone looks at the caller's file, and goes on with what the other one was."""
    package = tmp_path / "sums"
    package.mkdir()
    (package / "__init__.py").touch()
    inner = (
        "from fastsiam.kernels.jit import compiled\n@compiled\ndef inner(x):\n    return x + {}\n"
    )
    (package / "outer.py").write_text(
        "from fastsiam.kernels.jit import compiled\nfrom .inner import inner\n"
        "@compiled\ndef outer(x):\n    return inner(x) * 2\n"
    )
    found = []
    for added in (1, 1, 50):  # of another length: within a second Python sees no other change
        (package / "inner.py").write_text(inner.format(added))
        done = Forked(print_the_sum, str(tmp_path)).wait()
        assert done.returncode == 0, done.stderr
        found.append(int(done.stdout))
    assert found == [4, 4, 102]
    assert list((package / "__pycache__").glob("outer.outer-*.nbi"))


def print_the_sum(folder: str) -> None:
    sys.path.insert(0, folder)
    print(importlib.import_module("sums.outer").outer(1))


def test_without_a_place_for_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core.dispatcher import Dispatcher

    def fail(self: object) -> None:
        raise RuntimeError("no locator available")

    monkeypatch.setattr(Dispatcher, "enable_caching", fail)

    @compiled
    def double(x: int) -> int:
        return 2 * x

    assert double(4) == 8
