"""Training of detectors: batches by seed and step, rates, precise BN, resuming, learning."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fastsiam.config.detect import DetectConfig
from fastsiam.distributed import Place
from fastsiam.errors import DataError, FastSiamError
from fastsiam.evaluate.detection import Detections, coco_scores, voc_scores
from fastsiam.evaluate.detection.images import (
    Sample,
    TrainingImages,
    draw_position,
    objects_of,
)
from fastsiam.evaluate.detection.protocol import (
    PROTOCOL,
    Schedule,
    differences,
    papers_rows,
    schedule_of,
)
from fastsiam.evaluate.detection.training import DetectorTraining
from tests.evaluate.detection.cases import picture
from tests.evaluate.detection.tiny import SIDE, Squares, tiny

HERE = Place(0, 1, torch.device("cpu"))
SCHEDULE = schedule_of(DetectConfig(steps=8, warmup=2, short_side="64"))


def training(schedule: Schedule = SCHEDULE, *, masks: bool = False) -> DetectorTraining:
    return DetectorTraining(
        tiny(masks), schedule=schedule, lr=0.02, weight_decay=1e-4, seed=0, dtype=torch.float32,
        place=HERE,
    )  # fmt: skip


def batches(first: int, steps: int, *, masks: bool = False, **settings: Any) -> Any:
    images = TrainingImages(
        Squares(masks=masks),
        seed=3,
        batch=2,
        sides=(48, 64),
        longest=100,
        masks=masks,
        workers=2,
        **settings,
    )
    return images.from_step(first, steps)


def alike(first: Sequence[Sample], second: Sequence[Sample]) -> bool:
    return all(
        torch.equal(a, b) and all(torch.equal(x[name], y[name]) for name in x)
        for (a, x), (b, y) in zip(first, second, strict=True)
    )


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    whole = list(batches(0, 5))
    later = list(batches(3, 5))
    assert len(later) == 2 and all(map(alike, whole[3:], later))
    shares = [list(batches(0, 5, rank=rank, world=2)) for rank in (0, 1)]
    for step, batch in enumerate(whole):
        assert alike(batch, [*shares[0][step], *shares[1][step]])


def test_each_pass_shows_every_image_once_in_another_order() -> None:
    rows = [
        [draw_position(7, epoch * 10 + place, 10, (1,)).image for place in range(10)]
        for epoch in (0, 1)
    ]
    assert sorted(rows[0]) == sorted(rows[1]) == list(range(10)) and rows[0] != rows[1]
    draws = [draw_position(7, position, 10, (480, 512)) for position in range(64)]
    assert {draw.side for draw in draws} == {480, 512} and {draw.flip for draw in draws} == {0, 1}
    assert draw_position(8, 0, 10**6, (1,)) != draw_position(7, 0, 10**6, (1,))


def test_objects_follow_their_image() -> None:
    """Flipped and halved; a crowd is left out, a difficult object is not."""
    truth = picture(
        0, [(10, 20, 30, 60), (0, 0, 50, 50), (90, 0, 100, 10)], [0, 1, 1], difficult=[0], crowd=[1]
    )
    target = objects_of(truth, 50, 50, flip=False, masks=False)
    assert target["boxes"].tolist() == [[5, 10, 15, 30], [45, 0, 50, 5]]
    assert target["labels"].tolist() == [1, 2]
    target = objects_of(truth, 50, 50, flip=True, masks=False)
    assert target["boxes"].tolist() == [[35, 10, 45, 30], [0, 0, 5, 5]]


def test_masks_follow_their_boxes() -> None:
    pytest.importorskip("pycocotools")
    for batch in batches(0, 6, masks=True):
        for _, target in batch:
            for mask, box in zip(target["masks"], target["boxes"], strict=True):
                rows, columns = mask.nonzero().unbind(1)
                inside = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                assert np.allclose([int(v) for v in inside], box.numpy(), atol=1.01)


def test_images_without_objects_are_not_trained_on() -> None:
    images = TrainingImages(Squares(3), seed=0, batch=1, sides=(64,), longest=64, masks=False)
    assert images.used == [0, 1, 2]
    with pytest.raises(DataError, match="no image with an object"):
        TrainingImages(Squares(0), seed=0, batch=1, sides=(64,), longest=64, masks=False)


def test_a_damaged_image_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Squares, "read", lambda self, index: b"no image")
    with pytest.raises(DataError, match=r"squares: \d.png cannot be decoded"):
        list(batches(0, 1))


def test_the_protocols_rates() -> None:
    """MoCo's VOC: 100 steps up, drops at 18,000 and 22,000 of 24,000; a shorter one alike."""
    own = PROTOCOL["voc07"]
    rates = [own.rate(0.02, step) for step in (0, 50, 100, 17_999, 18_000, 22_000)]
    assert rates == pytest.approx([2e-5, 0.01001, 0.02, 0.02, 0.002, 0.0002])
    assert schedule_of(DetectConfig(task="coco")) == PROTOCOL["coco"]
    assert schedule_of(DetectConfig(steps=240, warmup=10)).drops == (180, 220)
    assert own.sides[0] == 480 and own.sides[-1] == 800 and len(own.sides) == 11


