"""The photometric stage on a GPU: Triton kernels that equal the reference to the last bit.

- A blend is the reference's float32 arithmetic step by step. For that the kernels are compiled
  without fused multiply-adds, which would round once where PIL rounds twice.
- Hue in float32 truncates as PIL's mix of float and double does, for all 2**24 colours and 256
  shifts, because its three divisions are IEEE's.
- Luma, the mean gray of contrast and the blur are sums of whole numbers.
- Normalisation and the rounding to ``dtype`` are a table of 3 x 256 values that the reference made.
- Solarising inverts a level on its way to that table, in registers.

The blur keeps PIL's six passes: a box three times along each axis, whole levels after each. A pass
is 5 taps for a sigma below 2.4, so six of them are no more work than a composed filter of 13 taps
along each axis. That would save memory traffic, but round elsewhere than PIL.

What a batch launches on the current stream for the views of one side, none of which the host waits
for:

==================== ======================= ===================================================
what                 for                     bytes for each pixel of a view
==================== ======================= ===================================================
an upload            all parameters          48 bytes a view, from pinned memory
memset, sums of gray if a view has contrast  reads 3 in views that have it
jitter and gray      all views               reads 3; writes the result, or 3 if it will be blurred
six boxes            views that are blurred  read 3 and write 3; the sixth writes the result
==================== ======================= ===================================================

A result is 6 bytes a pixel in a 16-bit type, so the floor, to read the crop and to write the
result, is 9. With the paper's probabilities (contrast .8, blur .5) a pixel takes
.8 x 3 + 3 + .5 x 6 + .5 x 3 + .5 x (5 x 6 + 3 + 6) = 29.4 bytes, so the floor is 31% of it. Two
thirds are the blur's. Recipes without blur take 11.4 bytes: 79%.
"""

# The parameters of kernels have types that are Triton's own, found out when they are compiled.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.views.batch import Crops, to_device
from fastsiam.views.draws import BRIGHTNESS, CONTRAST, HUE, SATURATION, ViewParams

from .operations import Operations, side_by_side
from .reference import box_weights, normalize

_BRIGHTNESS, _CONTRAST = tl.constexpr(BRIGHTNESS), tl.constexpr(CONTRAST)
_SATURATION, _HUE = tl.constexpr(SATURATION), tl.constexpr(HUE)

_BLOCK = 1024  # pixels, or in the blur values, of one program
_COMPILER: dict[str, Any] = {"enable_fp_fusion": False}

# Columns of the table of views, all float32, whose whole numbers are below 2**24 and thus exact.
_OPS, _FACTORS = tl.constexpr(0), tl.constexpr(4)  # four each: slot by slot
_BEFORE = tl.constexpr(8)  # slots before the contrast; -1: no contrast
_GRAY = tl.constexpr(9)
_PLACE = tl.constexpr(10)  # place among the blurred views; -1: no blur
_THRESHOLD = tl.constexpr(11)  # of solarising; 256: none
_COLUMNS = tl.constexpr(12)  # 48 bytes: rows, and what follows them, stay 16-byte aligned


