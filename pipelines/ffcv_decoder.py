"""Decoding and cropping of a .beton file's images, compiled by numba, in threads of our own.

libjpeg-turbo, which FFCV brings, decodes as PIL does; the crops equal PIL's. An image is decoded
once, however many crops are cut out of it.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=misc
# What numba compiles has no annotations: one function serves arrays of several types.

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import get_native_id
from typing import Any

import numpy as np
import torch
from numba import types
from numpy.typing import NDArray

from fastsiam.kernels.jit import compiled
from fastsiam.kernels.threads import now, run_all, take
from fastsiam.trace import note_stages
from fastsiam.views.batch import Crops
from fastsiam.views.photometric.cpu import Stage, finish

from . import ffcv_library
from .geometric import Cuts
from .geometric.cpu import Scratch, crop, crop_images, in_arrays
from .store.beton import RAW, BetonStore

__all__ = ["Cutter", "Decompressor", "Work", "crop_by_pil"]

assert ffcv_library  # its import is what links libjpeg-turbo

_STAGES = "decode", "crop", "photometric"
_DECODED, _REFUSED = 0, 1
_PIXEL_FORMAT_RGB, _ACCURATE_DCT = 0, 4096  # TJPF_RGB, TJFLAG_ACCURATEDCT: what PIL does


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


class Cutter:
    """Threads that decode a file's images and cut crops out of them.

    Args:
        store: the file.
        sides: of the crops, in pixels.
        workers: how many threads.
        shrink: ``Cuts.shrink``, at most; by default, that of a whole image which becomes a crop.
    """

    def __init__(
        self, store: BetonStore, sides: Sequence[int], workers: int, *, shrink: float | None = None
    ) -> None:
        self._store, self._sides = store, tuple(sides)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="fastsiam-ffcv")
        height, width = int(store.height.max()), int(store.width.max())
        largest = int((store.height.astype(np.int64) * store.width).max())
        self._threads = [
            (
                Decompressor(largest),
                tuple(Scratch(height, width, side, shrink=shrink).arrays for side in sides),
            )
            for _ in range(workers)
        ]

    def cut(self, work: Work, crops: Crops) -> NDArray[np.int64]:
        """Make a batch's crops.

        Args:
            work: the batch.
            crops: of each side (V, N, side, side, 3), contiguous, filled in.

        Returns:
            Rows of the images that libjpeg-turbo refused or had doubts about, whose crops are not
            made.
        """
        store, indices = self._store, work.indices
        length, status = store.bytes[indices], np.empty(len(indices), np.uint8)
        images = (
            work.source,
            work.start,
            length,
            store.height[indices],
            store.width[indices],
            store.modes[indices] == RAW,
            np.argsort(-length),  # those that take long first: no thread is left with one
            np.zeros(1, np.int64),  # how many of them were taken
            np.zeros((len(indices), len(_STAGES) + 1), np.int64),  # when each stage began
            np.zeros(len(indices), np.int64),  # and which thread it was
        )
        targets = (
            self._sides,
            tuple(in_arrays(own) for own in work.cuts),
            tuple(own.numpy().reshape(*own.shape[:2], -1) for own in crops),
        )

        def run(decompressor: Decompressor, scratch: Any) -> None:
            own = (decompressor.handle, decompressor.pixels, scratch, get_native_id())
            if work.stages:
                views = tuple((s.tables, s.scratch(), s.out) for s in work.stages)
                _make_views(images, own, targets, status, views)
            else:
                _make_crops(images, own, targets, status)

        run_all([self._pool.submit(run, *own) for own in self._threads])
        note_stages(_STAGES, *images[-2:])
        return np.flatnonzero(status != _DECODED)

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
        DataError: PIL cannot decode it either, or it is not of the size that the file states.
    """
    image = np.asarray(store.decode(index))
    if image.shape[:2] != (store.height[index], store.width[index]):
        raise store.cannot_decode(index, "it is not as large as the file says")
    for own, target in zip(cuts, crops, strict=True):
        made = torch.empty(target.shape, dtype=torch.uint8)
        crop_images([image], own, made)
        target.copy_(made)


