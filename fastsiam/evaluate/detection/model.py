"""Detectors on a ResNet, of torchvision's parts: Faster and Mask R-CNN, as C4 or with an FPN.

detectron2's C4 (Base-RCNN-C4.yaml; MoCo's Res5ROIHeadsExtraNorm) has the network up to its third
stage for proposals, and its fourth stage, with one BN after it, for each proposed box.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.mask_rcnn import MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import RoIAlign

from fastsiam.config.detect import DetectConfig
from fastsiam.errors import FastSiamError
from fastsiam.model.backbones import ResNet
from fastsiam.model.numerics import autocast

_SIZES, _RATIOS = (32, 64, 128, 256, 512), (0.5, 1.0, 2.0)
"""Of the anchors: side in pixels, and height by width."""
_POOLED = 14
"""Side of what is cut out of the third stage for a box; the fourth halves it."""


class Detector(GeneralizedRCNN):  # type: ignore[misc]
    """A detector whose backbone alone runs under autocast, to ``dtype``.

    Boxes and anchors are coordinates in pixels: bfloat16 has steps of 4 to 8 from 512 to 2,048.
    """

    def __init__(self, *parts: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(*parts)
        self.dtype = dtype

    def forward(
        self,
        images: list[Tensor],
        targets: list[dict[str, Tensor]] | None = None,
        sizes: list[tuple[int, int]] | None = None,
    ) -> Any:
        """Return losses by name in training, else what is detected.

        Args:
            images: (3, H, W) each, of 0 to 1, already resized.
            targets: in training, the objects of each.
            sizes: otherwise, the height and width of each that boxes and masks are scaled to.

        Returns:
            In training float32 losses, else for each image "boxes" (n, 4), "scores" (n,), "labels"
            (n,) from 1 and, of a model with masks, "masks" (n, 1, height, width) of 0 to 1.
        """
        listed, targets = self.transform(images, targets)
        with autocast(listed.tensors.device, self.dtype):
            features = self.backbone(listed.tensors)
        features = {name: one.float() for name, one in features.items()}
        proposals, losses = self.rpn(listed, features, targets)
        found, more = self.roi_heads(features, proposals, listed.image_sizes, targets)
        if self.training:
            return more | losses
        return self.transform.postprocess(found, listed.image_sizes, sizes)


def build_detector(
    backbone: nn.Module,
    config: DetectConfig,
    *,
    classes: int,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype = torch.float32,
) -> Detector:
    """Build a detector around a backbone, all of which is trained.

    Args:
        backbone: one of fastsiam's ResNets; the detector trains its very modules.
        config: with what heads, whether it finds masks too (of COCO), and how many proposed boxes
            of an image the heads are trained on.
        classes: of objects. Labels count from 1; 0 is background.
        mean, std: of each channel of images.
        dtype: autocast type.

    Raises:
        FastSiamError: the backbone is not one of fastsiam's ResNets.
    """
    if not isinstance(backbone, ResNet):
        raise FastSiamError(
            f"{type(backbone).__name__} cannot be made a detector: detection takes the ResNets "
            "resnet10 to resnet152"
        )
    is_c4, masks = config.detector == "c4", config.task == "coco"
    parts: tuple[Any, Any, Any]
    if is_c4:
        parts = _c4(backbone, classes, masks, config.rois, dtype)
    else:
        whole = _fpn(backbone, classes, masks, config.rois)
        parts = whole.backbone, whole.rpn, whole.roi_heads
    _initialise(parts[1].head, parts[2].box_predictor, parts[2].mask_predictor)
    return Detector(*parts, _Normalisation(mean, std, 1 if is_c4 else 32), dtype=dtype)


class _Normalisation(GeneralizedRCNNTransform):  # type: ignore[misc]
    """Normalises images and puts them into a batch; they have their size already."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], divisor: int) -> None:
        super().__init__(0, 0, list(mean), list(std), size_divisible=divisor)

    def resize(self, image: Tensor, target: Any = None) -> tuple[Tensor, Any]:
        return image, target


class _BoxFeatures(nn.Module):
    """The fourth stage on what was cut out for each box, with one BN after it: (R, C)."""

    def __init__(self, stage: nn.Module, channels: int, dtype: torch.dtype, masks: bool) -> None:
        super().__init__()
        self.stage, self.norm, self.dtype = stage, nn.BatchNorm2d(channels), dtype
        self._masks = masks
        self.maps: Tensor | None = None
        """Of the last call in training, (R, C, 7, 7): masks are found in them."""

    def of(self, x: Tensor) -> Tensor:
        """Return maps (R, C, 7, 7), float32."""
        with autocast(x.device, self.dtype):
            maps: Tensor = self.norm(self.stage(x))
        return maps.float()

    def forward(self, x: Tensor) -> Tensor:
        maps = self.of(x)
        self.maps = maps if self.training and self._masks else None
        return maps.mean((2, 3))


