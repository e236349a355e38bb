"""Demo of the complete workflow in minutes: generate images, train, evaluate, write a report.

Run it with ``make demo`` or ``fastsiam demo``.

The ten classes are textures that differ only in shape. Each image has random colours, position,
scale, rotation, lighting and noise, so raw pixels and average colours say little about its class.
The network can only tell classes apart by features that survive crops and colour jitter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fastsiam import distributed
from fastsiam.config import ConvertConfig
from fastsiam.config.evaluate import KnnConfig, LinearConfig
from fastsiam.config.recipes import RECIPES
from fastsiam.console import format_count, tally
from fastsiam.contact_sheets import save_picture
from fastsiam.errors import DataError
from fastsiam.evaluate.command import evaluate_knn, evaluate_linear
from fastsiam.files import os_errors_as, require_local
from fastsiam.pipelines.convert.command import convert_data
from fastsiam.report.run_report import write_report
from fastsiam.report.view_sheet import show_views
from fastsiam.run.log import read_metrics
from fastsiam.run.records import Record
from fastsiam.train.command import train_here

Plane = NDArray[np.float64]

SIDE = 40
TRAIN, VAL = 400, 100
"""Number of images per class."""
_ACCURACY = "63 to 80%"
"""Range of this demo's final kNN accuracy on different machines."""


def _wrap(x: Plane, period: float) -> Plane:
    return np.mod(x + period / 2, period) - period / 2


def _bricks(x: Plane, y: Plane) -> Plane:
    shifted = x / 2 + np.pi / 2 * (np.floor(y / np.pi) % 2)
    return np.minimum(np.abs(np.sin(y)), np.abs(np.sin(shifted))) - 0.35


def _crosses(x: Plane, y: Plane) -> Plane:
    u, v = np.abs(_wrap(x, 2 * np.pi)), np.abs(_wrap(y, 2 * np.pi))
    return 0.6 - np.minimum(np.maximum(u, v / 3), np.maximum(v, u / 3))


def _hexagons(x: Plane, y: Plane) -> Plane:
    half, root = 0.5, 0.75**0.5
    plane: Plane = -0.3 + np.cos(x) + np.cos(half * x + root * y) + np.cos(half * x - root * y)
    return plane


CLASSES: dict[str, Callable[[Plane, Plane], Plane]] = {
    "stripes": lambda x, y: np.sin(x),
    "checks": lambda x, y: np.sin(x) * np.sin(y),
    "dots": lambda x, y: np.cos(x) + np.cos(y) - 1.0,
    "grid": lambda x, y: np.maximum(np.cos(x), np.cos(y)) - 0.75,
    "rings": lambda x, y: np.sin(np.hypot(_wrap(x, 8), _wrap(y, 8)) * 1.5),
    "waves": lambda x, y: np.sin(x + 1.8 * np.sin(y)),
    "hexagons": _hexagons,
    "bricks": _bricks,
    "crosses": _crosses,
    "zigzags": lambda x, y: np.sin(x + np.abs(_wrap(y, 2 * np.pi)) * 1.6),
}
"""Texture of each class, as a function of the position: positive in the foreground."""


def pattern(kind: str, generator: np.random.Generator, height: int, width: int) -> Plane:
    """Draw one of ``CLASSES`` with random rotation, scale and position.

    Returns:
        (height, width) share of the foreground colour, 0 to 1.
    """
    angle, period = generator.uniform(-0.25, 0.25), generator.uniform(7, 11)
    row, column = np.mgrid[0:height, 0:width] * (2 * np.pi / period)
    x = np.cos(angle) * column + np.sin(angle) * row + generator.uniform(0, 100)
    y = np.cos(angle) * row - np.sin(angle) * column + generator.uniform(0, 100)
    ink: Plane = 1 / (1 + np.exp(-8 * CLASSES[kind](x, y)))
    return ink


def with_colours(ink: Plane, generator: np.random.Generator) -> NDArray[np.float64]:
    """Colour a texture with a light and a dark colour: (height, width, 3), about 0 to 1."""
    back = generator.uniform(0.1, 0.9)
    front = back + generator.uniform(0.3, 0.5) * (1 if back < 0.5 else -1)
    tints = generator.uniform(-0.05, 0.05, (2, 3))
    ink = ink[..., None]
    mixed: NDArray[np.float64] = ink * (front + tints[0]) + (1 - ink) * (back + tints[1])
    return mixed


