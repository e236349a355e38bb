"""A generated detection set: textured shapes on a plain background, in VOC and COCO format.

An object's class is its texture (``fastsiam.demo``) and does not depend on its outline, size or
colours. Both formats have the same pictures: ``open_detection`` opens ``folder/voc`` as ``voc07``
and ``voc0712``, and ``folder/coco`` as ``coco``.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from fastsiam.demo import pattern, with_colours, with_lighting

CLASSES = ("stripes", "dots", "rings", "bricks")

_SIDES = 112, 160
"""Smallest and largest side of an image, in pixels."""
_SMALL, _LARGE = 16, 64
"""Smallest and largest side of an object, in pixels."""
_DIFFICULT = 20
"""Objects whose longer side has fewer pixels are marked difficult, as in VOC."""
_CROWDED = 0.1
"""Share of images with a crowd: a group of small objects under one annotation."""
_CORNERS = 24


@dataclass(frozen=True)
class _Object:
    label: int
    covered: NDArray[np.bool_]
    """Mask over the image, shape (height, width)."""
    outline: list[float]
    """Polygon as x, y, x, y, ...; empty for a crowd."""

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Bounding box x0, y0, x1, y1 in pixels, exclusive of x1 and y1."""
        rows, columns = np.flatnonzero(self.covered.any(1)), np.flatnonzero(self.covered.any(0))
        return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1

    @property
    def difficult(self) -> bool:
        x0, y0, x1, y1 = self.box
        return not self.outline or max(x1 - x0, y1 - y0) < _DIFFICULT


_Drawn = tuple[int, Image.Image, list[_Object]]
"""Number of a picture, the picture, and its objects."""


