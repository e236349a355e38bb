"""Average precision: against figures by hand, a slow implementation and torchmetrics."""

from __future__ import annotations

import sys
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fastsiam.errors import BackendError, DataError
from fastsiam.evaluate.detection import (
    Detections,
    DetectionSet,
    Picture,
    coco_scores,
    voc_scores,
)
from fastsiam.evaluate.detection.masks import from_pixels
from fastsiam.evaluate.detection.scores import Rule
from tests.evaluate.detection.cases import Box, InMemory, detections, picture, random_case
from tests.tiers import rest_slow

BOX: Box = (10, 10, 30, 30)
FAR: Box = (60, 60, 80, 80)
OTHER: Box = (10, 60, 30, 80)


def shifted(box: Box, by: float) -> Box:
    """Move a box of 20 pixels to the right: the overlap is (20 - by) / (20 + by)."""
    return box[0] + by, box[1], box[2] + by, box[3]


def ap50(truth: DetectionSet, found: list[Detections], rule: Rule = "area") -> float:
    return voc_scores(truth, found, rule)["AP50"]


def test_voc_by_hand() -> None:
    """Three objects; found right, wrong, right: recalls 1/3, 1/3, 2/3, precisions 1, 1/2, 2/3."""
    truth = InMemory([picture(1, [BOX, FAR]), picture(2, [BOX])])
    found = [
        detections(1, [BOX, OTHER, FAR], [0.9, 0.8, 0.7]),
    ]
    # At recalls 0 to .3 the best precision is 1, at .4 to .6 it is 2/3, beyond that 0.
    assert ap50(truth, found, "11 points") == pytest.approx(100 * (4 + 3 * 2 / 3) / 11)
    assert ap50(truth, found) == pytest.approx(100 * (1 / 3 + 1 / 3 * 2 / 3))


def test_the_surest_takes_an_object_and_a_second_one_is_wrong() -> None:
    truth = InMemory([picture(1, [BOX, FAR])])
    twice = [detections(1, [shifted(BOX, 1), BOX, FAR], [0.5, 0.9, 0.3])]
    # BOX right, its second wrong, FAR right: precisions 1, 1/2, 2/3 at recalls 1/2, 1/2, 1.
    assert ap50(truth, twice) == pytest.approx(100 * (1 / 2 + 1 / 2 * 2 / 3))


def test_a_detection_is_of_what_it_overlaps_most() -> None:
    """Even where that is taken and another would do: VOC's way, which is not COCO's."""
    truth = InMemory([picture(1, [BOX, shifted(BOX, 4)])])
    found = [detections(1, [BOX, shifted(BOX, 1)], [0.9, 0.8])]
    assert ap50(truth, found) == pytest.approx(50)


def test_difficult_objects_count_as_nothing(coco: None) -> None:
    truth = InMemory([picture(1, [BOX, FAR], difficult=[1])])
    one, both = [detections(1, [BOX], [0.5])], [detections(1, [BOX, FAR, FAR], [0.5, 0.9, 0.8])]
    for found in (one, both):
        assert ap50(truth, found) == ap50(truth, found, "11 points") == 100
    assert coco_scores(truth, one)["AP"] == pytest.approx(100)
    assert coco_scores(truth, both)["AP"] == pytest.approx(100)


def test_whatever_is_found_in_a_crowd_counts_as_nothing(coco: None) -> None:
    truth = InMemory([picture(1, [BOX, (50, 50, 90, 90)], crowd=[1])])
    found = [detections(1, [FAR, FAR, FAR, BOX], [0.9, 0.8, 0.7, 0.6])]
    assert coco_scores(truth, found)["AP"] == pytest.approx(100)
    outside = [detections(1, [(60, 10, 80, 30), BOX], [0.9, 0.6])]
    assert coco_scores(truth, outside)["AP"] == pytest.approx(50)


def test_thresholds_by_hand(coco: None) -> None:
    """An overlap of 14/26 = 0.54 is above one threshold of ten; 18/22 = 0.82 above seven."""
    for by, many in ((6, 1), (2, 7)):
        truth = InMemory([picture(1, [BOX])])
        found = [detections(1, [shifted(BOX, by)], [0.5])]
        for scores in (voc_scores(truth, found), coco_scores(truth, found)):
            assert scores["AP"] == pytest.approx(10 * many)
            assert scores["AP50"] == pytest.approx(100)
            assert scores["AP75"] == pytest.approx(100 * (many == 7))


