"""Colour jitter, gray and normalisation on a GPU: a Triton kernel with one program per view.

A thread processes four pixels at a time, loaded as three 32-bit words, entirely in registers.

A view with contrast takes two passes: one to compute its mean luma, one for the remaining
operations. Operations before the contrast run only in the first pass, which stores their results in
memory; the second pass reads them back through a cache. One program runs both passes, so there is
no launch between them and no sum in memory. A program has 256 threads. The 132 multiprocessors of
an H200 run 528 programs at once; two views of 512 images are 1,024 programs.
"""

# Triton infers the types of kernel parameters when it compiles a kernel.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from fastsiam.views.draws import BRIGHTNESS, CONTRAST, HUE, SATURATION

# Operations are the digits of an octal number, the first in the lowest digit; 0 is no operation.
BRIGHTEN, BLEND_MEAN = tl.constexpr(BRIGHTNESS + 1), tl.constexpr(CONTRAST + 1)
SATURATE, TURN_HUE = tl.constexpr(SATURATION + 1), tl.constexpr(HUE + 1)
GRAY = tl.constexpr(5)

# Columns of ``views``, all float32. Integers are below 2**24, so they are exact.
FACTORS = tl.constexpr(0)  # four columns: factors of the jitter's operations
TABLE = tl.constexpr(4)  # offset of the view's table in ``lookup``
MEAN = tl.constexpr(5)  # whether there is a contrast operation, which needs the mean luma
FIRST, REST = tl.constexpr(6), tl.constexpr(7)  # operations before the contrast, and from it on
BLURRED = tl.constexpr(8)
COLUMNS = tl.constexpr(12)  # 48 bytes keep rows, and the array after them, 16-byte aligned

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_BIAS = tl.constexpr(2.0**23)  # the lowest byte of float32(_BIAS + level) is the level


