"""Training of detectors: reproducible batches, learning rates, precise BN, convergence."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.ops import masks_to_boxes

from fastsiam.config.detect import DetectConfig
from fastsiam.console import Console
from fastsiam.distributed import Place
from fastsiam.errors import DataError, FastSiamError
from fastsiam.evaluate.detection import (
    DetectionSet,
    Task,
    coco_scores,
    open_detection,
    voc_scores,
)
from fastsiam.evaluate.detection.protocol import PROTOCOL, differences, schedule_of
from fastsiam.evaluate.detection.training import DetectorTraining
from fastsiam.evaluate.detection.training_images import DetectionBatches, Sample, draw_position
from tests.conftest import import_or_skip
from tests.evaluate.detection.tiny import SIDE, picture, squares, tiny
from tests.train.runs import CPU as HERE
from tests.train.runs import same_state

CONFIG = DetectConfig(steps=8, warmup=2, short_side="64", batch_size=2, workers=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DetectionSet:
    return squares(tmp_path_factory.mktemp("squares"))


def training(config: DetectConfig = CONFIG, **settings: Any) -> DetectorTraining:
    return DetectorTraining(tiny(**settings), config, seed=0, place=HERE)


def images_of(data: DetectionSet, *, place: Place = HERE, **settings: Any) -> DetectionBatches:
    return DetectionBatches(data, replace(CONFIG, **settings), seed=3, place=place)


def batches(data: DetectionSet, first: int, steps: int, place: Place = HERE) -> list[list[Sample]]:
    images = images_of(data, place=place, short_side="48-64", long_side=100)
    return list(images.from_step(first, steps))


def test_each_epoch_has_every_image_once_in_new_order() -> None:
    first, second = (
        [draw_position(7, position, 10, (1,)).image for position in range(start, start + 10)]
        for start in (0, 10)
    )
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    draws = [draw_position(7, position, 10, (480, 512)) for position in range(64)]
    assert {draw.side for draw in draws} == {480, 512} and {draw.flip for draw in draws} == {0, 1}
    assert draw_position(8, 0, 10**6, (1,)) != draw_position(7, 0, 10**6, (1,))


def test_learning_rates_follow_protocol() -> None:
    """MoCo's VOC: 100 warm-up steps, drops at 18,000 and 22,000 of 24,000, or in proportion."""
    schedule = PROTOCOL["voc07"]
    rates = [schedule.rate(0.02, step) for step in (0, 50, 100, 17_999, 18_000, 22_000)]
    assert rates == pytest.approx([2e-5, 0.01001, 0.02, 0.02, 0.002, 0.0002])
    assert schedule_of(DetectConfig(task="coco")) == PROTOCOL["coco"]
    assert schedule_of(DetectConfig(steps=240, warmup=10)).drops == (180, 220)
    assert schedule.sides == tuple(range(480, 801, 32))


def test_differences_from_protocol_are_listed() -> None:
    assert differences(DetectConfig(), {}) == []
    assert differences(DetectConfig(task="coco", trials=1), {"backbone": "resnet50"}) == []
    config = DetectConfig(steps=240, short_side="96-128", trials=2)
    assert differences(config, {"BN statistics": "of a rank", "width": 16}) == [
        "steps 240 (not 24,000)", "sides 96 to 128 (not 480 to 800)", "trials 2 (not 5)",
        "width 16 (not 64)", "BN statistics of a rank (not of all ranks)",
    ]  # fmt: skip


def test_invalid_settings_are_rejected() -> None:
    for bad in (
        {"short_side": "800-480"}, {"short_side": "x"}, {"batch_size": 3, "gpus": 2},
        {"short_side": "900", "long_side": 800},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(bad)).replace("_", "-").split("-")[0]):
            replace(DetectConfig(), **bad)
    assert DetectConfig(short_side="480-800").sides == PROTOCOL["voc07"].sides


def test_batch_depends_only_on_seed_and_step(data: DetectionSet) -> None:
    all_batches, later = batches(data, 0, 5), batches(data, 3, 5)
    assert len(later) == 2 and same_state(all_batches[3:], later)
    first, second = (batches(data, 0, 5, Place(rank, 2, HERE.device)) for rank in (0, 1))
    assert same_state(all_batches, [a + b for a, b in zip(first, second, strict=True)])


def test_boxes_and_masks_are_resized_and_flipped_with_image(detection_data: Path) -> None:
    """Boxes still enclose their masks after resizing and flipping; image sides are as requested."""
    import_or_skip("pycocotools", "detection")
    data = open_detection("coco", detection_data / "coco", "train")
    images = images_of(data, short_side="96-128", long_side=150)
    flips = set()
    for position in range(16):
        image, target = images.sample(position)
        flips.add(draw_position(3, position, len(images.used), (96, 128)).flip)
        assert min(image.shape[1:]) in (96, 128) or max(image.shape) == 150
        assert target["masks"].shape[1:] == image.shape[1:] and image.max() <= 1
        inside = masks_to_boxes(target["masks"]) + torch.tensor([0, 0, 1, 1])
        assert torch.allclose(inside, target["boxes"], atol=2)
        assert set(target["labels"].tolist()) <= {1, 2, 3, 4}
    assert flips == {False, True}


