"""The photometric stage on the CPU: compiled by numba, vectorised, in threads.

One thread takes a view through the whole stage, in chunks of rows that stay in the processor's
first cache, and in two sweeps, because the contrast operation needs the mean of the whole view.
Every operation rounds as the reference does; views before normalisation are equal to it to the last
bit.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=misc
# What numba compiles has no annotations: one function serves arrays of several types.

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.kernels.jit import compiled
from fastsiam.kernels.threads import in_threads, take
from fastsiam.views.batch import Crops
from fastsiam.views.draws import CONTRAST, NO_LEVEL, ViewParams

from . import reference
from .cpu_blur import blur
from .cpu_colours import grayscale, jitter, solarise, sum_of_luma
from .operations import Operations, side_by_side
from .reference import box_weights

_CHUNK = 1024
"""Pixels whose float32 planes, three and three more, fit into a first-level cache of 32 KiB."""
_SLOTS = 4


def photometric(
    crops: Crops, params: ViewParams, config: AugmentConfig, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Do what ``fastsiam.views.photometric.photometric`` says."""
    return side_by_side(_finish, crops, params, config, dtype)


def _finish(crops: Tensor, what: Operations, config: AugmentConfig, dtype: torch.dtype) -> Tensor:
    """Take crops of one side through the stage; see ``operations.Finish``."""
    count, height, width, _ = crops.shape
    pixels = crops.reshape(count, -1).contiguous().numpy()
    stage = Stage(what, config, height, width, dtype)

    def work(counter: NDArray[np.int64]) -> None:
        _finish_all(pixels, stage.tables, width, stage.scratch(), stage.out, counter)

    in_threads(work, count)
    return stage.views()