@triton.jit
def change_colours(crops, views, lookup, levels, out, PIXELS: tl.constexpr, THREADS: tl.constexpr):
    """Apply jitter and gray, then write results, or levels if the view will be blurred.

    Args:
        crops: (M, 4 * QUADS, 3) bytes as 32-bit words; QUADS is a quarter of PIXELS, rounded up,
            and pixels beyond PIXELS are black.
        views: (M, COLUMNS) float32, parameters of each view.
        lookup: (K, 3, 256) integers with the bit patterns of results.
        levels: output like ``crops`` for views that will be blurred; otherwise scratch memory.
        out: (M, 4 * QUADS, 3) of the type of ``lookup`` as 32-bit words: output for the other
            views.
        PIXELS: pixels per view.
        THREADS: threads per program.
    """
    QUADS: tl.constexpr = (PIXELS + 3) // 4
    view = tl.program_id(0).to(tl.int64)
    row = views + view * COLUMNS
    first = tl.load(row + FIRST).to(tl.int32)
    source, between = crops + view * (3 * QUADS), levels + view * (3 * QUADS)
    mean = tl.zeros((), tl.float32)
    if tl.load(row + MEAN) > 0:
        total = tl.zeros((THREADS, 2, 2), tl.float32)  # exact: sums of integers
        for ahead in range(0, QUADS, THREADS):
            quad = ahead + tl.arange(0, THREADS)
            r, g, b = _load(source, quad, QUADS)
            r, g, b = _change(r, g, b, first, row, mean)
            total += _luma(r, g, b)  # padding is black, and stays black until the contrast
            if first > 0:
                _store_levels(between, quad, r, g, b, QUADS)
        gray = tl.sum(tl.reshape(total, (4 * THREADS,)).to(tl.int64), axis=0)
        mean = ((2 * gray + PIXELS) // (2 * PIXELS)).to(tl.float32)
        tl.debug_barrier()  # threads may read levels that other threads stored
        if first > 0:
            source = between
    rest = tl.load(row + REST).to(tl.int32)
    blurred = tl.load(row + BLURRED) > 0
    lookup += tl.load(row + TABLE).to(tl.int32)
    for ahead in range(0, QUADS, THREADS):
        quad = ahead + tl.arange(0, THREADS)
        r, g, b = _load(source, quad, QUADS)
        r, g, b = _change(r, g, b, rest, row, mean)
        if blurred:
            _store_levels(between, quad, r, g, b, QUADS)
        else:
            _store_results(out, view, quad, lookup, r, g, b, QUADS)


@triton.jit
def four(a, b, c, d):
    """Join four tensors into one of shape (..., 2, 2); elements stay in their threads."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def apart(x):
    """Split a tensor (..., 2, 2) into four; the inverse of ``four``."""
    ac, bd = tl.split(x)
    a, c = tl.split(ac)
    b, d = tl.split(bd)
    return a, b, c, d


@triton.jit
def pairs(low, high):
    """Pack two 16-bit values into each 32-bit word."""
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def look_up(a, b, c, d):
    """Load four tensors separately; joined, their elements would move between threads."""
    return tl.load(a), tl.load(b), tl.load(c), tl.load(d)


@triton.jit
def _load(view, quad, QUADS: tl.constexpr):
    """Load four pixels per thread as r, g, b, (THREADS, 2, 2) float32 with integer values each."""
    word = view + 3 * quad
    inside = quad < QUADS
    x = tl.load(word, inside, 0)
    y = tl.load(word + 1, inside, 0)
    z = tl.load(word + 2, inside, 0)
    r = four(_biased(x, 0), _biased(x, 3), _biased(y, 2), _biased(z, 1))
    g = four(_biased(x, 1), _biased(y, 0), _biased(y, 3), _biased(z, 2))
    b = four(_biased(x, 2), _biased(y, 1), _biased(z, 0), _biased(z, 3))
    return r - _BIAS, g - _BIAS, b - _BIAS


@triton.jit
def _biased(word, BYTE: tl.constexpr):
    """Return ``_BIAS`` plus a byte of the word as float32, without a conversion instruction."""
    return (((word >> (8 * BYTE)) & 255) | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def _bits(x):
    """Return an int32 with the level (an integer) in its lowest byte and 0x4B in its highest."""
    return (x + _BIAS).to(tl.int32, bitcast=True)


@triton.jit
def _store_levels(view, quad, r, g, b, QUADS: tl.constexpr):
    r0, r1, r2, r3 = apart(_bits(r))
    g0, g1, g2, g3 = apart(_bits(g))
    b0, b1, b2, b3 = apart(_bits(b))
    x = (r0 & 255) | (g0 << 8) | (b0 << 16) | (r1 << 24)
    y = (g1 & 255) | (b1 << 8) | (r2 << 16) | (g2 << 24)
    z = (b2 & 255) | (r3 << 8) | (g3 << 16) | (b3 << 24)
    word = view + 3 * quad
    inside = quad < QUADS
    tl.store(word, x, inside)
    tl.store(word + 1, y, inside)
    tl.store(word + 2, z, inside)


@triton.jit
def _store_results(out, view, quad, lookup, r, g, b, QUADS: tl.constexpr):
    lookup -= 0x4B000000  # ``_bits`` returns the level plus this
    r0, r1, r2, r3 = look_up(*apart(lookup + _bits(r)))
    g0, g1, g2, g3 = look_up(*apart(lookup + 256 + _bits(g)))
    b0, b1, b2, b3 = look_up(*apart(lookup + 512 + _bits(b)))
    inside = (quad < QUADS)[:, None]
    if lookup.dtype.element_ty == tl.int32:
        word = out + view * (12 * QUADS) + (12 * quad[:, None] + tl.arange(0, 4)[None, :])
        tl.store(word, tl.reshape(four(r0, g0, b0, r1), (quad.shape[0], 4)), inside)
        tl.store(word + 4, tl.reshape(four(g1, b1, r2, g2), (quad.shape[0], 4)), inside)
        tl.store(word + 8, tl.reshape(four(b2, r3, g3, b3), (quad.shape[0], 4)), inside)
    else:
        word = out + view * (6 * QUADS) + (6 * quad[:, None] + tl.arange(0, 2)[None, :])
        tl.store(word, tl.join(pairs(r0, g0), pairs(b0, r1)), inside)
        tl.store(word + 2, tl.join(pairs(g1, b1), pairs(r2, g2)), inside)
        tl.store(word + 4, tl.join(pairs(b2, r3), pairs(g3, b3)), inside)


@triton.jit
def _change(r, g, b, operations, row, mean):
    """Apply operations in order; r, g, b are float32 with integer values."""
    while operations > 0:
        op = operations % 8
        operations //= 8
        factor = tl.load(row + FACTORS + tl.minimum(tl.maximum(op, 1), 4) - 1)
        if op == BRIGHTEN:
            r, g, b = _scale(r, factor), _scale(g, factor), _scale(b, factor)
        elif op == BLEND_MEAN:
            r, g, b = _blend(mean, r, factor), _blend(mean, g, factor), _blend(mean, b, factor)
        elif op == SATURATE:
            gray = _luma(r, g, b)
            r, g, b = _blend(gray, r, factor), _blend(gray, g, factor), _blend(gray, b, factor)
        elif op == TURN_HUE:
            r, g, b = _turn_hue(r, g, b, factor)
        elif op == GRAY:
            r = _luma(r, g, b)
            g = r
            b = r
    return r, g, b


@triton.jit
def _whole(x):
    """Truncate numbers in [0, 2**23).

    This adds ``_BIAS`` with rounding towards zero, because GPUs add at full rate but have only an
    eighth of that rate for rounding instructions.
    """
    if _INTERPRETED:
        return tl.floor(x)
    biased = tl.inline_asm_elementwise(
        "add.rz.f32 $0, $1, 0f4B000000;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )
    return biased - _BIAS


@triton.jit
def _nearest(x):
    """Round numbers in [0, 2**22) that are never halfway between integers."""
    return (x + _BIAS) - _BIAS


@triton.jit
def _scale(x, factor):
    return _whole(tl.minimum(factor * x, 255.0))


@triton.jit
def _blend(degenerate, x, factor):
    mixed = degenerate + factor * (x - degenerate)
    return _whole(tl.minimum(tl.maximum(mixed, 0.0), 255.0))


@triton.jit
def _luma(r, g, b):
    """Return PIL's luma. Exact in float32: sums are multiples of 2**-16 below 2**8."""
    return _whole(r * (19595 / 65536) + g * (38470 / 65536) + b * (7471 / 65536) + 0.5)


@triton.jit
def _turn_hue(r, g, b, shift):
    """Shift the hue by ``shift`` / 256 of a turn, through PIL's HSV.

    PIL mixes float and double. These float32 steps give PIL's levels for all 2**24 colours and 256
    shifts, which was tested exhaustively. The hue is exact because its two quotients are rounded as
    in IEEE division. The other values never lie close to a rounding boundary: saturation and
    sextant because of the added 2e-4, values rounded to nearest because their denominators are odd.
    """
    value = tl.maximum(tl.maximum(r, g), b)
    low = tl.minimum(tl.minimum(r, g), b)
    chroma = value - low
    # The hue differs from one of three corners by the middle channel's distance from the largest.
    inverse = tl.div_rn(1.0, tl.maximum(chroma * value, 1.0))
    middle = _quotient(value + low - (r + g + b) + value, chroma, inverse * value)
    red = r == value
    green = g == value
    corner = tl.where(red, 0.0, tl.where(green, 2.0, 4.0))
    onwards = tl.where(red, b, tl.where(green, r, g)) == low
    hue = _sixth(tl.where(onwards, (corner + 1.0) - middle, (corner - 1.0) + middle))
    hue = _whole(tl.where(hue < 0.0, hue + 1.0, hue) * 255.0)
    hue += shift  # grays can have any hue, because their saturation is 0
    hue = tl.where(hue >= 256.0, hue - 256.0, hue)
    saturation = _whole(chroma * 255.0 * (inverse * chroma) + 2e-4)
    # Back to RGB: one channel is the value, one the lowest, and one lies between them.
    sextant = _whole(hue * (6 / 255) + 2e-4)
    part = hue * 6.0 - sextant * 255.0  # position within the sextant, in units of 1/255
    odd = (sextant == 1.0) | (sextant == 3.0) | (sextant == 5.0)
    part = tl.where(odd, part, 255.0 - part)
    between = _nearest(value * (65025.0 - saturation * part) * (1 / 65025))
    low = _nearest(value * (255.0 - saturation) * (1 / 255))
    x = tl.where(odd, between, value)
    y = tl.where(odd, value, between)
    second = (sextant == 2.0) | (sextant == 3.0)  # the second third of the circle
    third = (sextant == 4.0) | (sextant == 5.0)
    r = tl.where(third, y, tl.where(second, low, x))
    g = tl.where(third, low, tl.where(second, x, y))
    b = tl.where(third, x, tl.where(second, y, low))
    return r, g, b


# IEEE quotients without IEEE division, which branches and takes sixteen instructions: multiply by
# the inverse, then correct by the remainder. The remainder is exact: its products have 24 bits.


@triton.jit
def _quotient(x, y, inverse):
    """Divide level ``x`` by level ``y``, given 1 / y with errors in the last few bits."""
    quotient = x * inverse
    high = (quotient.to(tl.int32, bitcast=True) & -256).to(tl.float32, bitcast=True)
    left = (x - high * y) - (quotient - high) * y
    return quotient + left * inverse


@triton.jit
def _sixth(x):
    quotient = x * (1 / 6)
    left = (x - 4.0 * quotient) - 2.0 * quotient
    return quotient + left * (1 / 6)