def test_what_is_not_the_protocols_is_said() -> None:
    assert differences(DetectConfig(), "resnet50", "float32") == []
    assert differences(DetectConfig(task="coco", trials=1), "resnet50", "float32") == []
    config = DetectConfig(steps=240, detector="fpn", short_side="96-128", trials=2)
    said = differences(config, "resnet18", "bfloat16", "a rank")
    assert said[0] == "detector fpn (not c4)" and "shorter sides 96 to 128 (not 480 to 800)" in said
    assert [line.split(" (not")[0] for line in said] == [
        "detector fpn", "backbone resnet18", "steps 240", "shorter sides 96 to 128",
        "BN statistics of a rank", "precision bfloat16", "trials 2",
    ]  # fmt: skip
    assert "SimSiam, base 75.5 / 47.0 / 50.2" in papers_rows("voc07")


def test_settings_that_cannot_be_are_refused() -> None:
    for bad in (
        {"task": "voc"}, {"short_side": "800-480"}, {"short_side": "x"}, {"lr": 0.0}, {"trials": 0},
        {"batch_size": 3, "gpus": 2}, {"short_side": "900", "long_side": 800}, {"steps": -1},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(bad)).replace("_", "-").split("-")[0]):
            replace(DetectConfig(), **bad)
    assert DetectConfig(short_side="480-800").sides == PROTOCOL["voc07"].sides


def test_resuming_is_bit_for_bit() -> None:
    whole = training()
    for step, batch in enumerate(batches(0, 4)):
        whole.step(step, batch)
    begun = training()
    for step, batch in enumerate(batches(0, 2)):
        begun.step(step, batch)
    file = io.BytesIO()
    torch.save(begun.state(), file)
    file.seek(0)
    torch.rand(5)  # whatever else is drawn in between
    resumed = training()
    resumed.load(torch.load(file, weights_only=True))
    for step, batch in enumerate(batches(2, 4), start=2):
        resumed.step(step, batch)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_nothing_is_frozen_and_bn_does_not_decay() -> None:
    made = training()
    before = {name: value.clone() for name, value in made.model.named_parameters()}
    for step, batch in enumerate(batches(0, 2)):
        made.step(step, batch)
    assert [
        name for name, value in made.model.named_parameters() if value.equal(before[name])
    ] == []
    decays, rest = made.state()["optimizer"]["param_groups"]
    assert decays["weight_decay"] == 1e-4 and rest["weight_decay"] == 0.0
    norms = [module for module in made.model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(rest["params"]) == 2 * len(norms)


def test_precise_batch_norm_is_the_mean_over_batches() -> None:
    """The first BN by hand, on inputs whose statistics differ; the weights stay."""
    made = training()
    shown = list(islice(batches(0, 3), 3))
    first, seen = made.model.backbone["bn1"], []

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0].detach())

    handle = first.register_forward_pre_hook(note)
    before = first.weight.clone()
    made.settle_batch_norm(shown)
    handle.remove()
    mean = torch.stack([x.mean((0, 2, 3)) for x in seen]).mean(0)
    var = torch.stack([x.var((0, 2, 3)) for x in seen]).mean(0)
    assert torch.allclose(first.running_mean, mean, atol=1e-6)
    assert torch.allclose(first.running_var, var, rtol=1e-3)
    assert first.momentum == 0.1 and torch.equal(before, first.weight)


def test_a_loss_that_is_not_finite_is_one_line() -> None:
    with pytest.raises(FastSiamError, match="after step 1,000: try a lower --lr"):
        training().mean_loss(torch.tensor(float("nan")), 1000)


def test_what_is_found_is_in_the_images_own_pixels() -> None:
    made = training()
    made.model.roi_heads.score_thresh = 0.0
    found = made.detections(Squares(2), side=96, longest=100)
    assert [one.image_id for one in found] == [10, 11, 12]
    assert all(isinstance(one, Detections) and one.boxes.dtype == np.float32 for one in found)
    assert max(one.boxes.max() for one in found) <= SIDE
    assert set(np.concatenate([one.labels for one in found]).tolist()) <= {0, 1}


def test_the_loss_of_a_batch_falls() -> None:
    made = training()
    (batch,) = batches(0, 1)
    losses = [float(made.step(step, batch)) for step in range(5)]
    assert losses[-1] < losses[0]


@pytest.mark.slow  # a minute of training
@pytest.mark.parametrize("masks", [False, True])
def test_a_detector_learns(masks: bool) -> None:
    pytest.importorskip("pycocotools")
    steps = 150
    schedule = schedule_of(DetectConfig(steps=steps, warmup=10, short_side="64"))
    made = training(schedule, masks=masks)
    data = Squares(8, masks=masks)
    images = TrainingImages(data, seed=0, batch=4, sides=(64,), longest=64, masks=masks, workers=2)
    for step, batch in enumerate(images.from_step(0, steps)):
        made.step(step, batch)
    made.settle_batch_norm(images.from_step(steps, steps + 10))
    found = made.detections(data, side=64, longest=64)
    assert voc_scores(data, found)["AP50"] > 80
    if masks:
        assert coco_scores(data, found, "segm")["AP50"] > 60