class Stage:
    """The stage for M crops of one side, for compiled code that calls ``finish`` itself.

    Args:
        what: is done to each of them.
        config: for the normalisation.
        height: of the crops, in pixels.
        width: of the crops, in pixels.
        dtype: of the result.
    """

    def __init__(
        self,
        what: Operations,
        config: AugmentConfig,
        height: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        count = len(what.order)
        self._shape, self._dtype = (count, height, width, 3), dtype
        mean, std = np.array(config.mean), np.array(config.std)
        self.tables = (
            what.order.astype(np.int64),
            what.factor,
            what.gray,
            _boxes(what.blur),
            what.solarise.astype(np.int64),
            (1 / (255 * std)).astype(np.float32),
            (-mean / std).astype(np.float32),
        )
        half = dtype == torch.bfloat16
        self.out = _recycled((count, 3 * height * width), np.uint16 if half else np.float32)
        """(M, height * width * 3): the views; of bfloat16 the bits."""

    def scratch(self) -> tuple[NDArray[Any], ...]:
        """Return memory for one thread."""
        _, height, width, _ = self._shape
        border = int(self.tables[3][:, 2].max()) + 1
        rows = max(1, _CHUNK // width)
        return (
            np.empty((3, rows * width), np.float32),
            np.empty((3, rows * width), np.float32),
            np.empty((3, height * width), np.uint8),
            np.empty((3, 2, (height + 2 * border) * (width + 2 * border)), np.uint8),
            np.empty(3 * rows * width, np.float32),
        )

    def views(self) -> Tensor:
        """Return the views (M, 3, height, width), channels-last."""
        views = torch.from_numpy(self.out)
        views = views.view(torch.bfloat16) if self.out.itemsize == 2 else views.to(self._dtype)
        return views.view(self._shape).permute(0, 3, 1, 2)


_MOST_SIZES = 8  # sides of the views, and the last batch's that may be smaller
_free: dict[int, NDArray[np.uint8]] = {}
"""Memory that held views which nobody needs any more: one block of each size in bytes."""


def _recycled(shape: tuple[int, int], dtype: type[np.generic]) -> NDArray[Any]:
    """Return an array, in the memory of earlier views if these are gone.

    New memory is cleared by the system, page by page, which takes as long as a colour operation.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    block = _free.pop(size, None)
    if block is None:
        block = np.empty(size, np.uint8)
    array = block.view(dtype).reshape(shape)
    weakref.finalize(array, _keep, block).atexit = False
    return array


def _keep(block: NDArray[np.uint8]) -> None:
    if len(_free) >= _MOST_SIZES:
        _free.clear()
    _free[len(block)] = block


def _boxes(sigma: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return (M, 3) of each view's box blur: inner weight, outer weight, whole radius; 0: none."""
    box = np.zeros((len(sigma), 3), np.uint32)
    blurred = sigma > 0
    if blurred.any():
        box[blurred] = np.stack(box_weights(sigma[blurred]), axis=1)
    return box


_ZERO = np.float32(0)  # a Python float is float64
_BELOW_HALF, _ODD, _CUT = np.uint32(0x7FFF), np.uint32(1), np.uint32(16)  # ties go to even


def normalize(crops: Tensor, config: AugmentConfig, dtype: torch.dtype) -> Tensor:
    """Do what ``photometric.normalized`` says, in one pass: there are but 256 levels."""
    levels = torch.arange(256.0).view(256, 1, 1, 1).expand(256, 3, 1, 1)
    values = reference.normalize(levels, config).reshape(256, 3).to(dtype).contiguous()
    source = crops.contiguous().numpy().reshape(len(crops), -1)
    out = torch.empty(crops.shape, dtype=dtype)
    # numpy has no bfloat16: values are passed on bit by bit, as whole numbers of their size.
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    table, target = values.view(whole).numpy(), out.view(whole).numpy().reshape(source.shape)

    def work(counter: NDArray[np.int64]) -> None:
        _look_up(source, table, target, counter)

    in_threads(work, len(crops))
    return out.permute(0, 3, 1, 2)


@compiled
def _look_up(source, table, out, counter):
    """Normalise one image after the other, as long as there are any."""
    while True:
        image = take(counter.ctypes.data)  # type: ignore[call-arg, var-annotated]
        if image >= len(source):
            return
        pixels, row = source[image], out[image]
        for at in range(0, len(pixels), 3):
            row[at] = table[pixels[at], 0]
            row[at + 1] = table[pixels[at + 1], 1]
            row[at + 2] = table[pixels[at + 2], 2]


@compiled
def _finish_all(pixels, tables, width, scratch, out, counter):
    """Take one view after the other through the stage, as long as there are any."""
    while True:
        view = take(counter.ctypes.data)  # type: ignore[call-arg, var-annotated]
        if view >= len(pixels):
            return
        finish(pixels[view], view, tables, width, scratch, out[view])


@compiled
def finish(pixels, view, tables, width, scratch, out):
    """Take a view through the stage.

    Args:
        pixels: (height * width * 3,) uint8, interleaved.
        view: its place among the M.
        tables: ``Stage.tables``.
        width: of the view, in pixels.
        scratch: this thread's ``Stage.scratch()``.
        out: the view's row of ``Stage.out``.
    """
    orders, factors, grays, boxes, thresholds, scale, shift = tables
    order, factor, gray, box = orders[view], factors[view], grays[view], boxes[view]
    threshold = thresholds[view]
    chunk, hsv, kept, smooth, line = scratch
    mean = _mean_gray(pixels, order, factor, chunk, hsv, kept)
    blurred, first = box[0] > 0, _before_contrast(order)
    again = first in (0, _SLOTS)
    count = len(pixels) // 3
    for begin in range(0, count, chunk.shape[1]):
        end = min(begin + chunk.shape[1], count)
        r, g, b = chunk[0, : end - begin], chunk[1, : end - begin], chunk[2, : end - begin]
        if again:
            _split(pixels[3 * begin : 3 * end], r, g, b)
        else:
            for c in range(3):
                _to_float(kept[c, begin:end], chunk[c])
        jitter(r, g, b, order, factor, 0 if again else first, _SLOTS, mean, hsv)
        if gray:
            grayscale(r, g, b)
        if blurred:
            _place(chunk, begin // width, end // width, width, box, smooth)
        else:
            if threshold < NO_LEVEL:
                for c in range(3):
                    solarise(chunk[c, : end - begin], threshold)
            _normalize(r, g, b, scale, shift, line, out[3 * begin : 3 * end])
    if blurred:
        _blur_and_normalize(smooth, gray, width, box, threshold, scale, shift, line, out)


@compiled
def _before_contrast(order):
    """Count the slots before the contrast operation: all, if there is none."""
    slots = 0
    while slots < _SLOTS and order[slots] != CONTRAST:
        slots += 1
    return slots


@compiled
def _mean_gray(pixels, order, factor, chunk, hsv, kept):
    """Return the mean gray before the contrast operation; keep what comes before it."""
    last = _before_contrast(order)
    if last == _SLOTS:
        return _ZERO
    total, count = 0, len(pixels) // 3
    for begin in range(0, count, chunk.shape[1]):
        end = min(begin + chunk.shape[1], count)
        r, g, b = chunk[0, : end - begin], chunk[1, : end - begin], chunk[2, : end - begin]
        _split(pixels[3 * begin : 3 * end], r, g, b)
        jitter(r, g, b, order, factor, 0, last, _ZERO, hsv)
        total += sum_of_luma(r, g, b)
        if last > 0:
            for c in range(3):
                _to_bytes(chunk[c], kept[c, begin:end])
    return np.float32(np.floor(total / count + 0.5))


@compiled
def _split(pixels, r, g, b):
    for i in range(len(r)):
        r[i] = np.float32(pixels[3 * i])
        g[i] = np.float32(pixels[3 * i + 1])
        b[i] = np.float32(pixels[3 * i + 2])


@compiled
def _to_bytes(x, out):
    for i in range(len(out)):
        out[i] = np.uint8(np.int32(x[i]))


@compiled
def _to_float(x, out):
    for i in range(len(x)):
        out[i] = np.float32(x[i])


@compiled
def _normalize(r, g, b, scale, shift, line, out):
    """Write interleaved float32, or bfloat16's bits by way of ``line``."""
    if out.itemsize == 4:
        _interleave(r, g, b, scale, shift, out)
    else:
        _interleave(r, g, b, scale, shift, line)
        _round_to_bfloat16(line.view(np.uint32), out)


@compiled
def _interleave(r, g, b, scale, shift, out):
    scale_r, scale_g, scale_b = scale[0], scale[1], scale[2]
    shift_r, shift_g, shift_b = shift[0], shift[1], shift[2]
    for i in range(len(r)):
        out[3 * i] = np.float32(r[i]) * scale_r + shift_r
        out[3 * i + 1] = np.float32(g[i]) * scale_g + shift_g
        out[3 * i + 2] = np.float32(b[i]) * scale_b + shift_b


@compiled
def _round_to_bfloat16(bits, out):
    for i in range(len(out)):
        out[i] = (bits[i] + _BELOW_HALF + ((bits[i] >> _CUT) & _ODD)) >> _CUT


@compiled
def _place(chunk, first, last, width, box, smooth):
    """Put the rows [first, last) where the blur works on them, with room for its borders."""
    border = np.int64(box[2]) + 1
    pitch = width + 2 * border
    for c in range(3):
        for y in range(first, last):
            begin = (border + y) * pitch + border
            row = chunk[c, (y - first) * width : (y - first + 1) * width]
            _to_bytes(row, smooth[c, 0, begin : begin + width])


@compiled
def _blur_and_normalize(smooth, gray, width, box, threshold, scale, shift, line, out):
    height = len(out) // (3 * width)
    border = np.int64(box[2]) + 1
    pitch = width + 2 * border
    for c in range(1 if gray else 3):
        blur(smooth[c], width, height, box)
        if threshold < NO_LEVEL:
            solarise(smooth[c, 0], threshold)
    second, third = (0, 0) if gray else (1, 2)
    for y in range(height):
        begin = (border + y) * pitch + border
        end = begin + width
        r, g, b = smooth[0, 0, begin:end], smooth[second, 0, begin:end], smooth[third, 0, begin:end]
        _normalize(r, g, b, scale, shift, line, out[3 * y * width : 3 * (y + 1) * width])
