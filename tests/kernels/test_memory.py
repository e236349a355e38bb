"""Compiled code raises MemoryError if an allocation fails, and sanitizers detect overflows."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fastsiam.config import AugmentConfig
from fastsiam.kernels import build
from fastsiam.pipelines.cuts import Cuts
from fastsiam.pipelines.job import Images, Job
from fastsiam.views.draws import draw_views
from fastsiam.views.photometric.cpu import photometric
from tests.kernels.decoders import DECODE, ROOM_BEHIND, job_of_jpeg
from tests.processes import Forked

_MIB = 1 << 20


@contextlib.contextmanager
def memory_limit(count: int) -> Iterator[None]:
    """Limit the growth of the process's address space to ``count`` bytes."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def decode_without_memory() -> None:
    decode = DECODE(lambda *arguments: 1)
    job = job_of_jpeg(9000, 8000, decode)
    with (
        memory_limit(100 * _MIB),
        pytest.raises(MemoryError, match="an image of 9000 x 8000 pixels"),
    ):
        job.run()
    again = job_of_jpeg(9000, 8000, decode)
    again.run()
    assert again.rejected_rows().tolist() == [0]


def crop_without_memory() -> None:
    image = np.full((1, 2_000_000, 3), 7, np.uint8)
    pair = np.full((1, 1, 2), 100, np.int32)
    box, flip = np.array([[[0, 0, 1, 2_000_000]]], np.int32), np.zeros((1, 1), np.bool_)
    crops = torch.zeros(1, 1, 100, 100, 3, dtype=torch.uint8)

    def job() -> Job:
        return Job(Images.of_arrays([image]), [Cuts(box, flip, pair, 0 * pair)], (crops,))

    with (
        memory_limit(20 * _MIB),
        pytest.raises(MemoryError, match="an image of 1 x 2000000 pixels"),
    ):
        job().run()
    assert not crops.any()
    job().run()
    assert (crops == 7).all()


def run_photometric_without_memory() -> None:
    config = AugmentConfig.alike(crop=4000)
    params = draw_views(config, seed=0, epoch=0, index=np.arange(1), size=np.array([[9, 9]]))
    crops = (torch.zeros(2, 1, 4000, 4000, 3, dtype=torch.uint8),)
    views = 2 * 3 * 4000 * 4000 * 4
    with (
        memory_limit(views + 20 * _MIB),
        pytest.raises(MemoryError, match="a crop of 4000 x 4000 pixels"),
    ):
        photometric(crops, params, config)
    assert len(photometric(crops, params, config)) == 2


@pytest.mark.parametrize(
    "work", [decode_without_memory, crop_without_memory, run_photometric_without_memory]
)
def test_work_succeeds_after_memory_error(work: Callable[[], None]) -> None:
    """The same work succeeds once there is memory."""
    result = Forked(work).wait()
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(build.FOLDER not in os.environ, reason="only for `make memory-check`")
def test_sanitizer_detects_one_byte_overflow() -> None:
    """The write is in a scratch buffer of compiled code, whose size is normally rounded up."""
    result = Forked(overflow_scratch_buffer).wait()
    assert result.returncode and "heap-buffer-overflow" in result.stderr


def overflow_scratch_buffer() -> None:
    decode = DECODE(
        lambda *arguments: ctypes.memset(arguments[5], 0, 3 * 8 * 8 + ROOM_BEHIND + 1) or 1
    )
    job_of_jpeg(8, 8, decode).run()


@pytest.mark.skipif(
    "malloc_debug" not in os.environ.get("LD_PRELOAD", ""), reason="only for `make memory-check`"
)
def test_malloc_check_detects_one_byte_overflow() -> None:
    result = Forked(overflow_allocation).wait()
    assert result.returncode == -signal.SIGABRT


def overflow_allocation() -> None:
    """Use a NumPy array: ctypes would find the system's malloc instead of the checked one."""
    array = np.zeros(5000, np.uint8)
    ctypes.memset(array.ctypes.data, 1, array.size + 1)
    del array
