"""Detectors built from torchvision's modules: shapes, dtypes, trained weights, the C4 design."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models.detection.image_list import ImageList

from fastsiam.config.detect import DetectConfig
from fastsiam.errors import FastSiamError
from fastsiam.evaluate.detection.detectors import build_detector
from tests.evaluate.detection.tiny import tiny


@pytest.mark.parametrize("kind", ["c4", "fpn"])
def test_autocast_trains_every_weight_with_float32_boxes(kind: str) -> None:
    """bfloat16 would shift anchors and boxes by pixels. Detections lie within their image."""
    generator = torch.Generator().manual_seed(0)
    images = [torch.rand(3, *size, generator=generator) for size in ((96, 64), (64, 100))]
    masks = [torch.zeros(2, *image.shape[1:], dtype=torch.uint8) for image in images]
    for mask in masks:
        mask[:, 10:40, 10:40] = 1
    boxes = torch.tensor([[4.0, 6.0, 40.0, 50.0], [20.0, 10.0, 60.0, 44.0]])
    labels = torch.tensor([1, 3])
    model = tiny(3, kind=kind, masks=True, dtype=torch.bfloat16).train()
    stages = {"anchors": model.rpn.anchor_generator, "deltas": model.roi_heads.box_predictor}
    stages |= {"body": model.backbone, "masks": model.roi_heads.mask_predictor}
    if kind == "c4":  # most operations of a step still run in bfloat16
        stages |= {"stage": model.roi_heads.box_head.stage}
    types: dict[str, list[torch.dtype]] = {name: [] for name in stages}

    def record_type(name: str, module: nn.Module, arguments: Any, result: Any) -> None:
        parts = result.values() if isinstance(result, dict) else result
        types[name].append(next(iter(parts)).dtype)

    for name, module in stages.items():
        module.register_forward_hook(partial(record_type, name))
    losses = model(images, [{"boxes": boxes, "labels": labels, "masks": mask} for mask in masks])
    expected = {"loss_objectness", "loss_rpn_box_reg", "loss_classifier", "loss_box_reg"}
    assert set(losses) == expected | {"loss_mask"}
    if kind == "c4":  # masks reuse the fourth stage's maps of their boxes
        assert len(types["stage"]) == 1
        assert int(model.roi_heads.box_head.norm.num_batches_tracked) == 1
    sum(losses.values()).backward()
    assert all(p.requires_grad and p.grad is not None for p in model.parameters())
    model.eval().roi_heads.score_thresh, model.roi_heads.detections_per_img = 0.0, 5
    sizes = [(192, 128), (32, 50)]
    with torch.no_grad():
        detections = model(images, sizes=sizes)
    for one, (height, width) in zip(detections, sizes, strict=True):
        assert len(one["boxes"]) > 0 and set(one["labels"].tolist()) <= {1, 2, 3}
        assert one["boxes"].dtype == torch.float32
        assert one["boxes"][:, 2].max() <= width and one["boxes"][:, 3].max() <= height
        assert one["masks"].shape == (len(one["boxes"]), 1, height, width)
    for name in ("body", "stage"):
        assert set(types.pop(name, [torch.bfloat16])) == {torch.bfloat16}
    assert all(set(one) == {torch.float32} for one in types.values())
    assert {loss.dtype for loss in losses.values()} == {torch.float32}


def test_c4_splits_network_after_third_stage() -> None:
    """Check the modules one by one: strides, the extra BN, pooling, anchors."""
    model = tiny().eval()
    x = torch.rand(1, 3, 64, 96)
    features = model.backbone(x)["0"]
    assert features.shape == (1, 32, 4, 6)
    assert model.rpn.head.cls_logits.out_channels == 15
    cut = model.roi_heads.box_roi_pool({"0": features}, [torch.tensor([[0.0, 0, 32, 32]])], [])
    assert cut.shape == (1, 32, 14, 14)
    head = model.roi_heads.box_head
    by_hand = head.norm(head.stage(cut)).mean((2, 3))
    assert torch.equal(head(cut), by_hand) and by_hand.shape == (1, 64)
    head.train()(cut)
    assert head.maps is None  # only masks need them
    names = set(model.state_dict())
    assert {"backbone.layer3.0.conv1.weight", "roi_heads.box_head.norm.weight"} <= names
    assert not any(name.startswith("backbone.layer4") for name in names)  # it is only in the head
    assert tiny(stem="cifar").backbone(x)["0"].shape == (1, 32, 16, 24)


@pytest.mark.parametrize(("stem", "stride"), [("imagenet", 16), ("cifar", 4)])
@pytest.mark.parametrize("width", [96, 107])
def test_anchors_are_one_stride_apart(stem: str, stride: int, width: int) -> None:
    """This includes image sides not divisible by the stride. Anchor sides are not rounded."""
    model = tiny(stem=stem)
    images = ImageList(torch.zeros(1, 3, 64, width), [(64, width)])
    features = model.backbone(images.tensors)["0"]
    (anchors,) = model.rpn.anchor_generator(images, [features])
    rows, columns = features.shape[2:]
    centres = (anchors[:, :2] + anchors[:, 2:]).view(rows, columns, 15, 2) / 2
    far = [(centres[..., 0] - stride * torch.arange(columns).view(1, -1, 1)),
           (centres[..., 1] - stride * torch.arange(rows).view(-1, 1, 1))]  # fmt: skip
    assert max(x.abs().max() for x in far) < 1e-4
    sizes = (32, 64, 128, 256, 512)
    sides = [(s * 2 ** (-r / 2), s * 2 ** (r / 2)) for r in (-1, 0, 1) for s in sizes]
    assert torch.allclose((anchors[:, 2:] - anchors[:, :2])[:15], torch.tensor(sides))


def test_roi_pooling_has_no_half_pixel_shift() -> None:
    """Pooling a ramp over the columns at stride 16 gives the ramp at the samples' centres."""
    model = tiny()
    ramp = torch.arange(8.0).expand(1, 1, 8, 8)
    box = torch.tensor([[32.0, 32.0, 88.0, 88.0]])  # columns 2 to 5.5 of the map
    cut = model.roi_heads.box_roi_pool({"0": ramp}, [box], [])
    centres = 2 + (torch.arange(14) + 0.5) * 3.5 / 14 - 0.5
    assert torch.allclose(cut[0, 0, 7], centres, atol=1e-5)


def test_mask_head_is_initialised_as_in_detectron2() -> None:
    predictor = tiny(masks=True).roi_heads.mask_predictor
    assert predictor.mask_fcn_logits.weight.std().item() == pytest.approx(0.001, rel=0.2)
    assert not predictor.mask_fcn_logits.bias.any() and not predictor.conv5_mask.bias.any()


def test_networks_other_than_resnets_are_rejected() -> None:
    with pytest.raises(FastSiamError, match=r"one of fastsiam's ResNets, .*, not torch's Linear"):
        build_detector(nn.Linear(2, 2), DetectConfig(), classes=2, mean=[0.5] * 3, std=[0.5] * 3)
