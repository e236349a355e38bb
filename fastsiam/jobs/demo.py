"""The whole job, small: make images, train, evaluate, report.

``make demo`` and ``fastsiam demo`` run it.

The images are made so that raw pixels and average colours say little about the class: ten textures
(``fastsiam.textures``), each image with its own two colours, position, scale, turn, lighting and
noise. What tells them apart is what SimSiam has to keep while colours and crops change.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fastsiam import distributed
from fastsiam.config.evaluate import KnnConfig, LinearConfig
from fastsiam.config.recipes import demo
from fastsiam.console import Tally, tally
from fastsiam.errors import DataError
from fastsiam.evaluate.records import Record
from fastsiam.files import explained
from fastsiam.jobs.evaluate import evaluate_knn, evaluate_linear
from fastsiam.jobs.train import train_here
from fastsiam.jobs.views import show_views
from fastsiam.report.pictures import save_picture
from fastsiam.report.run import write_report
from fastsiam.textures import CLASSES, coloured, lit, pattern
from fastsiam.training.log import read_metrics

SIDE = 40
TRAIN, VAL = 400, 100
"""Images of each class."""
_SEEN = "63 to 79%"
"""kNN accuracies of this demo after its last epoch, on different machines."""


def make_image(kind: int, generator: np.random.Generator) -> Image.Image:
    """Draw one image of a class: SIDE x SIDE RGB."""
    ink = pattern(kind, generator, SIDE, SIDE)
    return lit(coloured(ink, generator), generator)


def make_images(folder: Path, *, seed: int = 0) -> None:
    """Write the demo's data set as JPEGs: folder/train|val/<class>/<number>.jpg."""
    generator = np.random.default_rng(seed)
    with tally("making images", len(CLASSES) * (TRAIN + VAL)) as made:
        _make_images(folder, generator, made)


def _make_images(folder: Path, generator: np.random.Generator, made: Tally) -> None:
    for split, count in (("train", TRAIN), ("val", VAL)):
        for kind, function in enumerate(CLASSES):
            target = folder / split / function.__name__.strip("_")
            target.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                make_image(kind, generator).save(target / f"{number:04d}.jpg", quality=92)
                made.add()


def make_images_once(folder: Path) -> None:
    """Make the images if they are not there yet.

    Raises:
        DataError: the folder cannot be written.
    """
    with explained(DataError, f"cannot make images in {folder}"):
        if (folder / "done").exists():
            return
        print(f"making {len(CLASSES) * (TRAIN + VAL):,} images in {folder}", file=sys.stderr)
        make_images(folder)
        (folder / "done").touch()


def run_demo(out: Path) -> None:
    """Run the demo into a folder; an earlier demo there continues, or is shown again if done."""
    data, run = out / "images", out / "run"
    make_images_once(data)
    config = demo()
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
    """The demo's figures: kNN accuracy of pixels, and of the network before, during and after."""
    rates = ", ".join(f"{line['lr']:g}" for line in linear.results)
    protocol = knn.first_with("trained")
    rows = [
        ("raw pixels", knn.first_with("pixels")["top1"]),
        ("untrained network", knn.first_with("untrained")["top1"]),
    ]
    rows += [(f"after {line['epoch']:g} epochs", line["top1"]) for line in curve if line["epoch"]]
    return (
        f"\nkNN top-1 on {len(CLASSES) * VAL:,} new images of {len(CLASSES)} classes "
        f"(k {protocol['k']}, T {protocol['temperature']:g}, bank {protocol['bank']:,})\n"
        + "".join(f"  {name:18} {top1:5.1f}%\n" for name, top1 in rows)
        + f"linear classifier on the frozen features (best of the rates {rates})\n"
        f"  {rows[-1][0]:18} {linear.best['top1']:5.1f}%\n"
        f"So small a run ends elsewhere on each kind of machine, by rounding alone: kNN {_SEEN}\n"
        "were seen with this seed. Compare figures of one machine.\n"
    )