@pytest.mark.parametrize("task", ["voc0712", "coco"])
def test_zips_give_the_same_losses_and_scores(
    task: Task, detection_data: Path, tmp_path: Path
) -> None:
    is_coco = task == "coco"
    if is_coco:
        import_or_skip("pycocotools", "detection")
    folder = detection_data / ("coco" if is_coco else "voc")
    for one in folder.iterdir():
        name = "annotations_trainval2017" if one.name == "annotations" else one.name
        shutil.make_archive(str(tmp_path / name), "zip", folder, one.name)
    results = []
    for data in (folder, tmp_path):
        train, val = (open_detection(task, data, split) for split in ("train", "val"))
        trainer = training(classes=4, masks=is_coco)
        heads: Any = trainer.network.roi_heads
        heads.score_thresh = 0.0
        losses = [float(trainer.step(i, batch)) for i, batch in enumerate(batches(train, 0, 2))]
        trainer.compute_precise_bn(batches(train, 2, 3))
        found = trainer.detections(val)
        scores = coco_scores(val, found, "segm") if is_coco else voc_scores(val, found)
        results.append((train.checksum ^ val.checksum, losses, scores))
    assert results[0] == results[1] and results[0][2]["AP50"] > 0


def test_images_without_objects_are_skipped(data: DetectionSet) -> None:
    """Boxes are clipped to the image; boxes that vanish when the image shrinks are left out."""
    images = images_of(data)
    assert images.used == [0, 1, 2, 3, 4, 5]
    empty = DetectionSet("empty", ("a",), data.pictures[-1:])
    with pytest.raises(DataError, match="no images with objects"):
        images_of(empty)
    with pytest.raises(FastSiamError, match=r"^--batch-size 2 is not divisible by 3 ranks"):
        images_of(data, place=replace(HERE, world=3))
    boxes = [(-5, 0, 80, 64), (63.999999, 0, 64, 64)]
    one = DetectionSet("one", ("a",), [picture(boxes, file=data.pictures[0].file)])
    _, target = images_of(one, short_side="32").sample(0)
    assert target["boxes"][0].tolist() == [0, 0, 32, 32]


def test_every_weight_is_trained_and_loss_falls(data: DetectionSet) -> None:
    """Weight decay does not apply to BN."""
    trainer, batch = training(), batches(data, 0, 1)[0]
    before = {name: value.clone() for name, value in trainer.network.named_parameters()}
    losses = [float(trainer.step(step, batch)) for step in range(7)]
    after = dict(trainer.network.named_parameters())
    assert not [name for name, value in before.items() if value.equal(after[name])]
    assert losses[-1] < losses[0]
    decays, rest = trainer.state()["optimizer"]["param_groups"]
    assert decays["weight_decay"] == 1e-4 and rest["weight_decay"] == 0.0
    norms = [module for module in trainer.network.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(rest["params"]) == 2 * len(norms)


def test_state_after_loss_that_is_not_finite_is_not_saved(
    data: DetectionSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, files = training(), Mock(saved=None, console=Console(quiet=True))
    monkeypatch.setattr(trainer, "step", lambda *_: torch.tensor(torch.nan))
    with pytest.raises(FastSiamError, match=r"after step 8: try a lower --lr"):
        trainer.fit(data, files, "step")
    files.save_state.assert_not_called()


def test_precise_bn_averages_statistics_over_batches(data: DetectionSet) -> None:
    """Recompute the first BN on batches with different statistics; weights do not change."""
    trainer = training()
    first: Any = trainer.network.get_submodule("backbone.bn1")
    hook = Mock(return_value=None)
    handle = first.register_forward_pre_hook(hook)
    before = first.weight.clone()
    trainer.compute_precise_bn(batches(data, 0, 3))
    handle.remove()
    seen = [inputs[0] for _, inputs in (call.args for call in hook.call_args_list)]
    mean = torch.stack([x.mean((0, 2, 3)) for x in seen]).mean(0)
    var = torch.stack([x.var((0, 2, 3)) for x in seen]).mean(0)
    assert torch.allclose(first.running_mean, mean, atol=1e-6)
    assert torch.allclose(first.running_var, var, rtol=1e-3)
    assert first.momentum == 0.1 and torch.equal(before, first.weight)


def test_detections_are_in_original_pixels(data: DetectionSet) -> None:
    tools = import_or_skip("pycocotools.mask", "detection")
    trainer = training(replace(CONFIG, short_side="96", long_side=100), masks=True)
    heads: Any = trainer.network.roi_heads
    heads.score_thresh, heads.detections_per_img = 0.0, 5
    detections = trainer.detections(data)
    assert len(detections) == 7
    assert (
        max(one.boxes.max() for one in detections) <= SIDE
        and detections[0].boxes.dtype == np.float32
    )
    assert set(np.concatenate([one.labels for one in detections]).tolist()) <= {0, 1}
    assert len(detections[0].masks) == len(detections[0].boxes)
    assert tools.decode(detections[0].masks[0]).shape == (SIDE, SIDE)


@pytest.mark.slow  # a minute of training
def test_detector_learns(tmp_path: Path) -> None:
    steps = 150
    config = replace(CONFIG, steps=steps, warmup=10, batch_size=4)
    trainer, data = training(config), squares(tmp_path, 8)
    images = DetectionBatches(data, config, seed=0, place=HERE)
    for step, batch in enumerate(images.from_step(0, steps)):
        trainer.step(step, batch)
    trainer.compute_precise_bn(images.from_step(steps, steps + 10))
    assert voc_scores(data, trainer.detections(data))["AP50"] > 80
