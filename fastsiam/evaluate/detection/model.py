"""Detectors on a ResNet, of torchvision's parts: Faster and Mask R-CNN, as C4 or with an FPN.

detectron2's C4 (Base-RCNN-C4.yaml; MoCo's Res5ROIHeadsExtraNorm) has the network up to its third
stage for proposals, and its fourth stage, with one BN after it, for each proposed box.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import MultiScaleRoIAlign, roi_align

from fastsiam.errors import FastSiamError
from fastsiam.model.backbones import ResNet
from fastsiam.model.numerics import autocast

Detector = Literal["c4", "fpn"]
NAMES: dict[str, str] = {"c4": "C4 of torchvision's parts", "fpn": "FPN of torchvision"}
"""What outputs call them."""

_SIZES, _RATIOS = (32, 64, 128, 256, 512), (0.5, 1.0, 2.0)
"""Of the anchors: side in pixels, and height by width."""
_POOLED = 14
"""Side of what is cut out of the third stage for a box; the fourth halves it."""
_RPN = {
    "fg_iou_thresh": 0.7,
    "bg_iou_thresh": 0.3,
    "batch_size_per_image": 256,
    "positive_fraction": 0.5,
    "nms_thresh": 0.7,
}
_HEADS = {
    "fg_iou_thresh": 0.5,
    "bg_iou_thresh": 0.5,
    "positive_fraction": 0.25,
    "bbox_reg_weights": None,
    "score_thresh": 0.05,
    "nms_thresh": 0.5,
    "detections_per_img": 100,
}


def build_detector(
    backbone: nn.Module,
    *,
    kind: Detector,
    classes: int,
    masks: bool,
    mean: Sequence[float],
    std: Sequence[float],
    rois: int = 512,
) -> GeneralizedRCNN:
    """Build a detector around a backbone, all of which is trained.

    Its images are RGB (3, H, W) of 0 to 1, already resized. Labels count from 1; 0 is background.

    Args:
        backbone: one of fastsiam's ResNets; the detector trains its very modules.
        kind: with what heads.
        classes: of objects.
        masks: whether it finds masks too.
        mean: of each channel, subtracted of images.
        std: of each channel, divided by.
        rois: proposed boxes of an image that the heads are trained on.

    Raises:
        FastSiamError: the backbone is not one of fastsiam's ResNets.
    """
    if not isinstance(backbone, ResNet):
        raise FastSiamError(
            f"{type(backbone).__name__} cannot be made a detector: detection takes the ResNets "
            "resnet10 to resnet152"
        )
    body, rpn, heads = (_c4 if kind == "c4" else _fpn)(backbone, classes, masks, rois)
    divisor = 1 if kind == "c4" else 32
    return GeneralizedRCNN(body, rpn, heads, _Normalisation(mean, std, divisor))


def detect(model: GeneralizedRCNN, images: list[Tensor], sizes: list[tuple[int, int]]) -> list[Any]:
    """Detect objects; the model is in evaluation mode.

    Args:
        model: of ``build_detector``.
        images: (3, H, W) each, resized.
        sizes: height and width of each, in pixels, that boxes and masks are scaled to.

    Returns:
        For each image "boxes" (n, 4), "scores" (n,), "labels" (n,) from 1 and, of a model with
        masks, "masks" (n, 1, height, width) of 0 to 1.
    """
    listed, _ = model.transform(images)
    features = model.backbone(listed.tensors)
    proposals, _ = model.rpn(listed, features)
    found, _ = model.roi_heads(features, proposals, listed.image_sizes)
    shown: list[Any] = model.transform.postprocess(found, listed.image_sizes, sizes)
    return shown


class _Normalisation(GeneralizedRCNNTransform):  # type: ignore[misc]
    """Normalises images and puts them into a batch; they have their size already."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], divisor: int) -> None:
        super().__init__(0, 0, list(mean), list(std), size_divisible=divisor)

    def resize(self, image: Tensor, target: Any = None) -> tuple[Tensor, Any]:
        return image, target


class _InFloat32:
    """Widens features and switches autocast off.

    Boxes and anchors are coordinates in pixels: bfloat16 has steps of 4 to 8 from 512 to 2,048.
    """

    def forward(self, *inputs: Any) -> Any:
        features = next(one for one in inputs if isinstance(one, dict))
        widened = {name: one.float() for name, one in features.items()}
        with torch.autocast(next(iter(features.values())).device.type, enabled=False):
            return super().forward(*(widened if one is features else one for one in inputs))  # type: ignore[misc]


class _Proposals(_InFloat32, RegionProposalNetwork):  # type: ignore[misc]
    """torchvision's region proposal network, in float32 under autocast too."""


class _Heads(_InFloat32, RoIHeads):  # type: ignore[misc]
    """torchvision's heads, in float32 under autocast too."""


class _BoxFeatures(nn.Module):
    """The fourth stage on what was cut out for each box, with one BN after it: (R, C)."""

    def __init__(self, stage: nn.Module, channels: int) -> None:
        super().__init__()
        self.stage, self.norm = stage, nn.BatchNorm2d(channels)
        self.dtype = torch.float32
        """Autocast type of the stage, which most of a step's operations are in."""
        self.maps: Tensor | None = None
        """Of the last call, (R, C, 7, 7): masks are found in them."""

    def of(self, x: Tensor) -> Tensor:
        """Return maps (R, C, 7, 7), float32."""
        with autocast(x.device, self.dtype):
            maps: Tensor = self.norm(self.stage(x))
        return maps.float()

    def forward(self, x: Tensor) -> Tensor:
        maps = self.of(x)
        self.maps = maps if self.training else None
        return maps.mean((2, 3))


