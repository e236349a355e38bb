"""Compiled work in threads: numba's functions let go of the interpreter while they run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from fastsiam.kernels.jit import compiled

_MOST_THREADS = 1024  # they start when they are needed


def in_threads(work: Callable[[NDArray[np.int64]], object], count: int) -> None:
    """Call ``work(counter)`` in as many threads as torch uses, but not in more than ``count``.

    Each call is to go on with ``take(counter.ctypes.data)`` until it has got ``count`` or more: so
    the pieces of work, 0 to count - 1, are shared out while they are done, without the interpreter,
    which another thread may hold.

    Raises:
        Exception: whatever ``work`` raised first.
    """
    counter = np.zeros(1, np.int64)
    threads = min(torch.get_num_threads(), count)
    if threads <= 1:
        work(counter)
        return
    run_all([_pool(os.getpid()).submit(work, counter) for _ in range(threads)])


def run_all(futures: Sequence[Future[object]]) -> None:
    """Wait until all have ended, whatever happens: what they work on may go away after that.

    Raises:
        Exception: whatever the first that failed raised.
    """
    try:
        wait(futures)
    finally:
        wait(futures)  # after Ctrl-C
    for future in futures:
        future.result()


@intrinsic
def take(context: Any, address: Any) -> Any:
    """Add one to the int64 at an address and return what it was, whoever else does the same."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        index = ir.IntType(64)
        pointer = builder.inttoptr(arguments[0], index.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(index, 1), "monotonic")

    return types.int64(types.intp), generate


_int: Any = types.int32
_clock_gettime: Any = types.ExternalFunction("clock_gettime", _int(types.int32, types.uintp))
_REALTIME = 0


@compiled
def now() -> Any:
    """Return what ``time.time_ns`` does, in compiled code."""
    parts = np.empty(2, np.int64)
    _clock_gettime(np.int32(_REALTIME), np.uintp(parts.ctypes.data))
    return parts[0] * 1_000_000_000 + parts[1]


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """Return this process's threads: a forked one does not inherit its parent's."""
    return ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="fastsiam")