class Decompressor:
    """One thread's libjpeg-turbo, with room for images of up to so many pixels."""

    def __init__(self, largest: int) -> None:
        self.handle = _new_decompressor()
        if not self.handle:
            raise MemoryError("libjpeg-turbo found no memory for a decompressor")
        self.pixels = np.empty(3 * largest, np.uint8)
        weakref.finalize(self, _end_decompressor, self.handle)

    def decode(self, store: BetonStore, index: int) -> bool:
        """Decode an image of a store into ``pixels``; false if libjpeg-turbo has doubts."""
        data = np.frombuffer(store.read(index), np.uint8)
        width, height = int(store.width[index]), int(store.height[index])
        return bool(_decode(self.handle, data, width, height, self.pixels))


def _foreign(name: str, result: Any, *arguments: Any) -> Any:
    return types.ExternalFunction(name, result(*arguments))


_pointer, _int = types.uintp, types.int32
_tj_init = _foreign("tjInitDecompress", _pointer)
_tj_destroy = _foreign("tjDestroy", _int, _pointer)
_tj_decompress = _foreign(
    "tjDecompress2", _int, _pointer, _pointer, types.uint64, _pointer, *[_int] * 5
)
_tj_header = _foreign(
    "tjDecompressHeader3", _int, _pointer, _pointer, types.uint64, *[_pointer] * 4
)


@compiled
def _new_decompressor():
    return _tj_init()


@compiled
def _end_decompressor(handle):
    return _tj_destroy(np.uintp(handle))


@compiled
def _make_crops(images, own, targets, status):
    """Take one image after the other, as long as there are any, and make its crops."""
    while _crop_next(images, own, targets, status) >= 0:
        pass


@compiled
def _make_views(images, own, targets, status, views):
    """Make the crops and the views of one image after the other, as long as there are any."""
    sides, _, crops = targets
    while True:
        row = _crop_next(images, own, targets, status)
        if row < 0:
            return
        if status[row] == _DECODED:
            for side in range(len(sides)):
                tables, scratch, out = views[side]
                for view in range(len(crops[side])):
                    place = view * len(status) + row
                    finish(crops[side][view, row], place, tables, sides[side], scratch, out[place])
            images[-2][row, 3] = now()


@compiled
def _crop_next(images, own, targets, status):
    """Make the crops of the next image; return its row, or -1 if there was none left."""
    source, start, length, height, width, raw, turns, counter, times, threads = images
    handle, pixels, scratch, thread = own
    sides, cuts, crops = targets
    turn = take(counter.ctypes.data)  # type: ignore[call-arg, var-annotated]
    if turn >= len(turns):
        return -1
    row = turns[turn]
    times[row, 0], threads[row] = now(), thread
    tall, wide = np.int64(height[row]), np.int64(width[row])
    data = source[start[row] : start[row] + length[row]]
    image = data if raw[row] else pixels[: 3 * tall * wide]
    if raw[row] or _decode(handle, data, wide, tall, pixels):
        status[row] = _DECODED
        times[row, 1] = now()
        for side in range(len(sides)):
            crop(image, wide, cuts[side], row, sides[side], crops[side], scratch[side])
        times[row, 2] = now()
    else:
        status[row] = _REFUSED
    return row


@compiled
def _decode(handle, data, width, height, pixels):
    """Decode a JPEG; false if it is damaged, of another size, or its colours are no RGB's."""
    found = np.empty((1, 4), np.int32)  # width, height, subsampling, colour space
    at = np.uintp(found.ctypes.data)
    begin, count, own = np.uintp(data.ctypes.data), np.uint64(len(data)), np.uintp(handle)
    failed = _tj_header(
        own, begin, count, at, at + np.uintp(4), at + np.uintp(8), at + np.uintp(12)
    )
    if failed or found[0, 0] != width or found[0, 1] != height:
        return False
    failed = _tj_decompress(
        own,
        begin,
        count,
        np.uintp(pixels.ctypes.data),
        np.int32(width),
        np.int32(3 * width),
        np.int32(height),
        np.int32(_PIXEL_FORMAT_RGB),
        np.int32(_ACCURATE_DCT),
    )
    return failed == 0