class _Cut(nn.Module):
    """RoIAlign as detectron2 has it: "aligned", as many samples as the box has pixels."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self._stride = stride

    def forward(
        self, features: dict[str, Tensor], boxes: list[Tensor], sizes: list[tuple[int, int]]
    ) -> Tensor:
        """Return (R, C, 14, 14)."""
        cut: Tensor = roi_align(
            features["0"], boxes, _POOLED, 1 / self._stride, sampling_ratio=0, aligned=True
        )
        return cut


class _C4Heads(_Heads):
    """Heads that share the fourth stage: in training, masks take what it made of their boxes."""

    def __init__(self, stride: int, head: _BoxFeatures, predictor: nn.Module, rois: int) -> None:
        super().__init__(_Cut(stride), head, predictor, batch_size_per_image=rois, **_HEADS)
        self._objects: Tensor | None = None

    def with_masks(self, predictor: nn.Module) -> None:
        """Find masks too."""
        assert isinstance(self.box_roi_pool, _Cut) and isinstance(self.box_head, _BoxFeatures)
        self.mask_roi_pool, self.mask_head = _Called(self._mask_maps), nn.Identity()
        self.mask_predictor = predictor

    def forward(self, features: Any, *others: Any) -> Any:
        """Return what ``RoIHeads`` does; the fourth stage alone runs under autocast."""
        device = features["0"].device.type
        enabled = torch.is_autocast_enabled(device)
        assert isinstance(self.box_head, _BoxFeatures)
        self.box_head.dtype = torch.get_autocast_dtype(device) if enabled else torch.float32
        return super().forward(features, *others)

    def select_training_samples(self, proposals: Any, targets: Any) -> Any:
        found = super().select_training_samples(proposals, targets)
        self._objects = torch.cat(found[2]) > 0
        return found

    def _mask_maps(self, features: Any, boxes: Any, sizes: Any) -> Tensor:
        head: Any = self.box_head
        if self.training:
            maps, head.maps = head.maps, None
            shared: Tensor = maps[self._objects]
            return shared
        made: Tensor = head.of(self.box_roi_pool(features, boxes, sizes))
        return made


class _Called(nn.Module):
    """A function where torchvision wants a module; what the function is of is not its child."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.forward = function


def _c4(backbone: ResNet, classes: int, masks: bool, rois: int) -> tuple[nn.Module, ...]:
    channels, features = backbone.features // 2, backbone.features
    stride = _stem_stride(backbone) * 4
    anchors = AnchorGenerator((_SIZES,), (_RATIOS,))
    body = IntermediateLayerGetter(backbone, {"layer3": "0"})
    rpn = _Proposals(
        anchors,
        RPNHead(channels, len(_SIZES) * len(_RATIOS)),
        pre_nms_top_n={"training": 12000, "testing": 6000},
        post_nms_top_n={"training": 2000, "testing": 1000},
        **_RPN,
    )
    head = _BoxFeatures(backbone.layer4, features)
    heads = _C4Heads(stride, head, FastRCNNPredictor(features, classes + 1), rois)
    if masks:
        heads.with_masks(MaskRCNNPredictor(features, 256, classes + 1))
    _initialise(rpn.head, heads.box_predictor)
    return body, rpn, heads


def _fpn(backbone: ResNet, classes: int, masks: bool, rois: int) -> tuple[nn.Module, ...]:
    layers = OrderedDict((f"layer{n}", f"{n - 1}") for n in (1, 2, 3, 4))
    body = BackboneWithFPN(
        backbone, dict(layers), [backbone.features // 8 * 2**n for n in range(4)], 256
    )
    rpn = _Proposals(
        AnchorGenerator(tuple((size,) for size in _SIZES), (_RATIOS,) * len(_SIZES)),
        RPNHead(256, len(_RATIOS)),
        pre_nms_top_n={"training": 2000, "testing": 1000},
        post_nms_top_n={"training": 1000, "testing": 1000},
        **_RPN,
    )
    names = list(layers.values())
    heads = _Heads(
        MultiScaleRoIAlign(names, 7, 2),
        TwoMLPHead(256 * 7 * 7, 1024),
        FastRCNNPredictor(1024, classes + 1),
        batch_size_per_image=rois,
        **_HEADS,
    )
    if masks:
        heads.mask_roi_pool = MultiScaleRoIAlign(names, 14, 2)
        heads.mask_head = MaskRCNNHeads(256, (256, 256, 256, 256), 1)
        heads.mask_predictor = MaskRCNNPredictor(256, 256, classes + 1)
    _initialise(rpn.head, heads.box_predictor)
    return body, rpn, heads


def _initialise(rpn_head: nn.Module, predictor: Any) -> None:
    """Draw the first weights as detectron2 does."""
    for module in rpn_head.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    nn.init.normal_(predictor.cls_score.weight, std=0.01)
    nn.init.normal_(predictor.bbox_pred.weight, std=0.001)
    for layer in (predictor.cls_score, predictor.bbox_pred):
        nn.init.zeros_(layer.bias)


def _stem_stride(backbone: ResNet) -> int:
    """Return by how much the first layers shrink an image."""
    pool = 1 if isinstance(backbone.maxpool, nn.Identity) else 2
    return int(backbone.conv1.stride[0]) * pool