def test_the_overlap_has_to_be_above_vocs_threshold() -> None:
    """Half of BOX covered by its left half: an overlap of 0.5 exactly."""
    truth = InMemory([picture(1, [BOX])])
    assert ap50(truth, [detections(1, [(10, 10, 20, 30)], [0.5])]) == 0
    assert ap50(truth, [detections(1, [(10, 10, 20.01, 30)], [0.5])]) == 100


def test_classes_without_objects_are_left_out(coco: None) -> None:
    truth = InMemory([picture(1, [BOX], [1])])
    found = [detections(1, [BOX, FAR], [0.5, 0.9], [1, 0])]
    assert voc_scores(truth, found) == {"AP": 100, "AP50": 100, "AP75": 100}
    assert coco_scores(truth, found)["AP"] == pytest.approx(100)


@pytest.mark.parametrize("found", [[], [detections(1, [], [])]])
def test_nothing_found_is_zero(found: list[Detections], coco: None) -> None:
    truth = InMemory([picture(1, [BOX]), picture(2, [])])
    assert voc_scores(truth, found) == {"AP": 0, "AP50": 0, "AP75": 0}
    assert coco_scores(truth, found)["AP50"] == 0


def test_coco_has_sizes(coco: None) -> None:
    """20 x 20 is small, 40 x 40 medium; nothing is large, so that it has no figure."""
    truth = InMemory([picture(1, [BOX, (50, 50, 90, 90)])])
    scores = coco_scores(truth, [detections(1, [BOX], [0.5])])
    assert [scores["APs"], scores["APm"]] == pytest.approx([100, 0]) and "APl" not in scores
    assert scores["AR100"] == pytest.approx(50)


def test_masks_are_compared_by_pixels(coco: None) -> None:
    """The same boxes; one mask covers its box, the other a quarter less."""
    square = np.zeros((100, 100), bool)
    square[10:30, 10:30] = True
    less = square.copy()
    less[10:20, 10:20] = False
    polygon = [np.array([10.0, 10, 30, 10, 30, 30, 10, 30])]
    truth = InMemory([picture(1, [BOX], masks=(polygon,))])
    whole = [detections(1, [BOX], [0.5], masks=(from_pixels(square),))]
    part = [detections(1, [BOX], [0.5], masks=(from_pixels(less),))]
    assert coco_scores(truth, whole, "segm")["AP"] == pytest.approx(100)
    cut = coco_scores(truth, part, "segm")  # above 0.5, 0.55, 0.6, 0.65, 0.7, and 0.75 itself
    assert [cut["AP"], cut["AP75"]] == pytest.approx([60, 100])
    assert coco_scores(truth, part)["AP"] == pytest.approx(100)  # of boxes


def test_what_cannot_be_measured_is_refused(coco: None) -> None:
    truth = InMemory([picture(1, [BOX])])
    good = detections(1, [BOX], [0.5])
    cases: list[tuple[DetectionSet, list[Detections], str]] = [
        (InMemory([picture(1, [BOX], difficult=[0])]), [good], "no object to be found"),
        (truth, [detections(7, [BOX], [0.5])], "image 7"),
        (truth, [good, good], "twice"),
        (truth, [detections(1, [BOX], [0.5], [2])], "the label 2"),
        (truth, [detections(1, [BOX], [0.5], [-1])], "the label -1"),
        (truth, [detections(1, [BOX], [float("nan")])], "not finite"),
        (truth, [detections(1, [(0, 0, float("inf"), 1)], [0.5])], "not finite"),
        (truth, [detections(1, [BOX, FAR], [0.5])], "differ in number"),
    ]
    for dataset, found, message in cases:
        for measure in (voc_scores, coco_scores):
            with pytest.raises(DataError, match=message):
                measure(dataset, found)
    with pytest.raises(DataError, match="no masks"):
        coco_scores(truth, [good], "segm")


def test_without_pycocotools_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pycocotools", "pycocotools.coco"):
        monkeypatch.setitem(sys.modules, name, None)
    truth = InMemory([picture(1, [BOX])])
    with pytest.raises(BackendError, match=r"fastsiam\[detection\]"):
        coco_scores(truth, [])
    assert voc_scores(truth, [detections(1, [BOX], [1.0])])["AP"] == 100


SEEDS = rest_slow(range(20), fast=4)


@pytest.mark.parametrize("seed", SEEDS)
def test_voc_is_what_a_slow_implementation_says(seed: int) -> None:
    """One detection after the other, in fractions."""
    truth, found = random_case(seed, ignored=True)
    rules: tuple[Rule, ...] = ("11 points", "area")
    expected = {
        rule: [_slow_mean(truth, found, 0.5 + 0.05 * step, rule) for step in range(10)]
        for rule in rules
    }
    for rule in rules:
        scores = voc_scores(truth, found, rule)
        assert scores["AP50"] == pytest.approx(expected[rule][0])
        assert scores["AP75"] == pytest.approx(expected[rule][5])
        assert scores["AP"] == pytest.approx(sum(expected[rule]) / 10)


