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
from fastsiam.views.draws import BRIGHTNESS, CONTRAST, HUE, NO_LEVEL, SATURATION, ViewParams

from . import reference
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


# A Python float is float64, and one of these in a loop halves its speed.
_ZERO, _ONE, _TWO, _THREE, _FOUR, _FIVE, _SIX = (np.float32(i) for i in range(7))
_HALF, _TOP = np.float32(0.5), np.float32(255)
_RED, _GREEN, _BLUE = (np.float32(weight / 2**16) for weight in (19595, 38470, 7471))
_WRAP, _UNWRAP = np.float32(256), np.float32(1 / 256)
_SEXTANT, _CIRCLE = np.float32(85), np.float32(510)
_WHOLE, _PER_WHOLE = np.float32(85 * 255), np.float32(1 / (85 * 255))
_BELOW_HALF, _ODD, _CUT = np.uint32(0x7FFF), np.uint32(1), np.uint32(16)  # ties go to even
_BOX_HALF, _BOX_BITS = np.uint32(1 << 23), np.uint32(24)


def normalize(crops: Tensor, config: AugmentConfig) -> Tensor:
    """Do what ``photometric.normalized`` says, in one pass: there are but 256 levels."""
    levels = torch.arange(256.0).view(256, 1, 1, 1).expand(256, 3, 1, 1)
    table = reference.normalize(levels, config).reshape(256, 3).contiguous().numpy()
    source = crops.contiguous().numpy().reshape(len(crops), -1)
    out = torch.empty(crops.shape)
    target = out.numpy().reshape(source.shape)

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
        _jitter(r, g, b, order, factor, 0 if again else first, _SLOTS, mean, hsv)
        if gray:
            _grayscale(r, g, b)
        if blurred:
            _place(chunk, begin // width, end // width, width, box, smooth)
        else:
            if threshold < NO_LEVEL:
                for c in range(3):
                    _solarise(chunk[c, : end - begin], threshold)
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
        _jitter(r, g, b, order, factor, 0, last, _ZERO, hsv)
        total += _sum_of_luma(r, g, b)
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
def _jitter(r, g, b, order, factor, first, last, mean, hsv):
    """Apply the operations of the slots [first, last)."""
    for slot in range(first, last):
        op = order[slot]
        if op == BRIGHTNESS:
            _brightness(r, factor[op])
            _brightness(g, factor[op])
            _brightness(b, factor[op])
        elif op == CONTRAST:
            _contrast(r, factor[op], mean)
            _contrast(g, factor[op], mean)
            _contrast(b, factor[op], mean)
        elif op == SATURATION:
            _saturation(r, g, b, factor[op])
        elif op == HUE:
            _hue(r, g, b, factor[op], hsv)


@compiled
def _blend(degenerate, x, factor):
    y = degenerate + factor * (x - degenerate)
    y = y if y > _ZERO else _ZERO
    return np.floor(y if y < _TOP else _TOP)


@compiled
def _brightness(x, factor):
    for i in range(len(x)):
        x[i] = _blend(_ZERO, x[i], factor)


@compiled
def _contrast(x, factor, mean):
    for i in range(len(x)):
        x[i] = _blend(mean, x[i], factor)


@compiled
def _luma(r, g, b):
    return np.floor(r * _RED + g * _GREEN + b * _BLUE + _HALF)


@compiled
def _saturation(r, g, b, factor):
    for i in range(len(r)):
        luma = _luma(r[i], g[i], b[i])
        r[i] = _blend(luma, r[i], factor)
        g[i] = _blend(luma, g[i], factor)
        b[i] = _blend(luma, b[i], factor)


@compiled
def _grayscale(r, g, b):
    for i in range(len(r)):
        luma = _luma(r[i], g[i], b[i])
        r[i] = luma
        g[i] = luma
        b[i] = luma


@compiled
def _solarise(x, threshold):
    """Invert whole levels from the threshold on, whatever their type."""
    for i in range(len(x)):
        level = np.int32(x[i])
        x[i] = np.int32(255) - level if level >= threshold else level


@compiled
def _sum_of_luma(r, g, b):
    total = np.int32(0)
    for i in range(len(r)):
        total += np.int32(_luma(r[i], g[i], b[i]))
    return np.int64(total)


@compiled
def _hue(r, g, b, factor, hsv):
    """Turn the hue.

    The roundings are those of PIL's way to HSV, a mixture of float and double, and back: equal for
    every colour. In two loops, because one needs more registers than there are.
    """
    places, saturations, values = hsv[0], hsv[1], hsv[2]
    shift = np.float32(np.trunc(np.float64(factor) * 255.0))
    for i in range(len(r)):
        red, green, blue = r[i], g[i], b[i]
        value = max(red, max(green, blue))
        chroma = value - min(red, min(green, blue))
        of_red, of_green = red == value, green == value
        plus = value - (blue if of_red else (red if of_green else green))
        minus = value - (green if of_red else (blue if of_green else red))
        base = _ZERO if of_red else (_TWO if of_green else _FOUR)
        rest = min(plus, minus) / max(chroma, _ONE)  # the other one is the chroma
        sextant = (base + _ONE) - rest if plus >= minus else (base - _ONE) + rest
        turns = sextant / _SIX
        turns = turns if turns >= _ZERO else turns + _ONE
        hue = np.floor(turns * _TOP) + shift
        hue = hue - _WRAP * np.floor(hue * _UNWRAP)
        places[i] = hue + hue  # in 510ths of a turn, so that a sextant has 85
        saturations[i] = np.floor(chroma / max(value, _ONE) * _TOP)
        values[i] = value
    _from_hue(places, saturations, values, _FIVE * _SEXTANT, r)
    _from_hue(places, saturations, values, _THREE * _SEXTANT, g)
    _from_hue(places, saturations, values, _SEXTANT, b)


@compiled
def _from_hue(places, saturations, values, offset, out):
    """Make a channel: by the place on the circle its full value, its least, or in between."""
    for i in range(len(out)):
        place = places[i] + offset
        place = place if place < _CIRCLE else place - _CIRCLE
        place = min(place, _FOUR * _SEXTANT - place)
        place = min(max(place, _ZERO), _SEXTANT)
        level = values[i] * (_WHOLE - saturations[i] * place)
        out[i] = np.floor(level * _PER_WHOLE + _HALF)


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
        _blur(smooth[c], width, height, box)
        if threshold < NO_LEVEL:
            _solarise(smooth[c, 0], threshold)
    second, third = (0, 0) if gray else (1, 2)
    for y in range(height):
        begin = (border + y) * pitch + border
        end = begin + width
        r, g, b = smooth[0, 0, begin:end], smooth[second, 0, begin:end], smooth[third, 0, begin:end]
        _normalize(r, g, b, scale, shift, line, out[3 * y * width : 3 * (y + 1) * width])


@compiled
def _blur(planes, width, height, box):
    """Blur planes[0], three times along the rows and three times along the columns.

    The two planes have borders of the box's reach, so that each pass is one long loop; what it
    makes of the borders themselves is overwritten.
    """
    inner, outer, whole = box[0], box[1], np.int64(box[2])
    border = whole + 1
    pitch = width + 2 * border
    begin = border * pitch + border
    count = (height - 1) * pitch + width
    for turn in range(6):
        source, target = planes[turn % 2], planes[1 - turn % 2]
        if turn < 3:
            _extend_rows(source, width, height, border)
            _box(source, target, begin, count, 1, whole, inner, outer)
        else:
            _extend_columns(source, width, height, border)
            _box(source, target, begin, count, pitch, whole, inner, outer)


@compiled
def _extend_rows(plane, width, height, border):
    pitch = width + 2 * border
    for y in range(border, border + height):
        row = plane[y * pitch : (y + 1) * pitch]
        row[:border] = row[border]
        row[border + width :] = row[border + width - 1]


@compiled
def _extend_columns(plane, width, height, border):
    pitch = width + 2 * border
    for y in range(border):
        plane[y * pitch : (y + 1) * pitch] = plane[border * pitch : (border + 1) * pitch]
        below, last = border + height + y, border + height - 1
        plane[below * pitch : (below + 1) * pitch] = plane[last * pitch : (last + 1) * pitch]


@compiled
def _box(plane, out, begin, count, step, whole, inner, outer):
    """Average over ``whole`` pixels to both sides, ``step`` apart, and parts of the next ones."""
    left = plane[begin - (whole + 1) * step :]
    right = plane[begin + (whole + 1) * step :]
    out = out[begin : begin + count]
    if whole == 0:
        _box1(left, plane[begin:], right, inner, outer, out)
    elif whole == 1:
        above, middle, below = plane[begin - step :], plane[begin:], plane[begin + step :]
        _box3(left, above, middle, below, right, inner, outer, out)
    else:
        for first in range(0, count, _CHUNK):
            last = min(first + _CHUNK, count)
            total = np.zeros((1, last - first), np.uint32)[0]
            for k in range(-whole, whole + 1):
                _add(plane[begin + k * step + first :], total)
            _box_of(left[first:], total, right[first:], inner, outer, out[first:last])


@compiled
def _box1(left, x, right, inner, outer, out):
    for i in range(len(out)):
        out[i] = _level(np.uint32(x[i]), np.uint32(left[i]) + np.uint32(right[i]), inner, outer)


@compiled
def _box3(left, x, y, z, right, inner, outer, out):
    for i in range(len(out)):
        total = np.uint32(x[i]) + np.uint32(y[i]) + np.uint32(z[i])
        out[i] = _level(total, np.uint32(left[i]) + np.uint32(right[i]), inner, outer)


@compiled
def _box_of(left, total, right, inner, outer, out):
    for i in range(len(out)):
        out[i] = _level(total[i], np.uint32(left[i]) + np.uint32(right[i]), inner, outer)


@compiled
def _add(x, total):
    for i in range(len(total)):
        total[i] = np.uint32(total[i] + np.uint32(x[i]))


@compiled
def _level(whole, ends, inner, outer):
    """Weigh, round. Sums stay below 2**32; numba would make them 64 bits wide."""
    total = np.uint32(np.uint32(whole) * inner) + np.uint32(np.uint32(ends) * outer)
    return np.uint32(np.uint32(total) + _BOX_HALF) >> _BOX_BITS
