"""Crops on the CPU, compiled by numba, in threads.

PIL resamples by a triangle filter, widened when it shrinks, along one axis and then along the
other, and rounds to whole levels after each. Its weights are whole 2**-22ths and its sums integers,
here as there: crops are equal to PIL's to the last bit.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="misc,attr-defined"
# What numba compiles has no annotations: one function serves arrays of several types.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.kernels.jit import compiled
from fastsiam.kernels.threads import in_threads, take

from . import Cuts

_PRECISION = 22
"""Bits of a weight's fraction, as in PIL."""
_AHEAD = 5  # bytes that are read behind the last pixel of a row, and given no weight
_ONE, _HALF = float(1 << _PRECISION), np.int32(1 << (_PRECISION - 1))


def crop_side(
    pixels: Tensor, start: NDArray[np.int64], size: NDArray[np.int64], cuts: Cuts, side: int
) -> Tensor:
    """Cut the crops of one side out of N images that lie one after the other.

    Args:
        pixels: (bytes,) uint8: the images, each H x W x 3.
        start: (N,) where each begins.
        size: (N, 2) height and width of each.
        cuts: V of each.
        side: of the result, in pixels.

    Returns:
        (V, N, side, side, 3) uint8.
    """
    views, n = cuts.flip.shape
    crops = torch.empty((views, n, side, side, 3), dtype=torch.uint8)
    source, out = pixels.numpy(), crops.numpy().reshape(views, n, -1)
    height, width = size.max(0).tolist() if n else (0, 0)
    arrays = in_arrays(cuts)

    def work(counter: NDArray[np.int64]) -> None:
        scratch = Scratch(height, width, side).arrays
        _crop_all(source, start, size, arrays, side, out, scratch, counter)

    in_threads(work, n)
    return crops


def crop_images(images: Sequence[NDArray[np.uint8]], cuts: Cuts, out: Tensor) -> None:
    """Cut crops out of images that lie anywhere.

    Args:
        images: N arrays H x W x 3.
        cuts: V of each of the N images.
        out: (V, N, side, side, 3) uint8, contiguous, filled in.
    """
    views, n, side, _, _ = out.shape
    target = out.numpy().reshape(views, n, -1)
    height = max(image.shape[0] for image in images)
    width = max(image.shape[1] for image in images)

    sources = [image.reshape(-1) for image in images]
    addresses = np.array([source.ctypes.data for source in sources])
    size = np.array([image.shape[:2] for image in images])
    shrink, arrays = cuts.shrink, in_arrays(cuts)

    def work(counter: NDArray[np.int64]) -> None:
        scratch = Scratch(height, width, side, shrink=shrink).arrays
        _crop_each(addresses, size, arrays, side, target, scratch, counter)

    in_threads(work, n)
    del sources  # until here the addresses are theirs


class Scratch:
    """What one thread needs to crop images of up to a given size.

    Args:
        height: of the images.
        width: of the images.
        side: of the crops.
        shrink: ``Cuts.shrink``; by default, that of a whole image which becomes a crop.
    """

    def __init__(self, height: int, width: int, side: int, *, shrink: float | None = None) -> None:
        longest = max(height, width, side)
        taps = math.ceil(2 * max(longest / side if shrink is None else shrink, 1.0))
        self.arrays = (
            np.empty(height * 3 * side + 1, np.uint8),  # between the passes
            np.empty((2, 3 * longest + _AHEAD), np.uint8),  # a row of the source, one of the result
            np.empty(3 * longest, np.int32),
            np.empty((side, taps), np.int32),  # weights
            np.empty(side, np.int64),  # the first pixel that each of them weighs
            np.empty((side, 8 * math.ceil(taps / 2)), np.int32),  # those along x, laid out
            np.empty(side, np.int64),
        )


def in_arrays(cuts: Cuts) -> tuple[NDArray[Any], ...]:
    """Return the cuts as compiled functions take them."""
    return cuts.box, cuts.flip, cuts.resized, cuts.corner


@compiled
def _crop_all(source, start, size, cuts, side, out, scratch, counter):
    """Make the crops of one image after the other, as long as there are any."""
    while True:
        i = take(counter.ctypes.data)  # type: ignore[call-arg, var-annotated]
        if i >= len(start):
            return
        image = source[start[i] : start[i] + 3 * size[i, 0] * size[i, 1]]
        crop(image, size[i, 1], cuts, i, side, out, scratch)


@compiled
def _crop_each(addresses, size, cuts, side, out, scratch, counter):
    """Make the crops of images that lie at addresses, as long as there are any."""
    while True:
        i = take(counter.ctypes.data)  # type: ignore[call-arg, var-annotated]
        if i >= len(addresses):
            return
        image = carray(_bytes_at(addresses[i]), 3 * size[i, 0] * size[i, 1])
        crop(image, size[i, 1], cuts, i, side, out, scratch)


