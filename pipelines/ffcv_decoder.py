"""Decoding and cropping of a .beton file's images by compiled code, in threads of our own.

libjpeg-turbo decodes as PIL does, no more of an image than its crops need; the crops equal PIL's.
An image is decoded once, however many crops are cut out of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from fastsiam.kernels import library
from fastsiam.kernels.threads import run_all, submit_all
from fastsiam.views.batch import Crops
from fastsiam.views.photometric.cpu import Stage

from .geometric import Cuts
from .geometric.cpu import Images, Job, crop_images
from .store.beton import BetonStore

__all__ = ["Cutter", "Making", "Work", "crop_by_pil", "decoder", "turbojpeg"]


@dataclass(frozen=True, slots=True)
class Work:
    """A batch to be made: where its images lie and what becomes of them."""

    source: NDArray[np.uint8]
    """The memory that holds the records."""
    start: NDArray[np.int64]
    """(N,) where each begins in it."""
    indices: NDArray[np.int64]
    """(N,) positions in the data set."""
    cuts: Sequence[Cuts]
    """Of each side."""
    stages: Sequence[Stage] = ()
    """Of each side, where the views go, if they shall be made too."""


class Making:
    """A batch in the making.

    Args:
        job: what is made.
        threads: that make it.
    """

    def __init__(self, job: Job, threads: Sequence[Future[object]]) -> None:
        self._job, self._threads = job, threads

    def refused(self) -> NDArray[np.int64]:
        """Wait until it is made.

        Returns:
            Rows of the images that libjpeg-turbo refused or had doubts about, of which nothing is
            made.
        """
        run_all(self._threads)
        return self._job.refused()

    def end(self) -> None:
        """Wait until nobody works on it any more, whatever became of it."""
        wait(self._threads)


class Cutter:
    """Threads that decode a file's images and cut crops out of them.

    Args:
        store: the file.
        sides: of the crops, in pixels.
        workers: how many threads.
    """

    def __init__(self, store: BetonStore, sides: Sequence[int], workers: int) -> None:
        self._store, self._sides, self._workers = store, tuple(sides), workers
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="fastsiam-ffcv")

    def begin(self, work: Work, crops: Crops | None) -> Making:
        """Begin with a batch's crops; threads go on with it when they are done with the one before.

        Args:
            work: the batch.
            crops: of each side (V, N, side, side, 3), contiguous, filled in; None where views are
                made and nothing else is wanted.
        """
        store, indices = self._store, work.indices
        images = Images(
            work.source.ctypes.data + work.start,
            store.bytes[indices],
            store.height[indices],
            store.width[indices],
            store.modes[indices],
        )
        job = Job(
            images,
            work.cuts,
            self._sides,
            crops,
            work.stages,
            decode=decoder(),
            longest_first=True,
        )
        return Making(job, submit_all(self._pool, job.run, self._workers))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def crop_by_pil(store: BetonStore, index: int, cuts: Sequence[Cuts], crops: Crops) -> None:
    """Make the crops of an image that PIL decodes.

    Args:
        store: the file.
        index: the image's position in it.
        cuts: of each side, of this image alone.
        crops: of each side (V, 1, side, side, 3), filled in.

    Raises:
        DataError: PIL cannot decode it either.
    """
    image = np.asarray(store.decode(index))
    for own, target in zip(cuts, crops, strict=True):
        made = torch.empty(target.shape, dtype=torch.uint8)
        crop_images([image], own, made)
        target.copy_(made)


@cache
def decoder() -> int:
    """Return the address of the function that decodes JPEGs; ``Decode`` in ``source/job.h``.

    Where fastsiam was compiled without libjpeg-turbo's header that is ``turbojpeg``.
    """
    jpeg = library.jpeg()
    return turbojpeg() if jpeg is None else library.address(jpeg.fastsiam_decode)


@cache
def turbojpeg() -> int:
    """Return the address of a ``Decode`` of whole images by libjpeg-turbo, which FFCV brings."""
    from . import ffcv_library

    brought, kernels = ctypes.CDLL(ffcv_library.PATH), library.kernels()
    names = "tjInitDecompress", "tjDecompressHeader3", "tjDecompress2", "tjDestroy"
    kernels.fastsiam_turbojpeg(*(ctypes.c_void_p(library.address(brought[name])) for name in names))
    return library.address(kernels.fastsiam_decode_turbojpeg)
