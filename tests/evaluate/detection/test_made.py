"""The made set: the same in both forms, whenever it is made, and true to its pictures."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from fastsiam.evaluate.detection import Detections, Task, coco_scores, open_detection, voc_scores
from fastsiam.evaluate.detection.masks import pixels
from tests.evaluate.detection.made import CLASSES, make_detection_set, make_picture


def contents(folder: Path) -> dict[str, str]:
    """Return what lies in a folder: digests of all files by their paths."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def test_it_is_the_same_whenever_it_is_made(made: Path, tmp_path: Path) -> None:
    make_detection_set(tmp_path, train=12, val=6)
    assert contents(tmp_path) == contents(made)
    before = contents(tmp_path)
    make_detection_set(tmp_path, train=4, val=2, seed=1)
    after = contents(tmp_path)
    assert len(after) < len(before) and not set(after.values()) & set(before.values()) - {
        after["voc/VOCdevkit/classes.txt"]
    }


def test_both_forms_are_the_same_pictures(made: Path) -> None:
    splits: tuple[Literal["train", "val"], ...] = ("train", "val")
    for split in splits:
        voc = open_detection("voc0712", made / "voc", split)
        coco = open_detection("coco", made / "coco", split)
        assert voc.classes == coco.classes == CLASSES
        assert len(voc) == len(coco)
        for i, (one, other) in enumerate(zip(voc.pictures(), coco.pictures(), strict=True)):
            assert voc.read(i) == coco.read(i)
            np.testing.assert_array_equal(one.boxes, other.boxes)
            np.testing.assert_array_equal(one.labels, other.labels)
            assert (one.height, one.width) == (other.height, other.width)
            assert (one.difficult >= other.crowd).all() and not one.crowd.any()
    assert len(open_detection("voc07", made / "voc", "train")) == 6


def test_masks_fill_their_boxes(made: Path, coco: None) -> None:
    seen = 0
    for one in open_detection("coco", made / "coco", "train").pictures():
        for box, area, mask in zip(one.boxes, one.areas, one.masks or (), strict=True):
            covered = pixels(mask, one.height, one.width)
            rows, columns = np.nonzero(covered)
            corners = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert np.abs(np.array(corners) - box).max() <= 1.5
            assert covered.sum() == pytest.approx(area, rel=0.2)
            seen += 1
    assert seen > 12


def test_there_are_crowds_difficult_objects_and_all_classes() -> None:
    pictures = [make_picture((0, number))[1] for number in range(30)]
    drawn = [one for objects in pictures for one in objects]
    assert {one.label for one in drawn} == set(range(len(CLASSES)))
    assert any(one.crowd for one in drawn)
    assert any(one.difficult and not one.crowd for one in drawn)
    assert {len(objects) for objects in pictures} >= {1, 2, 3, 4}


def test_the_truth_finds_itself(made: Path, coco: None) -> None:
    tasks: tuple[tuple[Task, str], ...] = (("voc07", "voc"), ("coco", "coco"))
    for task, folder in tasks:
        truth = open_detection(task, made / folder, "val")
        found = [
            Detections(one.image_id, one.boxes, np.ones(len(one), "f4"), one.labels, one.masks)
            for one in truth.pictures()
        ]
        assert voc_scores(truth, found)["AP"] == pytest.approx(100)
        assert coco_scores(truth, found)["AP"] == pytest.approx(100)
        if task == "coco":
            assert coco_scores(truth, found, "segm")["AP"] == pytest.approx(100)