def with_lighting(picture: NDArray[np.float64], generator: np.random.Generator) -> Image.Image:
    """Add lighting from one side and noise to a picture of (height, width, 3)."""
    light = generator.uniform(-0.35, 0.35)
    axis = 0 if generator.random() < 0.5 else 1
    gradient = light * np.linspace(-1, 1, picture.shape[axis])
    picture = picture + (gradient[:, None, None] if axis == 0 else gradient[None, :, None])
    picture += generator.normal(0, 0.05, picture.shape)
    return Image.fromarray(np.rint(picture.clip(0, 1) * 255).astype(np.uint8))


def make_images(folder: Path) -> None:
    """Generate the demo's data set as JPEGs: folder/train|val/<class>/<number>.jpg."""
    generator = np.random.default_rng(0)
    with tally("generating images", len(CLASSES) * (TRAIN + VAL)) as progress:
        for split, count in (("train", TRAIN), ("val", VAL)):
            for kind in CLASSES:
                target = folder / split / kind
                target.mkdir(parents=True, exist_ok=True)
                for number in range(count):
                    ink = pattern(kind, generator, SIDE, SIDE)
                    image = with_lighting(with_colours(ink, generator), generator)
                    image.save(target / f"{number:04d}.jpg", quality=92)
                    progress.add()


def make_images_once(folder: Path) -> None:
    """Generate the demo's images unless they exist.

    Raises:
        FastSiamError: the folder cannot be written.
    """
    require_local(folder.parent)
    with os_errors_as(DataError, f"cannot write images in {folder}"):
        if (folder / "done").exists():
            return
        print(f"generating {len(CLASSES) * (TRAIN + VAL):,} images in {folder}", file=sys.stderr)
        make_images(folder)
        (folder / "done").touch()


def convert_demo(config: ConvertConfig) -> None:
    """Generate the demo's images and convert them.

    Raises:
        DataError: --source or --parts is given, or the images or files cannot be written.
        Interrupted: Ctrl-C or SIGTERM.
    """
    if config.source:
        raise DataError("the demo generates its own images; leave out --source")
    if config.parts:
        raise DataError("the demo has too few images for --parts; leave it out")
    out = Path(config.out or f"{config.root}/demo")
    make_images_once(out / "images")
    convert_data("folder", replace(config, source=str(out / "images"), out=str(out)))


def run_demo(out: Path) -> None:
    """Run the demo in a folder; resume an earlier demo there, or print its results again."""
    data, run = out / "images", out / "run"
    make_images_once(data)
    config = RECIPES["demo"]()
    config = replace(
        config, data=replace(config.data, data=str(data)), run=replace(config.run, out=str(run))
    )
    train_here(config, "demo")
    place = distributed.start(config.run)
    knn = evaluate_knn(run, KnnConfig(baselines=True), place)
    linear = evaluate_linear(run, LinearConfig(cached=True), place)
    sheet, *_ = show_views([config.data], config.augment, images=12, epoch=0, seed=0)
    save_picture(sheet, out / "views.png")
    page = write_report([run], run / "report.html")
    curve = [line for line in read_metrics(run) if line["kind"] == "knn"]
    print(_summary(knn, curve, linear))
    print(f"images and their views   {out / 'views.png'}")
    print(f"curves and settings      {page}")
    print("\nthe real job, on 8 GPUs:  fastsiam train --data /path/to/imagenet --gpus 8")


def _summary(knn: Record, curve: list[dict[str, Any]], linear: Record) -> str:
    rates = ", ".join(f"{line['lr']:g}" for line in linear.results)
    protocol = knn.first_with("trained")
    rows = [
        ("raw pixels", knn.first_with("pixels")["top1"]),
        ("untrained network", knn.first_with("untrained")["top1"]),
    ]
    rows += [(f"after {format_count(x['epoch'], 'epoch')}", x["top1"]) for x in curve if x["epoch"]]
    return (
        f"\nkNN top-1 on {len(CLASSES) * VAL:,} validation images of {len(CLASSES)} classes "
        f"(k {protocol['k']}, T {protocol['temperature']:g}, bank {protocol['bank']:,})\n"
        + "".join(f"  {name:18} {top1:5.1f}%\n" for name, top1 in rows)
        + f"linear classifier on the frozen features (best of the rates {rates})\n"
        f"  {rows[-1][0]:18} {linear.best['top1']:5.1f}%\n"
        f"A run this small is sensitive to rounding: with this seed, kNN accuracy is {_ACCURACY},\n"
        "depending on the machine. Only compare results from the same machine.\n"
    )
