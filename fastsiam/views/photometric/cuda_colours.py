"""The jitter, gray and normalisation on a GPU: a Triton kernel, a program for each view.

A thread takes four pixels at a time, which lie in three 32-bit words; all it does to them happens
in its registers.

A view with contrast is walked over twice: for its mean gray, and for the rest. What comes before
the contrast is done the first time only, and its levels are kept in memory, from where they come
back out of a cache. One program does both walks: so there is no launch between them, and no sum in
memory. A program has 256 threads, of which an H200's 132 multiprocessors hold 528 programs at once;
two views of 512 images are 1,024.
"""

# The parameters of kernels have types that are Triton's own, found out when they are compiled.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from fastsiam.views.draws import BRIGHTNESS, CONTRAST, HUE, SATURATION

# Operations are digits of an octal number, the first one lowest; 0 means no operation.
BRIGHTEN, BLEND_MEAN = tl.constexpr(BRIGHTNESS + 1), tl.constexpr(CONTRAST + 1)
SATURATE, TURN_HUE = tl.constexpr(SATURATION + 1), tl.constexpr(HUE + 1)
GRAY = tl.constexpr(5)

# Columns of the table of views, all float32, whose whole numbers are below 2**24 and thus exact.
FACTORS = tl.constexpr(0)  # four: of the jitter's operations
TABLE = tl.constexpr(4)  # where in the lookup its levels' results begin
MEAN = tl.constexpr(5)  # whether there is a contrast, which needs the mean gray
FIRST, REST = tl.constexpr(6), tl.constexpr(7)  # operations before the contrast, and from it on
BLURRED = tl.constexpr(8)
COLUMNS = tl.constexpr(12)  # 48 bytes: rows, and what follows them, stay 16-byte aligned

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_BIAS = tl.constexpr(2.0**23)  # a float32 of this and a level has the level as its lowest byte