def photometric(
    crops: Crops, params: ViewParams, config: AugmentConfig, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Do what ``fastsiam.views.photometric.photometric`` says.

    The crops lie on a GPU; in Triton's interpreter, on the CPU.
    """
    return side_by_side(_finish, crops, params, config, dtype)


def _finish(crops: Tensor, what: Operations, config: AugmentConfig, dtype: torch.dtype) -> Tensor:
    """Take crops of one side through the stage; see ``operations.Finish``."""
    count, side, _, _ = crops.shape
    assert crops.dtype == torch.uint8
    crops, pixels = crops.contiguous(), side * side
    views, boxes = _tables(what)
    lookup, view_table, box_table = _upload(_lookup(config, dtype), views, boxes, crops.device)
    out = crops.new_empty(count, side, side, 3, dtype=dtype)
    scratch = [crops.new_empty(len(boxes), side, side, 3) for _ in range(2)]
    sums = torch.zeros(count, dtype=torch.int64, device=crops.device)
    with torch.cuda.device_of(crops):
        blocks = triton.cdiv(pixels, _BLOCK)
        size = pixels, blocks, _BLOCK
        if (views[:, _BEFORE.value] >= 0).any():
            _sum_gray[(count * blocks,)](crops, view_table, sums, *size, **_COMPILER)
        _jitter_views[(count * blocks,)](
            crops, view_table, sums, lookup, scratch[0], out, *size, **_COMPILER
        )
        blocks = triton.cdiv(3 * pixels, _BLOCK)
        for number in range(6 if len(boxes) else 0):
            last, stride = number == 5, 3 if number < 3 else 3 * side
            source, target = scratch[number % 2], out if last else scratch[1 - number % 2]
            tables = box_table, view_table, lookup
            _box_blur[(len(boxes) * blocks,)](
                source, target, *tables, side, stride, last, blocks, _BLOCK, **_COMPILER
            )
    return out.permute(0, 3, 1, 2)


def _tables(what: Operations) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return a row of numbers for each of the M views, and one for each that is blurred.

    A blurred view's row is the weight of the box's whole pixels, that of its two ends, its whole
    radius, and the view.
    """
    order, blurred = what.order, what.blurred
    factor = what.factor.astype(np.float64)
    factor[:, HUE] = np.trunc(factor[:, HUE] * 255) % 256
    contrast = order == CONTRAST
    inner, outer, whole = box_weights(what.blur[blurred])
    views = np.full((len(order), _COLUMNS.value), -1, np.float32)
    views[:, _OPS.value : _OPS.value + 4] = order
    views[:, _FACTORS.value : _FACTORS.value + 4] = np.take_along_axis(factor, order % 4, axis=1)
    views[:, _BEFORE.value] = np.where(contrast.any(1), contrast.argmax(1), -1)
    views[:, _GRAY.value] = what.gray
    views[blurred, _PLACE.value] = np.arange(len(blurred))
    views[:, _THRESHOLD.value] = what.solarise
    return views, np.stack([inner, outer, whole, blurred], axis=1).astype(np.float32)


@lru_cache(maxsize=8)
def _lookup(config: AugmentConfig, dtype: torch.dtype) -> Tensor:
    """Return what becomes of each level in each channel: (3, 256) of ``dtype``."""
    levels = torch.arange(256.0).view(1, 1, 1, 256).expand(1, 3, 1, 256)
    return normalize(levels, config).view(3, 256).to(dtype)


def _upload(
    lookup: Tensor,
    views: NDArray[np.float32],
    boxes: NDArray[np.float32],
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy the tables to the device, as one: a copy costs the host as much as a launch."""
    parts = [lookup.view(torch.uint8).numpy(), views, boxes]
    flat = [part.view(np.uint8).ravel() for part in parts]
    copy = to_device(np.concatenate(flat), device).split([part.size for part in flat])
    return copy[0].view(lookup.dtype), copy[1].view(torch.float32), copy[2].view(torch.float32)


# A program owns a block of one view; r, g, b are float32 that hold whole levels.


@triton.jit
def _sum_gray(crops, views, sums, PIXELS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the luma that each view has when its contrast's turn comes."""
    view = (tl.program_id(0) // BLOCKS).to(tl.int64)
    at = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    row = views + view * _COLUMNS
    before = tl.load(row + _BEFORE).to(tl.int32)
    if before >= 0:
        r, g, b = _load(crops + view * (3 * PIXELS), at, PIXELS)
        r, g, b = _jitter(r, g, b, row, before, 0.0)
        gray = tl.where(at < PIXELS, _luma(r, g, b).to(tl.int32), 0)
        tl.atomic_add(sums + view, tl.sum(gray, axis=0).to(tl.int64))


@triton.jit
def _jitter_views(
    crops,
    views,
    sums,
    lookup,
    scratch,
    out,
    PIXELS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Jitter and gray; then the result, or for views that will be blurred the levels."""
    view = (tl.program_id(0) // BLOCKS).to(tl.int64)
    at = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    row = views + view * _COLUMNS
    total = tl.load(sums + view)
    mean = total // PIXELS
    mean += (2 * (total - mean * PIXELS) >= PIXELS).to(tl.int64)
    r, g, b = _load(crops + view * (3 * PIXELS), at, PIXELS)
    r, g, b = _jitter(r, g, b, row, 4, mean.to(tl.float32))
    if tl.load(row + _GRAY) > 0:
        r = _luma(r, g, b)
        g = r
        b = r
    inside = at < PIXELS
    place = tl.load(row + _PLACE).to(tl.int64)
    if place >= 0:
        pixel = scratch + place * (3 * PIXELS) + at * 3
        tl.store(pixel, r.to(tl.uint8), inside)
        tl.store(pixel + 1, g.to(tl.uint8), inside)
        tl.store(pixel + 2, b.to(tl.uint8), inside)
    else:
        threshold = tl.load(row + _THRESHOLD)
        r, g, b = _solarise(r, threshold), _solarise(g, threshold), _solarise(b, threshold)
        result = out + view * (3 * PIXELS) + at * 3
        tl.store(result, tl.load(lookup + r.to(tl.int32)), inside)
        tl.store(result + 1, tl.load(lookup + 256 + g.to(tl.int32)), inside)
        tl.store(result + 2, tl.load(lookup + 512 + b.to(tl.int32)), inside)


@triton.jit
def _box_blur(
    source,
    target,
    boxes,
    views,
    lookup,
    SIDE: tl.constexpr,
    STRIDE: tl.constexpr,
    LAST: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Blur by one box along the axis whose neighbours lie ``STRIDE`` values apart."""
    VALUES: tl.constexpr = 3 * SIDE * SIDE
    place = (tl.program_id(0) // BLOCKS).to(tl.int64)
    value = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    inside = value < VALUES
    value = tl.minimum(value, VALUES - 1)
    inner = tl.load(boxes + place * 4).to(tl.uint32)
    outer = tl.load(boxes + place * 4 + 1).to(tl.uint32)
    whole = tl.load(boxes + place * 4 + 2).to(tl.int32)
    at = (value // STRIDE) % SIDE
    line = source + place * VALUES + (value - at * STRIDE)
    ends = tl.load(line + tl.maximum(at - whole - 1, 0) * STRIDE).to(tl.uint32)
    ends += tl.load(line + tl.minimum(at + whole + 1, SIDE - 1) * STRIDE).to(tl.uint32)
    middle = tl.zeros((BLOCK,), tl.uint32)
    offset = -whole
    while offset <= whole:
        near = tl.minimum(tl.maximum(at + offset, 0), SIDE - 1)  # edges repeat outwards
        middle += tl.load(line + near * STRIDE).to(tl.uint32)
        offset += 1
    level = (middle * inner + ends * outer + (1 << 23)) >> 24  # below 2**32, as in PIL
    if LAST:
        view = tl.load(boxes + place * 4 + 3).to(tl.int64)
        threshold = tl.load(views + view * _COLUMNS + _THRESHOLD)
        level = _solarise(level.to(tl.float32), threshold)
        result = tl.load(lookup + (value % 3) * 256 + level.to(tl.int32))
        tl.store(target + view * VALUES + value, result, inside)
    else:
        tl.store(target + place * VALUES + value, level.to(tl.uint8), inside)


@triton.jit
def _load(crop, at, PIXELS: tl.constexpr):
    pixel = crop + at * 3
    inside = at < PIXELS
    r = tl.load(pixel, inside, 0).to(tl.float32)
    g = tl.load(pixel + 1, inside, 0).to(tl.float32)
    b = tl.load(pixel + 2, inside, 0).to(tl.float32)
    return r, g, b


@triton.jit
def _jitter(r, g, b, row, slots, mean):
    slot = 0
    while slot < slots:
        op = tl.load(row + _OPS + slot)
        factor = tl.load(row + _FACTORS + slot)
        if op == _BRIGHTNESS:
            r, g, b = _blend(0.0, r, factor), _blend(0.0, g, factor), _blend(0.0, b, factor)
        elif op == _CONTRAST:
            r, g, b = _blend(mean, r, factor), _blend(mean, g, factor), _blend(mean, b, factor)
        elif op == _SATURATION:
            gray = _luma(r, g, b)
            r, g, b = _blend(gray, r, factor), _blend(gray, g, factor), _blend(gray, b, factor)
        elif op == _HUE:
            r, g, b = _turn_hue(r, g, b, factor)
        slot += 1
    return r, g, b


@triton.jit
def _blend(degenerate, x, factor):
    mixed = degenerate + factor * (x - degenerate)
    return tl.floor(tl.minimum(tl.maximum(mixed, 0.0), 255.0))


@triton.jit
def _luma(r, g, b):
    return tl.floor((r * 19595.0 + g * 38470.0 + b * 7471.0 + 32768.0) * 0.0000152587890625)


@triton.jit
def _solarise(x, threshold):
    return tl.where(x >= threshold, 255.0 - x, x)


@triton.jit
def _turn_hue(r, g, b, shift):
    """Add ``shift`` of 256 to the hue, through PIL's HSV."""
    value = tl.maximum(tl.maximum(r, g), b)
    low = tl.minimum(tl.minimum(r, g), b)
    chroma = value - low
    # The hue lies beside one of three corners, by the middle channel's distance from the largest.
    middle = tl.div_rn(value + low - (r + g + b) + value, tl.maximum(chroma, 1.0))
    red = r == value
    green = g == value
    corner = tl.where(red, 0.0, tl.where(green, 2.0, 4.0))
    onwards = tl.where(red, b, tl.where(green, r, g)) == low
    hue = tl.where(onwards, (corner + 1.0) - middle, (corner - 1.0) + middle)
    hue = tl.div_rn(hue, 6.0)
    hue = tl.floor(tl.where(hue < 0.0, hue + 1.0, hue) * 255.0)
    hue = tl.where(chroma == 0.0, 0.0, hue) + shift
    hue = tl.where(hue >= 256.0, hue - 256.0, hue)
    saturation = tl.floor(tl.div_rn(chroma, tl.maximum(value, 1.0)) * 255.0) * (1 / 255)
    # Back: one channel is the value, one the lowest, and one lies between them.
    sextant = tl.floor(hue * 6.0 * (1 / 255))
    f = (hue * 6.0 - sextant * 255.0) * (1 / 255)
    falls = (sextant == 1.0) | (sextant == 3.0) | (sextant == 5.0)
    between = tl.floor(value * (1.0 - saturation * tl.where(falls, f, 1.0 - f)) + 0.5)
    low = tl.floor(value * (1.0 - saturation) + 0.5)
    r = tl.where((sextant == 2.0) | (sextant == 3.0), low, value)
    r = tl.where((sextant == 1.0) | (sextant == 4.0), between, r)
    g = tl.where((sextant == 1.0) | (sextant == 2.0), value, between)
    g = tl.where((sextant == 4.0) | (sextant == 5.0), low, g)
    b = tl.where((sextant == 3.0) | (sextant == 4.0), value, low)
    b = tl.where((sextant == 2.0) | (sextant == 5.0), between, b)
    return r, g, b
