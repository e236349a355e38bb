"""The made set as it would be distributed: VOC's tars, COCO's zips."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

from fastsiam.evaluate.detection.voc import TARS


def voc_tars(folder: Path, out: Path) -> None:
    """Pack VOCdevkit into the three tars, each with its split alone."""
    out.mkdir(parents=True, exist_ok=True)
    for (year, split), name in TARS.items():
        below = f"VOCdevkit/VOC{year}"
        listed = folder / below / f"ImageSets/Main/{split}.txt"
        with tarfile.open(out / name, "w") as tar:
            tar.add(folder / "VOCdevkit/classes.txt", "VOCdevkit/classes.txt")
            tar.add(listed, f"{below}/ImageSets/Main/{split}.txt")
            for image in listed.read_text().split():
                for place in (f"Annotations/{image}.xml", f"JPEGImages/{image}.jpg"):
                    tar.add(folder / below / place, f"{below}/{place}")


def coco_zips(folder: Path, out: Path, *, deflated: bool = False) -> None:
    """Pack the images of each split, and the annotations of both, into zips."""
    out.mkdir(parents=True, exist_ok=True)
    kind = zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
    for name, below in (
        ("train2017.zip", "train2017"),
        ("val2017.zip", "val2017"),
        ("annotations_trainval2017.zip", "annotations"),
    ):
        with zipfile.ZipFile(out / name, "w", kind) as file:
            file.mkdir(below)
            for path in sorted((folder / below).iterdir()):
                file.write(path, f"{below}/{path.name}")
