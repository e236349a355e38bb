r"""Draw the landscapes of the README's picture, colourful enough to show augmentations.

python docs/examples/landscapes.py landscapes
fastsiam views --data landscapes --pipeline native --views 8 --crop 112 --images 4 --seed 1 \
    --out sheet.jpg

Each has a sky, a sun that is reflected in a lake, and mountains that fade with distance.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

HEIGHT, WIDTH = 300, 400
Color = tuple[int, int, int]
# Colours of the upper sky, the sky at the horizon, and the nearest mountains.
PALETTES: list[tuple[Color, Color, Color]] = [
    ((38, 84, 154), (250, 196, 120), (24, 60, 52)),
    ((60, 130, 200), (214, 234, 246), (40, 84, 40)),
    ((52, 28, 84), (244, 120, 96), (40, 16, 48)),
    ((16, 24, 64), (96, 150, 170), (8, 20, 30)),
    ((120, 180, 220), (255, 236, 200), (150, 70, 40)),
    ((230, 110, 70), (255, 220, 130), (70, 30, 30)),
]


def main(out: str) -> None:
    """Write an image for each palette."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for number, palette in enumerate(PALETTES):
        picture = landscape(*palette, np.random.default_rng(number))
        picture.save(folder / f"{number}.jpg", quality=95)


def landscape(
    top: Color, horizon: Color, ground: Color, generator: np.random.Generator
) -> Image.Image:
    """Draw the sky and sun, then mountains from the farthest to the nearest, then the lake."""
    above, below, rock = (np.array(colour, float) for colour in (top, horizon, ground))
    row, column = np.mgrid[:HEIGHT, :WIDTH]
    shore = int(HEIGHT * generator.uniform(0.68, 0.8))
    pixels = above + (below - above) * np.clip(row / shore, 0, 1)[..., None] ** 1.5
    x, y = WIDTH * generator.uniform(0.2, 0.8), shore * generator.uniform(0.25, 0.6)
    distance = np.hypot(row - y, column - x)[..., None]
    pixels += (255 - pixels) * np.clip(0.5 * np.exp(-distance / 60) + (distance < 22), 0, 1)
    for layer in range(4):
        nearness = (layer + 1) / 4
        ridge = shore - HEIGHT * (0.42 - 0.09 * layer) * outline(generator, 3 + 2 * layer)
        light = 1 + 0.25 * (outline(generator, 40) - 0.5) * nearness
        colour = (below + (rock - below) * nearness**0.8) * light[:, None]
        pixels = np.where((row > ridge)[..., None], colour, pixels)
    depth = np.clip(row - shore, 0, None)
    wave = np.sin(depth**0.7 * 2.5 + column / 9) * (1 + depth / 12)
    mirrored_row = np.clip(2 * shore - row - 1, 0, HEIGHT - 1)
    reflection = pixels[mirrored_row, np.clip(column + wave, 0, WIDTH - 1).astype(int)]
    pixels = np.where((row >= shore)[..., None], 0.75 * reflection + 0.15 * above, pixels)
    pixels += generator.normal(0, 3, (HEIGHT, WIDTH, 1))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def outline(generator: np.random.Generator, peaks: int) -> np.ndarray:
    """Return WIDTH heights from 0 to 1: a sum of zigzags that get finer and lower."""
    heights = np.zeros(WIDTH)
    for octave in range(6):
        knots = generator.random(peaks * 2**octave + 2)
        place = np.linspace(0, len(knots) - 1, WIDTH)
        heights += np.interp(place, range(len(knots)), knots) / 2**octave
    return (heights - heights.min()) / np.ptp(heights)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", help="folder for the six JPEGs")
    main(parser.parse_args().out)