@triton.jit
def change_colours(crops, views, lookup, levels, out, PIXELS: tl.constexpr, THREADS: tl.constexpr):
    """Jitter and gray; then the result, or for views that will be blurred the levels.

    Args:
        crops: (M, 4 * QUADS, 3) bytes as 32-bit words; QUADS is a quarter of PIXELS, rounded up,
            and pixels beyond PIXELS are black.
        views: (M, COLUMNS) float32.
        lookup: (K, 3, 256) integers that hold the bits of results.
        levels: as crops; written for views that will be blurred, and for use in between.
        out: (M, 4 * QUADS, 3), of the type of ``lookup``, as 32-bit words; for the others.
        PIXELS: of a view.
        THREADS: of a program.
    """
    QUADS: tl.constexpr = (PIXELS + 3) // 4
    view = tl.program_id(0).to(tl.int64)
    row = views + view * COLUMNS
    first = tl.load(row + FIRST).to(tl.int32)
    source, between = crops + view * (3 * QUADS), levels + view * (3 * QUADS)
    mean = tl.zeros((), tl.float32)
    if tl.load(row + MEAN) > 0:
        total = tl.zeros((THREADS, 2, 2), tl.float32)  # whole numbers: exact
        for ahead in range(0, QUADS, THREADS):
            quad = ahead + tl.arange(0, THREADS)
            r, g, b = _load(source, quad, QUADS)
            r, g, b = _change(r, g, b, first, row, mean)
            total += _luma(r, g, b)  # beyond the view all is black, and stays so till the contrast
            if first > 0:
                _store_levels(between, quad, r, g, b, QUADS)
        gray = tl.sum(tl.reshape(total, (4 * THREADS,)).to(tl.int64), axis=0)
        mean = ((2 * gray + PIXELS) // (2 * PIXELS)).to(tl.float32)
        tl.debug_barrier()  # what one thread kept another may read
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
    """Lay four tensors side by side in their threads: (..., 2, 2)."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def apart(x):
    """Undo ``four``."""
    ac, bd = tl.split(x)
    a, c = tl.split(ac)
    b, d = tl.split(bd)
    return a, b, c, d


@triton.jit
def pairs(low, high):
    """Return 32-bit words of two 16-bit values each."""
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def look_up(a, b, c, d):
    """Load four tensors, each by itself: side by side they would change places between threads."""
    return tl.load(a), tl.load(b), tl.load(c), tl.load(d)


@triton.jit
def _load(view, quad, QUADS: tl.constexpr):
    """Return r, g, b of four pixels for each thread: (THREADS, 2, 2) float32, whole levels."""
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
    """Return the float32 whose lowest byte is one of the word's: without a conversion."""
    return (((word >> (8 * BYTE)) & 255) | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def _bits(x):
    """Return whole levels as the lowest byte of an int32 that has 0x4B as its highest."""
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
    lookup -= 0x4B000000  # which the bits have more than the level
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
    """Do operations one after the other; r, g, b are float32 that hold whole levels."""
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
    """Truncate what is not below 0 and below 2**23.

    As a sum that is rounded towards zero: a GPU adds at full speed, but rounds at an eighth of it.
    """
    if _INTERPRETED:
        return tl.floor(x)
    biased = tl.inline_asm_elementwise(
        "add.rz.f32 $0, $1, 0f4B000000;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )
    return biased - _BIAS


@triton.jit
def _nearest(x):
    """Round what is not below 0 and below 2**22, and never halfway between whole numbers."""
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
    """Return PIL's luma: sums of whole 2**-16ths below 2**8, which float32 holds exactly."""
    return _whole(r * (19595 / 65536) + g * (38470 / 65536) + b * (7471 / 65536) + 0.5)


@triton.jit
def _turn_hue(r, g, b, shift):
    """Add ``shift`` of 256 to the hue, through PIL's HSV.

    PIL mixes float and double. These steps in float32 give its levels for all 2**24 colours and
    256 shifts, which was tried for all of them: the hue because two quotients are rounded as
    IEEE's; the others because they stay away from where a rounding turns, which a slip of 2e-4
    makes sure of for saturation and sextant, and odd denominators for what is rounded to nearest.
    """
    value = tl.maximum(tl.maximum(r, g), b)
    low = tl.minimum(tl.minimum(r, g), b)
    chroma = value - low
    # The hue lies beside one of three corners, by the middle channel's distance from the largest.
    inverse = tl.div_rn(1.0, tl.maximum(chroma * value, 1.0))
    middle = _quotient(value + low - (r + g + b) + value, chroma, inverse * value)
    red = r == value
    green = g == value
    corner = tl.where(red, 0.0, tl.where(green, 2.0, 4.0))
    onwards = tl.where(red, b, tl.where(green, r, g)) == low
    hue = _sixth(tl.where(onwards, (corner + 1.0) - middle, (corner - 1.0) + middle))
    hue = _whole(tl.where(hue < 0.0, hue + 1.0, hue) * 255.0)
    hue += shift  # of a gray any: its saturation is 0
    hue = tl.where(hue >= 256.0, hue - 256.0, hue)
    saturation = _whole(chroma * 255.0 * (inverse * chroma) + 2e-4)
    # Back: one channel is the value, one the lowest, and one lies between them.
    sextant = _whole(hue * (6 / 255) + 2e-4)
    part = hue * 6.0 - sextant * 255.0  # of 255
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


# IEEE's quotients without its division, which branches and takes sixteen instructions: a product
# with the inverse, and what that leaves over. The latter is exact: its products have 24 bits.


@triton.jit
def _quotient(x, y, inverse):
    """Divide levels, ``x`` by ``y``, whose inverse is known except for the last few bits."""
    quotient = x * inverse
    high = (quotient.to(tl.int32, bitcast=True) & -256).to(tl.float32, bitcast=True)
    left = (x - high * y) - (quotient - high) * y
    return quotient + left * inverse


@triton.jit
def _sixth(x):
    quotient = x * (1 / 6)
    left = (x - 4.0 * quotient) - 2.0 * quotient
    return quotient + left * (1 / 6)
