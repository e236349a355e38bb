"""Ten textures that differ in shape alone: what images that the program makes are made of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Plane = NDArray[np.float64]


def _stripes(x: Plane, y: Plane) -> Plane:
    return np.sin(x)


def _checks(x: Plane, y: Plane) -> Plane:
    return np.sin(x) * np.sin(y)


def _dots(x: Plane, y: Plane) -> Plane:
    return np.cos(x) + np.cos(y) - 1.0


def _grid(x: Plane, y: Plane) -> Plane:
    return np.maximum(np.cos(x), np.cos(y)) - 0.75


def _rings(x: Plane, y: Plane) -> Plane:
    return np.sin(np.hypot(_wrap(x, 8), _wrap(y, 8)) * 1.5)


def _waves(x: Plane, y: Plane) -> Plane:
    return np.sin(x + 1.8 * np.sin(y))


def _hexagons(x: Plane, y: Plane) -> Plane:
    half, root = 0.5, 0.75**0.5
    plane: Plane = -0.3 + np.cos(x) + np.cos(half * x + root * y) + np.cos(half * x - root * y)
    return plane


def _bricks(x: Plane, y: Plane) -> Plane:
    shifted = x / 2 + np.pi / 2 * (np.floor(y / np.pi) % 2)
    return np.minimum(np.abs(np.sin(y)), np.abs(np.sin(shifted))) - 0.35


def _crosses(x: Plane, y: Plane) -> Plane:
    u, v = np.abs(_wrap(x, 2 * np.pi)), np.abs(_wrap(y, 2 * np.pi))
    return 0.6 - np.minimum(np.maximum(u, v / 3), np.maximum(v, u / 3))


def _zigzags(x: Plane, y: Plane) -> Plane:
    return np.sin(x + np.abs(_wrap(y, 2 * np.pi)) * 1.6)


CLASSES: tuple[Callable[[Plane, Plane], Plane], ...] = (
    _stripes, _checks, _dots, _grid, _rings, _waves, _hexagons, _bricks, _crosses, _zigzags
)  # fmt: skip


def _wrap(x: Plane, period: float) -> Plane:
    return np.mod(x + period / 2, period) - period / 2


def pattern(kind: int, generator: np.random.Generator, height: int, width: int) -> Plane:
    """Draw one of ``CLASSES`` with a turn, scale and position of its own.

    Returns:
        (height, width) how much of the front colour there is, 0 to 1.
    """
    turn, period = generator.uniform(-0.25, 0.25), generator.uniform(7, 11)
    row, column = np.mgrid[0:height, 0:width] * (2 * np.pi / period)
    x = np.cos(turn) * column + np.sin(turn) * row + generator.uniform(0, 100)
    y = np.cos(turn) * row - np.sin(turn) * column + generator.uniform(0, 100)
    ink: Plane = 1 / (1 + np.exp(-8 * CLASSES[kind](x, y)))
    return ink


def coloured(ink: Plane, generator: np.random.Generator) -> NDArray[np.float64]:
    """Give a texture two colours, a light and a dark one: (height, width, 3), about 0 to 1."""
    back = generator.uniform(0.1, 0.9)
    front = back + generator.uniform(0.3, 0.5) * (1 if back < 0.5 else -1)
    tints = generator.uniform(-0.05, 0.05, (2, 3))
    ink = ink[..., None]
    mixed: NDArray[np.float64] = ink * (front + tints[0]) + (1 - ink) * (back + tints[1])
    return mixed


def lit(picture: NDArray[np.float64], generator: np.random.Generator) -> Image.Image:
    """Light a picture of (height, width, 3) from one side, and add noise."""
    light = generator.uniform(-0.35, 0.35)
    axis = 0 if generator.random() < 0.5 else 1
    falling = light * np.linspace(-1, 1, picture.shape[axis])
    picture = picture + (falling[:, None, None] if axis == 0 else falling[None, :, None])
    picture += generator.normal(0, 0.05, picture.shape)
    return Image.fromarray(np.rint(picture.clip(0, 1) * 255).astype(np.uint8))