def make_detection_set(folder: Path, *, train: int = 300, val: int = 100, seed: int = 0) -> None:
    """Write the set to ``folder/voc`` and ``folder/coco``; equal arguments give equal bytes.

    The first half of the training images goes to VOC 2007, the rest to VOC 2012.

    Args:
        folder: created if missing; files of an earlier call are replaced.
        train: number of training images, at least 2.
        val: number of evaluation images, at least 1.
        seed: seed of all random draws.
    """
    for form in ("voc", "coco"):
        shutil.rmtree(folder / form, ignore_errors=True)
    half = train // 2
    splits = [(2007, "trainval", range(half)), (2012, "trainval", range(half, train))]
    splits.append((2007, "test", range(train, train + val)))
    coco: dict[str, list[_Drawn]] = {"train2017": [], "val2017": []}
    for year, split, numbers in splits:
        pictures = [(number, *_picture((seed, number))) for number in numbers]
        _write_voc(folder / "voc" / "VOCdevkit" / f"VOC{year}", year, split, pictures)
        coco["val2017" if split == "test" else "train2017"] += pictures
    (folder / "voc" / "VOCdevkit" / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    for split, pictures in coco.items():
        _write_coco(folder / "coco", split, pictures)


def _picture(seed: tuple[int, int]) -> tuple[Image.Image, list[_Object]]:
    """Draw one picture with one to four objects, and a crowd in a tenth of the pictures."""
    generator = np.random.default_rng(seed)
    height, width = (int(side) for side in generator.integers(*_SIDES, 2, endpoint=True))
    ground = np.full((height, width), 0.5) + generator.uniform(-0.3, 0.3)
    picture = np.repeat(ground[..., None], 3, axis=2) + generator.uniform(-0.05, 0.05, 3)
    occupied = np.zeros((height, width), bool)
    objects: list[_Object] = []
    crowds = int(generator.random() < _CROWDED)
    for number in range(int(generator.integers(1, 4, endpoint=True)) + crowds):
        label = int(generator.integers(len(CLASSES)))
        placed_object = _placed(occupied, label, number < crowds, generator)
        if placed_object is None:
            continue
        texture = with_colours(pattern(CLASSES[label], generator, height, width), generator)
        picture[placed_object.covered] = texture[placed_object.covered]
        x0, y0, x1, y1 = placed_object.box
        occupied[max(0, y0 - 2) : y1 + 2, max(0, x0 - 2) : x1 + 2] = True
        objects.append(placed_object)
    return with_lighting(picture, generator), objects


def _placed(
    occupied: NDArray[np.bool_], label: int, crowd: bool, generator: np.random.Generator
) -> _Object | None:
    """Draw an object at a free place; None if all tries fail."""
    height, width = occupied.shape
    for _ in range(60):
        sides = np.log(_SMALL), np.log(_LARGE), 2
        h, w = (40, 40) if crowd else np.exp(generator.uniform(*sides))
        y, x = generator.uniform(0, height - h), generator.uniform(0, width - w)
        if occupied[int(y) : int(y + h) + 1, int(x) : int(x + w) + 1].any():
            continue
        few = [(x + w / 3 * i, y + h / 3 * j, w / 4, h / 4) for i in range(3) for j in range(3)]
        outlines = [_outline(box, generator) for box in (few if crowd else [(x, y, w, h)])]
        covered = Image.new("1", (width, height))
        for outline in outlines:
            ImageDraw.Draw(covered).polygon(outline, fill=1)
        return _Object(label, np.asarray(covered), [] if crowd else outlines[0])
    return None


def _outline(box: tuple[float, ...], generator: np.random.Generator) -> list[float]:
    """Return a polygon x, y, x, y, ... between an ellipse and the rectangle (x, y, w, h)."""
    x, y, w, h = box
    roundness = generator.uniform(0.3, 1.0)
    angles = np.arange(_CORNERS) * (2 * np.pi / _CORNERS)
    cos, sin = np.cos(angles), np.sin(angles)
    columns = x + w / 2 * (1 + np.sign(cos) * np.abs(cos) ** roundness)
    rows = y + h / 2 * (1 + np.sign(sin) * np.abs(sin) ** roundness)
    return [float(value) for value in np.stack([columns, rows], 1).round(2).reshape(-1)]


def _write_voc(root: Path, year: int, split: str, pictures: list[_Drawn]) -> None:
    for name in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (root / name).mkdir(parents=True, exist_ok=True)
    names = [f"{n:06d}" if year == 2007 else f"{year}_{n:06d}" for n, _, _ in pictures]
    for name, (_, image, objects) in zip(names, pictures, strict=True):
        image.save(root / "JPEGImages" / f"{name}.jpg", quality=92)
        rows = []
        for one in objects:
            x0, y0, x1, y1 = one.box
            rows.append((CLASSES[one.label], int(one.difficult), x0 + 1, y0 + 1, x1, y1))
        (root / "Annotations" / f"{name}.xml").write_text(voc_annotation(image.size, *rows))
    (root / "ImageSets" / "Main" / f"{split}.txt").write_text("".join(f"{n}\n" for n in names))


def voc_annotation(size: tuple[Any, Any], *objects: tuple[Any, ...]) -> str:
    """Return an annotation in VOC's XML.

    Args:
        size: width and height of the image.
        objects: class, difficult (0 or 1), xmin, ymin, xmax and ymax of each object.
    """
    text = f"<size><width>{size[0]}</width><height>{size[1]}</height></size>"
    for name, difficult, x0, y0, x1, y1 in objects:
        text += (
            f"<object><name>{name}</name><difficult>{difficult}</difficult><bndbox>"
            f"<xmin>{x0}</xmin><ymin>{y0}</ymin><xmax>{x1}</xmax><ymax>{y1}</ymax>"
            "</bndbox></object>"
        )
    return f"<annotation>{text}</annotation>\n"


def _write_coco(root: Path, split: str, pictures: list[_Drawn]) -> None:
    """Write a split in COCO's folder layout. Class ids have gaps, like COCO's."""
    for name in ("annotations", split):
        (root / name).mkdir(parents=True, exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, image, objects in pictures:
        file = f"{number:012d}.jpg"
        image.save(root / split / file, quality=92)
        size = {"height": image.height, "width": image.width}
        images.append({"id": number, "file_name": file, **size})
        for one in objects:
            x0, y0, x1, y1 = one.box
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": 10 * (one.label + 1),
                    "bbox": [x0, y0, x1 - x0, y1 - y0],
                    "area": int(one.covered.sum()),
                    "iscrowd": int(not one.outline),
                    "segmentation": [one.outline] if one.outline else run_lengths(one.covered),
                }
            )
    categories = [{"id": 10 * (label + 1), "name": name} for label, name in enumerate(CLASSES)]
    table = {"images": images, "annotations": annotations, "categories": categories}
    (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(table))


def run_lengths(covered: NDArray[np.bool_]) -> dict[str, Any]:
    """Encode a mask as COCO's run lengths, column by column, starting with a run of zeros."""
    flat = np.concatenate([[False], covered.T.reshape(-1)])
    starts = np.flatnonzero(flat[1:] != flat[:-1])
    counts = np.diff([*starts, covered.size], prepend=0)
    return {"size": list(covered.shape), "counts": counts.tolist()}
