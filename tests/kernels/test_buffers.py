"""A buffer pool reuses buffers, but never while an array in them is alive."""

from __future__ import annotations

import numpy as np
import torch

from fastsiam.kernels.buffers import BufferPool


def test_buffer_is_reused_after_arrays_are_freed() -> None:
    pool = BufferPool(3)
    one, other = pool.array((3, 5), np.float32), pool.array((3, 5), np.float32)
    assert one.shape == (3, 5) and one.dtype == np.float32 and one.ctypes.data % 64 == 0
    places = {one.ctypes.data, other.ctypes.data}
    assert len(places) == 2
    tensor, view = torch.from_numpy(one), other.data
    del one, other
    assert pool.array((15,), np.float32).ctypes.data not in places
    del tensor, view
    again = pool.array((15,), np.float32), pool.array((30,), np.uint16)
    assert {array.ctypes.data for array in again} <= places
    assert pool.array((61,), np.uint8).ctypes.data not in places


def test_pool_limits_free_buffers() -> None:
    pool = BufferPool(2)
    arrays = [pool.array((100,), np.uint8) for _ in range(5)]
    del arrays
    assert [len(buffers) for buffers in pool._free.values()] == [2]
    for size in range(1, 9):
        pool.array((size,), np.uint8)
    assert 100 not in pool._free and len(pool._free) <= 8
