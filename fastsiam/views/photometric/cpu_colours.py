"""The colour operations of the CPU's photometric stage, compiled by numba.

They work in place, on float32 arrays that hold whole levels, one for each channel.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=misc
# What numba compiles has no annotations: one function serves arrays of several types.

from __future__ import annotations

import numpy as np

from fastsiam.kernels.jit import compiled
from fastsiam.views.draws import BRIGHTNESS, CONTRAST, HUE, SATURATION

# A Python float is float64, and one of these in a loop halves its speed.
_ZERO, _ONE, _TWO, _THREE, _FOUR, _FIVE, _SIX = (np.float32(i) for i in range(7))
_HALF, _TOP = np.float32(0.5), np.float32(255)
_RED, _GREEN, _BLUE = (np.float32(weight / 2**16) for weight in (19595, 38470, 7471))
_WRAP, _UNWRAP = np.float32(256), np.float32(1 / 256)
_SEXTANT, _CIRCLE = np.float32(85), np.float32(510)
_WHOLE, _PER_WHOLE = np.float32(85 * 255), np.float32(1 / (85 * 255))


@compiled
def jitter(r, g, b, order, factor, first, last, mean, hsv):
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
def grayscale(r, g, b):
    """Put the luma into all three channels."""
    for i in range(len(r)):
        luma = _luma(r[i], g[i], b[i])
        r[i] = luma
        g[i] = luma
        b[i] = luma


@compiled
def solarise(x, threshold):
    """Invert whole levels from the threshold on, whatever their type."""
    for i in range(len(x)):
        level = np.int32(x[i])
        x[i] = np.int32(255) - level if level >= threshold else level


@compiled
def sum_of_luma(r, g, b):
    """Sum the luma, which is whole for each pixel."""
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
