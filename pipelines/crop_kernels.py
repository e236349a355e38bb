"""Triton kernels for the geometric stage: crop and resize images in GPU memory.

The result is bit-identical to PIL's. PIL resizes in two passes, one along each axis. Its triangle
filter widens when it shrinks an image, stays inside the crop, and has weights that are multiples of
2**-22. Each pass rounds to integer levels. So there are two kernels:

- ``_weigh`` computes the weights of every crop in float64, like PIL, one row for each axis. It is
  compiled without fused multiply-adds, which would round differently.
- ``_resize`` computes one pixel of a crop in integers. It recomputes the first pass for each tap of
  the second, so no intermediate result is stored. That is at most about twice the work: a crop that
  shrinks k times has 2k taps along an axis, so 4k**2 per pixel, while a stored first pass takes
  k rows of 2k taps and then 2k.

The order of the passes affects the rounding. It is that of Pillow 13. If an older Pillow runs the
horizontal pass first, pixels differ by one level in crops that shrink more in height.

The host does not wait for the work that a batch launches on the current stream: an upload from
pinned memory (88 bytes per crop), ``_weigh`` and ``_resize``. The weights take 4 S (2 + taps) bytes
per crop, where S is its side and taps counts those of both passes.
"""

# Triton infers the types of kernel parameters when it compiles the kernels.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.views.batch import to_device

from .cuts import Cuts

_BLOCK = 256  # output pixels, or positions along an axis, per program
_COMPILER: dict[str, Any] = {"enable_fp_fusion": False}

# Columns of the table of crops, int64.
_ORIGIN = tl.constexpr(0)  # offset of the crop's first byte in ``pixels``
_FLIP = tl.constexpr(1)
_VERTICAL_FIRST = tl.constexpr(2)
_PASSES = tl.constexpr(3)  # two groups of these columns, in the order of the passes:
_LENGTH = tl.constexpr(0)  # size of the crop along the axis, in pixels
_STRIDE = tl.constexpr(1)  # bytes from one pixel to the next along the axis
_TAPS = tl.constexpr(2)  # maximum number of taps of an output pixel
_WEIGHTS = tl.constexpr(3)  # offset of the pass's weights
_PASS_COLUMNS = tl.constexpr(4)
_COLUMNS = tl.constexpr(11)


def crop_side(
    pixels: Tensor, start: NDArray[np.int64], size: NDArray[np.int64], cuts: Cuts, side: int
) -> Tensor:
    """Make the crops of one size from N images in a flat buffer.

    Args:
        pixels: (bytes,) uint8: the images, each H x W x 3, on a GPU; in Triton's interpreter, on
            the CPU.
        start: (N,) offset of each image in ``pixels``, in bytes.
        size: (N, 2) height and width of each image.
        cuts: V cuts of each image, whose boxes are resized to ``side`` x ``side``.
        side: side of the crops, in pixels.

    Returns:
        (V, N, side, side, 3) uint8.

    Raises:
        ValueError: ``pixels`` is not contiguous uint8, or a cut is not a complete resized box.
    """
    if pixels.dtype != torch.uint8 or not pixels.is_contiguous():
        raise ValueError(f"pixels are {pixels.dtype}, or not contiguous: pass contiguous uint8")
    if (cuts.resized != side).any() or cuts.corner.any():
        raise ValueError(f"cuts are not whole boxes of {side} x {side} pixels: crop on the CPU")
    plan, weights = _plan(start, size, cuts, side)
    views, n = cuts.flip.shape
    table = to_device(plan, pixels.device)
    weight = torch.empty(weights, dtype=torch.int32, device=pixels.device)
    crops = pixels.new_empty(views, n, side, side, 3)
    rows, blocks = triton.cdiv(side, _BLOCK), triton.cdiv(side * side, _BLOCK)
    count = len(plan)
    with torch.cuda.device_of(pixels):
        _weigh[(2 * count * rows,)](table, weight, side, rows, _BLOCK, **_COMPILER)
        _resize[(count * blocks,)](pixels, table, weight, crops, side, blocks, _BLOCK, **_COMPILER)
    return crops


