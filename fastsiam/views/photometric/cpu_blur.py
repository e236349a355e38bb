"""PIL's Gaussian blur for the CPU's photometric stage, compiled by numba: six box blurs."""

# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=misc
# What numba compiles has no annotations: one function serves arrays of several types.

from __future__ import annotations

import numpy as np

from fastsiam.kernels.jit import compiled

_CHUNK = 1024  # sums that stay in the first-level cache
_HALF, _BITS = np.uint32(1 << 23), np.uint32(24)


@compiled
def blur(planes, width, height, box):
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
    return np.uint32(np.uint32(total) + _HALF) >> _BITS