@intrinsic
def _bytes_at(context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.CPointer(types.uint8)(types.intp), generate


@compiled
def crop(image, width, cuts, i, side, out, scratch):
    """Make the crops of one image.

    Args:
        image: (height * width * 3,) uint8, interleaved.
        width: of the image, in pixels.
        cuts: ``in_arrays`` of N images' cuts.
        i: the image's place among them.
        side: of the result, in pixels.
        out: (V, N, side * side * 3) uint8.
        scratch: ``Scratch.arrays``.
    """
    box, flip, resized, corner = cuts
    for view in range(len(out)):
        target = out[view, i]
        own = box[view, i], flip[view, i], resized[view, i], corner[view, i]
        _crop(image, width, own, side, target, scratch)


@compiled
def _crop(image, width, cut, side, out, scratch):
    """Make one crop."""
    rows, row, sums, weights, begin, table, first = scratch
    box, flip, resized, corner = cut
    top, left, tall, wide = np.int64(box[0]), np.int64(box[1]), np.int64(box[2]), np.int64(box[3])
    high, broad = np.int64(resized[0]), np.int64(resized[1])
    taps = _filter(wide, broad, corner[1], weights, begin)
    groups = _spread(weights, begin, taps, flip, table, first)
    begin_x, end_x = 3 * begin[0], 3 * (begin[side - 1] + taps)
    taps = _filter(tall, high, corner[0], weights, begin)
    pitch, length = 3 * width, 3 * side
    inside = image[top * pitch + 3 * left :]
    if tall > high and tall - high > 2 * (wide - broad):  # Pillow 13's rule; before, never
        for y in range(side):
            source, line = inside[begin[y] * pitch + begin_x :], row[0, begin_x:end_x]
            _weigh_rows(source, pitch, weights[y], taps, sums, line)
            _weigh_pixels(row[0], table, first, groups, row[1])
            for i in range(length):
                out[y * length + i] = row[1, i]
        return
    above = begin[0]
    for y in range(above, begin[side - 1] + taps):
        source, line = inside[y * pitch :], row[0]
        if len(source) < 3 * wide + _AHEAD:  # the image's last row
            for i in range(3 * wide):
                line[i] = source[i]
            source = line
        _weigh_pixels(source, table, first, groups, rows[(y - above) * length :])
    for y in range(side):
        source, target = rows[(begin[y] - above) * length :], out[y * length : (y + 1) * length]
        _weigh_rows(source, length, weights[y], taps, sums, target)


@compiled
def _filter(length, resized, corner, weights, begin):
    """Fill in the weights that make ``resized`` pixels of ``length``, beginning at ``corner``.

    What would lie before the first or behind the last gets none, and is black.

    Returns:
        How many weights each pixel has.
    """
    scale = length / resized
    support = max(scale, 1.0)
    taps = min(length, math.ceil(2 * support))
    for x in range(len(begin)):
        place = x + corner
        centre = (place + 0.5) * scale
        first = min(max(int(centre - support + 0.5), 0), length - taps)
        total = 0.0
        for k in range(taps):
            total += max(1.0 - abs((first + k - centre + 0.5) * (1 / support)), 0.0)
        for k in range(taps):
            weight = max(1.0 - abs((first + k - centre + 0.5) * (1 / support)), 0.0) / total
            weights[x, k] = int(weight * _ONE + 0.5) if 0 <= place < resized else 0
        begin[x] = first
    return taps


@compiled
def _spread(weights, begin, taps, flip, table, first):
    """Lay out the horizontal weights as ``_weigh_pixel`` takes them, mirrored if need be."""
    side = len(begin)
    groups = (taps + 1) // 2
    for x in range(side):
        target = side - 1 - x if flip else x
        first[target] = begin[x]
        for group in range(groups):
            for lane in range(8):
                k = 2 * group + lane // 3
                table[target, 8 * group + lane] = weights[x, k] if lane < 6 and k < taps else 0
    return groups


@compiled
def _weigh_pixels(source, table, first, groups, out):
    """Make one row of pixels; one more byte is written."""
    pixels, weights, target = source.ctypes.data, table.ctypes.data, out.ctypes.data
    pitch = table.strides[0]
    if groups == 1:
        for x in range(len(first)):
            _weigh_1(pixels + 3 * first[x], weights + pitch * x, target + 3 * x, groups)
    elif groups == 2:
        for x in range(len(first)):
            _weigh_2(pixels + 3 * first[x], weights + pitch * x, target + 3 * x, groups)
    elif groups == 3:
        for x in range(len(first)):
            _weigh_3(pixels + 3 * first[x], weights + pitch * x, target + 3 * x, groups)
    else:
        for x in range(len(first)):
            _weigh(pixels + 3 * first[x], weights + pitch * x, target + 3 * x, groups)


@compiled
def _weigh_rows(source, pitch, weights, taps, sums, out):
    """Make one row of several that lie ``pitch`` apart."""
    count = len(out)
    first, second = source[:count], source[pitch : pitch + count]
    w0, w1 = weights[0], weights[min(1, taps - 1)]
    if taps == 2:
        for i in range(count):
            out[i] = _level(_add(_add(_HALF, w0, first[i]), w1, second[i]))
    elif taps == 3:
        third, w2 = source[2 * pitch : 2 * pitch + count], weights[2]
        for i in range(count):
            total = _add(_add(_HALF, w0, first[i]), w1, second[i])
            out[i] = _level(_add(total, w2, third[i]))
    elif taps == 4:
        third, w2 = source[2 * pitch : 2 * pitch + count], weights[2]
        fourth, w3 = source[3 * pitch : 3 * pitch + count], weights[3]
        for i in range(count):
            total = _add(_add(_HALF, w0, first[i]), w1, second[i])
            out[i] = _level(_add(_add(total, w2, third[i]), w3, fourth[i]))
    else:
        for i in range(count):
            sums[i] = _add(_HALF, w0, first[i])
        for k in range(1, taps):
            row, weight = source[k * pitch : k * pitch + count], weights[k]
            for i in range(count):
                sums[i] = _add(sums[i], weight, row[i])
        for i in range(count):
            out[i] = _level(sums[i])


@compiled
def _add(total, weight, level):
    """Add a product; numba would make 64 bits of each step, and half as many a second."""
    return np.int32(total + np.int32(weight * np.int32(level)))


@compiled
def _level(total):
    return np.uint8(total >> np.int32(_PRECISION))


def _weigh_pixel(groups: int) -> Any:
    """Return a function (addresses of pixels, of weights and of the result): a weighted sum.

    It takes two pixels at once, each byte with a weight of its own: a load, a product and a sum,
    which no compiler finds in a loop over three channels. So two bytes are read behind the last
    pixel, whose weights are 0, and one is written behind the result.

    Args:
        groups: of two pixels; 0 if their number is an argument.
    """

    @intrinsic
    def weigh(context, pixels, weights, target, many):
        def generate(context, builder, signature, arguments):
            pixels, weights, target, many = arguments
            byte, word, index = ir.IntType(8), ir.IntType(32), ir.IntType(64)
            pair, pixel = ir.VectorType(word, 8), ir.VectorType(word, 4)

            def load(address: Any, group: Any, stride: int, kind: Any) -> Any:
                place = builder.add(address, builder.mul(group, ir.Constant(index, stride)))
                pointer = builder.inttoptr(place, ir.VectorType(kind, 8).as_pointer())
                return builder.load(pointer, align=1)

            def add_group(total: Any, group: Any) -> Any:
                levels = builder.zext(load(pixels, group, 6, byte), pair)
                return builder.add(total, builder.mul(levels, load(weights, group, 32, word)))

            def lanes_from(first: int) -> Any:
                lanes = ir.Constant(pixel, [first + lane for lane in range(4)])
                return builder.shuffle_vector(total, total, lanes)

            total = ir.Constant(pair, [0] * 8)
            if groups:
                for group in range(groups):
                    total = add_group(total, ir.Constant(index, group))
            else:
                before, loop = builder.block, builder.append_basic_block("groups")
                builder.branch(loop)
                builder.position_at_end(loop)
                group, so_far = builder.phi(index), builder.phi(pair)
                group.add_incoming(ir.Constant(index, 0), before)
                so_far.add_incoming(total, before)
                total = add_group(so_far, group)
                following = builder.add(group, ir.Constant(index, 1))
                group.add_incoming(following, loop)
                so_far.add_incoming(total, loop)
                after = builder.append_basic_block("done")
                builder.cbranch(builder.icmp_signed("<", following, many), loop, after)
                builder.position_at_end(after)
            result = builder.add(lanes_from(0), lanes_from(3))
            result = builder.add(result, ir.Constant(pixel, [1 << (_PRECISION - 1)] * 4))
            result = builder.ashr(result, ir.Constant(pixel, [_PRECISION] * 4))
            four_bytes = ir.VectorType(byte, 4)
            pointer = builder.inttoptr(target, four_bytes.as_pointer())
            builder.store(builder.trunc(result, four_bytes), pointer, align=1)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp, types.intp), generate

    return weigh


_weigh, _weigh_1, _weigh_2, _weigh_3 = (_weigh_pixel(groups) for groups in range(4))