def _plan(
    start: NDArray[np.int64], size: NDArray[np.int64], cuts: Cuts, side: int
) -> tuple[NDArray[np.int64], int]:
    """Return the table with a row for each of the V * N crops, and the number of weights."""
    box, width = cuts.box.astype(np.int64), np.asarray(size, np.int64)[:, 1]
    top, left = box[..., 0], box[..., 1]
    extent = box[..., 2:].reshape(-1, 2)  # vertical, horizontal
    stride = np.stack([np.broadcast_to(3 * width, top.shape), np.full(top.shape, 3)], -1)
    excess = extent - side
    vertical_first = (excess[:, 0] > 0) & (excess[:, 0] > 2 * excess[:, 1])
    order = np.where(vertical_first[:, None], [0, 1], [1, 0])
    passes = np.empty((len(extent), 2, _PASS_COLUMNS.value), np.int64)
    passes[..., _LENGTH.value] = np.take_along_axis(extent, order, axis=1)
    passes[..., _STRIDE.value] = np.take_along_axis(stride.reshape(-1, 2), order, axis=1)
    length = passes[..., _LENGTH.value]
    taps = np.minimum(np.maximum(-(-2 * length // side), 2), length)
    count = side * (1 + taps).reshape(-1)
    passes[..., _TAPS.value] = taps
    passes[..., _WEIGHTS.value] = (np.cumsum(count) - count).reshape(-1, 2)
    plan = np.empty((len(extent), _COLUMNS.value), np.int64)
    plan[:, _ORIGIN.value] = (np.asarray(start) + 3 * (top * width + left)).reshape(-1)
    plan[:, _FLIP.value] = cuts.flip.reshape(-1)
    plan[:, _VERTICAL_FIRST.value] = vertical_first
    plan[:, _PASSES.value :] = passes.reshape(len(extent), -1)
    return plan, int(count.sum())


@triton.jit
def _weigh(table, weights, SIDE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the first tap and the weights of each position of a pass: (1 + taps, SIDE) int32."""
    number = (tl.program_id(0) // BLOCKS).to(tl.int64)
    at = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    row = table + (number // 2) * _COLUMNS + _PASSES + (number % 2) * _PASS_COLUMNS
    length = tl.load(row + _LENGTH).to(tl.int32)
    taps = tl.load(row + _TAPS).to(tl.int32)
    target = weights + tl.load(row + _WEIGHTS) + at
    inside = at < SIDE
    scale = length.to(tl.float64) / SIDE
    support = tl.maximum(scale, 1.0)
    centre = (tl.minimum(at, SIDE - 1).to(tl.float64) + 0.5) * scale
    first = tl.maximum((centre - support + 0.5).to(tl.int32), 0)
    last = tl.minimum((centre + support + 0.5).to(tl.int32), length)
    tl.store(target, first, inside)
    inverse = 1.0 / support
    total = tl.zeros((BLOCK,), tl.float64)
    tap = 0
    while tap < taps:
        total += _triangle(first + tap, last, centre, inverse)
        tap += 1
    tap = 0
    while tap < taps:
        share = _triangle(first + tap, last, centre, inverse) / total
        tl.store(target + (1 + tap) * SIDE, (share * 4194304.0 + 0.5).to(tl.int32), inside)
        tap += 1


@triton.jit
def _triangle(pixel, last, centre, inverse):
    distance = tl.abs((pixel.to(tl.float64) - centre + 0.5) * inverse)
    return tl.where(pixel < last, tl.maximum(1.0 - distance, 0.0), 0.0)


@triton.jit
def _resize(
    pixels,
    table,
    weights,
    crops,
    SIDE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a block of pixels of one crop."""
    PIXELS: tl.constexpr = SIDE * SIDE
    crop = (tl.program_id(0) // BLOCKS).to(tl.int64)
    at = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = at < PIXELS
    at = tl.minimum(at, PIXELS - 1)
    row = table + crop * _COLUMNS
    source = pixels + tl.load(row + _ORIGIN)
    y = at // SIDE
    x = at % SIDE
    x = tl.where(tl.load(row + _FLIP) != 0, SIDE - 1 - x, x)
    vertical_first = tl.load(row + _VERTICAL_FIRST) != 0
    length1, stride1, taps1, weight1 = _pass(row + _PASSES, weights)
    length2, stride2, taps2, weight2 = _pass(row + _PASSES + _PASS_COLUMNS, weights)
    weight1 += tl.where(vertical_first, y, x)
    weight2 += tl.where(vertical_first, x, y)
    first1 = tl.load(weight1)
    first2 = tl.load(weight2)
    r = tl.zeros((BLOCK,), tl.int32)
    g = tl.zeros((BLOCK,), tl.int32)
    b = tl.zeros((BLOCK,), tl.int32)
    tap2 = 0
    while tap2 < taps2:
        line = source + tl.minimum(first2 + tap2, length2 - 1) * stride2
        r1 = tl.zeros((BLOCK,), tl.int32)
        g1 = tl.zeros((BLOCK,), tl.int32)
        b1 = tl.zeros((BLOCK,), tl.int32)
        tap1 = 0
        while tap1 < taps1:
            pixel = line + tl.minimum(first1 + tap1, length1 - 1) * stride1
            share1 = tl.load(weight1 + (1 + tap1) * SIDE)
            r1 += share1 * tl.load(pixel).to(tl.int32)
            g1 += share1 * tl.load(pixel + 1).to(tl.int32)
            b1 += share1 * tl.load(pixel + 2).to(tl.int32)
            tap1 += 1
        share2 = tl.load(weight2 + (1 + tap2) * SIDE)
        r += share2 * _level(r1)
        g += share2 * _level(g1)
        b += share2 * _level(b1)
        tap2 += 1
    target = crops + crop * (3 * PIXELS) + at * 3
    tl.store(target, _level(r).to(tl.uint8), inside)
    tl.store(target + 1, _level(g).to(tl.uint8), inside)
    tl.store(target + 2, _level(b).to(tl.uint8), inside)


@triton.jit
def _pass(row, weights):
    length = tl.load(row + _LENGTH).to(tl.int32)
    stride = tl.load(row + _STRIDE).to(tl.int32)
    taps = tl.load(row + _TAPS).to(tl.int32)
    return length, stride, taps, weights + tl.load(row + _WEIGHTS)


@triton.jit
def _level(total):
    """Round a sum in units of 2**-22; thousands of rounded weights can sum to more than 1."""
    return tl.minimum((total + (1 << 21)) >> 22, 255)