def _slow_mean(truth: InMemory, found: list[Detections], least: float, rule: str) -> float:
    values = [_slow_average(truth, found, label, least, rule) for label in range(3)]
    kept = [value for value in values if value is not None]
    return 100 * float(sum(kept)) / len(kept)


def _slow_average(
    truth: InMemory, found: list[Detections], label: int, least: float, rule: str
) -> Fraction | None:
    pictures = {one.image_id: one for one in truth.rows}
    wanted = sum(
        int(one.labels[i]) == label and not one.difficult[i]
        for one in truth.rows
        for i in range(len(one))
    )
    if not wanted:
        return None
    rows = [
        (float(one.scores[i]), one.boxes[i], one.image_id)
        for one in found
        for i in range(len(one.scores))
        if one.labels[i] == label
    ]
    rows.sort(key=lambda row: -row[0])  # a stable sort
    taken: set[tuple[int, int]] = set()
    right = wrong = 0
    points: list[tuple[Fraction, Fraction]] = []
    for _, box, image_id in rows:
        best, place = _nearest(pictures[image_id], label, box)
        if best > least and pictures[image_id].difficult[place]:
            pass
        elif best > least and (image_id, place) not in taken:
            taken.add((image_id, place))
            right += 1
        else:
            wrong += 1
        if right + wrong:
            points.append((Fraction(right, wanted), Fraction(right, right + wrong)))
    if rule == "11 points":
        total = Fraction(0)
        for tenth in range(11):
            at = tenth * 0.1  # as numpy counts: three tenths are 0.30000000000000004
            total += max((p for r, p in points if float(r) >= at), default=Fraction(0))
        return total / 11
    area, before = Fraction(0), Fraction(0)
    for recall, _ in points:
        area += (recall - before) * max(p for r, p in points if r >= recall)
        before = recall
    return area


def _nearest(one: Picture, label: int, box: NDArray[Any]) -> tuple[float, int]:
    best, place = -1.0, -1
    x0, y0, x1, y1 = map(float, box)
    for i in range(len(one)):
        a0, b0, a1, b1 = map(float, one.boxes[i])
        shared = max(0.0, min(x1, a1) - max(x0, a0)) * max(0.0, min(y1, b1) - max(y0, b0))
        overlap = shared / ((x1 - x0) * (y1 - y0) + (a1 - a0) * (b1 - b0) - shared)
        if one.labels[i] == label and overlap > best:
            best, place = overlap, i
    return best, place


@pytest.mark.parametrize("seed", SEEDS)
def test_coco_is_what_torchmetrics_says(seed: int, coco: None) -> None:
    """Its interface to pycocotools."""
    metrics = pytest.importorskip("torchmetrics.detection")
    truth, found = random_case(seed)
    found = untied(found, seed)
    measure = metrics.MeanAveragePrecision(rec_thresholds=np.linspace(0, 1, 101).tolist())
    for one, mine in zip(truth.rows, found, strict=True):
        told = {key: torch.from_numpy(getattr(mine, key)) for key in ("boxes", "scores", "labels")}
        there = {key: torch.from_numpy(getattr(one, key)) for key in ("boxes", "labels")}
        measure.update([told], [there])
    theirs = measure.compute()
    ours = coco_scores(truth, found)
    for name, key in (
        ("AP", "map"), ("AP50", "map_50"), ("AP75", "map_75"), ("APs", "map_small"),
        ("AR1", "mar_1"), ("AR10", "mar_10"), ("AR100", "mar_100"), ("ARs", "mar_small"),
    ):  # fmt: skip
        assert ours[name] == pytest.approx(100 * float(theirs[key]), abs=1e-3), name


def untied(found: list[Detections], seed: int) -> list[Detections]:
    """Return the same detections, no two with the same score."""
    generator = np.random.default_rng(seed)
    return [
        replace(one, scores=(one.scores + generator.uniform(0, 1e-3, len(one.scores))).astype("f4"))
        for one in found
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_of_images_is_nobodys_business(seed: int, coco: None) -> None:
    truth, found = random_case(seed, ignored=True)
    found = untied(found, seed)
    turned = InMemory(truth.rows[::-1], truth.classes)
    for measure in (voc_scores, coco_scores):
        assert measure(turned, found[::-1]) == pytest.approx(measure(truth, found))