class _Anchors(AnchorGenerator):  # type: ignore[misc]
    """Anchors at the features' cells, as detectron2 has them: around their upper left corners.

    torchvision takes the side of the image, divided by that of the features and rounded down, for
    the stride, which is less than the stride for a side that it does not divide. It also rounds the
    sides of the anchors.
    """

    def __init__(self, stride: int) -> None:
        super().__init__((_SIZES,), (_RATIOS,))
        self._stride = stride

    def generate_anchors(self, scales: Any, aspect_ratios: Any, **kind: Any) -> Tensor:
        """Return (ratios * scales, 4) corners of the anchors around a point."""
        ratio = torch.tensor(aspect_ratios, **kind)[:, None, None].sqrt()
        sides = torch.tensor(scales, **kind)[:, None] * torch.cat([1 / ratio, ratio], -1)
        return (torch.cat([-sides, sides], -1) / 2).flatten(0, 1)

    def grid_anchors(self, grid_sizes: Any, strides: Any) -> Any:
        return super().grid_anchors(grid_sizes, [(self._stride, self._stride)])


class _Cut(RoIAlign):  # type: ignore[misc]
    """RoIAlign as detectron2 has it: "aligned", as many samples as the box has pixels."""

    def __init__(self, stride: int) -> None:
        super().__init__(_POOLED, 1 / stride, sampling_ratio=0, aligned=True)

    def forward(self, features: dict[str, Tensor], boxes: list[Tensor], sizes: Any) -> Any:
        """Return (R, C, 14, 14)."""
        return super().forward(features["0"], boxes)


class _C4Heads(RoIHeads):  # type: ignore[misc]
    """Heads that share the fourth stage: in training, masks take what it made of their boxes."""

    def select_training_samples(self, proposals: Any, targets: Any) -> Any:
        found = super().select_training_samples(proposals, targets)
        self._objects = torch.cat(found[2]) > 0
        return found

    def mask_maps(self, features: Any, boxes: Any, sizes: Any) -> Tensor:
        """Return what the mask predictor takes: in training, the maps of the boxes of objects."""
        if self.training:
            maps, self.box_head.maps = self.box_head.maps, None
            shared: Tensor = maps[self._objects]
            return shared
        found: Tensor = self.box_head.of(self.box_roi_pool(features, boxes, sizes))
        return found


def _c4(backbone: ResNet, classes: int, masks: bool, rois: int, dtype: torch.dtype) -> Any:
    """Return the backbone, proposals and heads of a C4 detector."""
    channels, features = backbone.features // 2, backbone.features
    pool = 1 if isinstance(backbone.maxpool, nn.Identity) else 2
    stride = int(backbone.conv1.stride[0]) * pool * 4
    rpn = RegionProposalNetwork(
        _Anchors(stride),
        RPNHead(channels, len(_SIZES) * len(_RATIOS)),
        fg_iou_thresh=0.7,
        bg_iou_thresh=0.3,
        batch_size_per_image=256,
        positive_fraction=0.5,
        pre_nms_top_n={"training": 12000, "testing": 6000},
        post_nms_top_n={"training": 2000, "testing": 1000},
        nms_thresh=0.7,
    )
    heads = _C4Heads(
        _Cut(stride),
        _BoxFeatures(backbone.layer4, features, dtype, masks),
        FastRCNNPredictor(features, classes + 1),
        fg_iou_thresh=0.5,
        bg_iou_thresh=0.5,
        batch_size_per_image=rois,
        positive_fraction=0.25,
        bbox_reg_weights=None,
        score_thresh=0.05,
        nms_thresh=0.5,
        detections_per_img=100,
    )
    if masks:
        heads.mask_roi_pool, heads.mask_head = heads.mask_maps, nn.Identity()
        heads.mask_predictor = MaskRCNNPredictor(features, 256, classes + 1)
    return IntermediateLayerGetter(backbone, {"layer3": "0"}), rpn, heads


def _fpn(backbone: ResNet, classes: int, masks: bool, rois: int) -> Any:
    """Return torchvision's detector with an FPN; its own defaults are the settings left out."""
    layers = {f"layer{n}": f"{n - 1}" for n in (1, 2, 3, 4)}
    channels = [backbone.features // 8 * 2**n for n in range(4)]
    return (MaskRCNN if masks else FasterRCNN)(
        BackboneWithFPN(backbone, layers, channels, 256),
        classes + 1,
        rpn_post_nms_top_n_train=1000,
        box_batch_size_per_image=rois,
    )


def _initialise(rpn_head: nn.Module, predictor: Any, mask_predictor: Any) -> None:
    """Draw the first weights as detectron2 does."""
    if mask_predictor is not None:
        nn.init.normal_(mask_predictor.mask_fcn_logits.weight, std=0.001)
        for layer in (mask_predictor.conv5_mask, mask_predictor.mask_fcn_logits):
            nn.init.zeros_(layer.bias)
    for module in rpn_head.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    nn.init.normal_(predictor.cls_score.weight, std=0.01)
    nn.init.normal_(predictor.bbox_pred.weight, std=0.001)
    for layer in (predictor.cls_score, predictor.bbox_pred):
        nn.init.zeros_(layer.bias)
