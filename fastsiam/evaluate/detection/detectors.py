"""Faster and Mask R-CNN on a ResNet, as C4 or with an FPN, built from torchvision's parts.

As in detectron2's C4 (Base-RCNN-C4.yaml; MoCo's Res5ROIHeadsExtraNorm), proposals come from the
network's first three stages. The fourth stage, followed by a BN, runs on each proposed box.
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
"""Anchors: side in pixels, and aspect ratio (height / width)."""

_Parts = tuple[Any, Any, Any]
"""Backbone, region proposal network and heads."""


class Detector(GeneralizedRCNN):  # type: ignore[misc]
    """A detector that runs only its backbone under autocast, in ``dtype``.

    Boxes and anchors are pixel coordinates, which bfloat16 would round to multiples of 4 or 8 from
    512 to 2,048.
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
        """Return the losses by name in training mode, otherwise the detections.

        Args:
            images: images (3, H, W) from 0 to 1, already resized.
            targets: for training, the objects of each image.
            sizes: for detection, the (height, width) to scale each image's boxes and masks to.

        Returns:
            In training float32 losses; otherwise for each image "boxes" (n, 4), "scores" (n,),
            "labels" (n,) from 1 and, if the model has masks, "masks" (n, 1, height, width) from 0
            to 1.
        """
        batch, targets = self.transform(images, targets)
        with autocast(batch.tensors.device, self.dtype):
            features = self.backbone(batch.tensors)
        features = {name: maps.float() for name, maps in features.items()}
        proposals, rpn_losses = self.rpn(batch, features, targets)
        detections, head_losses = self.roi_heads(features, proposals, batch.image_sizes, targets)
        if self.training:
            return head_losses | rpn_losses
        return self.transform.postprocess(detections, batch.image_sizes, sizes)


def require_resnet(backbone: nn.Module) -> ResNet:
    """Return the backbone if it is one of fastsiam's ResNets, else raise ``FastSiamError``."""
    if not isinstance(backbone, ResNet):
        kind = type(getattr(backbone, "network", backbone))
        library = kind.__module__.partition(".")[0]
        raise FastSiamError(
            "the backbone of a detector must be one of fastsiam's ResNets, resnet10 to resnet152, "
            f"not {library}'s {kind.__name__}"
        )
    return backbone


def build_detector(
    backbone: nn.Module,
    config: DetectConfig,
    *,
    classes: int,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype = torch.float32,
) -> Detector:
    """Build a detector on a backbone; all layers are trained.

    Args:
        backbone: one of fastsiam's ResNets; the detector uses its modules without a copy.
        config: type of the heads, whether they predict masks (COCO), and the number of proposed
            boxes per image that the heads are trained on.
        classes: number of object classes. Labels start at 1; 0 is background.
        mean, std: normalisation of each channel.

    Raises:
        FastSiamError: the backbone is not one of fastsiam's ResNets.
    """
    resnet, is_c4 = require_resnet(backbone), config.detector == "c4"
    parts = _c4(resnet, config, classes, dtype) if is_c4 else _fpn(resnet, config, classes)
    _, rpn, heads = parts
    _initialise(rpn.head, heads.box_predictor, heads.mask_predictor)
    return Detector(*parts, _Normalisation(mean, std, 1 if is_c4 else 32), dtype=dtype)


class _Normalisation(GeneralizedRCNNTransform):  # type: ignore[misc]
    """Normalises images and batches them, without torchvision's resizing."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], divisor: int) -> None:
        super().__init__(0, 0, list(mean), list(std), size_divisible=divisor)

    def resize(self, image: Tensor, target: Any = None) -> tuple[Tensor, Any]:
        return image, target


class _BoxFeatures(nn.Module):
    """The fourth stage, followed by a BN, on the features of each of R boxes: returns (R, C)."""

    def __init__(self, stage: nn.Module, channels: int, dtype: torch.dtype, masks: bool) -> None:
        super().__init__()
        self.stage, self.norm, self.dtype = stage, nn.BatchNorm2d(channels), dtype
        self._masks = masks
        self.maps: Tensor | None = None
        """Feature maps (R, C, 7, 7) of the last call in training, for the mask predictor."""

    def of(self, x: Tensor) -> Tensor:
        """Return feature maps (R, C, 7, 7), float32, of RoIAlign's output."""
        with autocast(x.device, self.dtype):
            maps: Tensor = self.norm(self.stage(x))
        return maps.float()

    def forward(self, x: Tensor) -> Tensor:
        maps = self.of(x)
        self.maps = maps if self.training and self._masks else None
        return maps.mean((2, 3))


class _Anchors(AnchorGenerator):  # type: ignore[misc]
    """Anchors like detectron2's, centred on the upper left corner of each feature cell.

    torchvision computes the stride as the image's side divided by the feature map's, rounded down.
    That is too small if the true stride does not divide the image's side. torchvision also rounds
    the sides of the anchors.
    """

    def __init__(self, stride: int) -> None:
        super().__init__((_SIZES,), (_RATIOS,))
        self._stride = stride

    def generate_anchors(self, scales: Any, aspect_ratios: Any, **kind: Any) -> Tensor:
        """Return (ratios * scales, 4) corners of the anchors around the origin."""
        ratio = torch.tensor(aspect_ratios, **kind)[:, None, None].sqrt()
        sides = torch.tensor(scales, **kind)[:, None] * torch.cat([1 / ratio, ratio], -1)
        return (torch.cat([-sides, sides], -1) / 2).flatten(0, 1)

    def grid_anchors(self, grid_sizes: Any, strides: Any) -> Any:
        return super().grid_anchors(grid_sizes, [(self._stride, self._stride)])


class _AlignedRoIAlign(RoIAlign):  # type: ignore[misc]
    """RoIAlign like detectron2's: aligned, with an adaptive number of samples."""

    def __init__(self, stride: int) -> None:
        super().__init__(14, 1 / stride, sampling_ratio=0, aligned=True)  # layer4 halves the 14

    def forward(self, features: dict[str, Tensor], boxes: list[Tensor], sizes: Any) -> Any:
        """Return features (R, C, 14, 14) of R boxes."""
        return super().forward(features["0"], boxes)


class _C4Heads(RoIHeads):  # type: ignore[misc]
    """Heads that share the fourth stage: in training, the mask head reuses the box head's maps."""

    def select_training_samples(self, proposals: Any, targets: Any) -> Any:
        samples = super().select_training_samples(proposals, targets)
        self._has_object = torch.cat(samples[2]) > 0
        return samples

    def mask_maps(self, features: Any, boxes: Any, sizes: Any) -> Tensor:
        """Return the mask predictor's input; in training, the maps of the boxes with objects."""
        if self.training:
            maps, self.box_head.maps = self.box_head.maps, None
            object_maps: Tensor = maps[self._has_object]
            return object_maps
        all_maps: Tensor = self.box_head.of(self.box_roi_pool(features, boxes, sizes))
        return all_maps


def _c4(backbone: ResNet, config: DetectConfig, classes: int, dtype: torch.dtype) -> _Parts:
    """Return the backbone, the region proposal network and the heads of a C4 detector."""
    channels, features, masks = backbone.features // 2, backbone.features, config.task == "coco"
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
        _AlignedRoIAlign(stride),
        _BoxFeatures(backbone.layer4, features, dtype, masks),
        FastRCNNPredictor(features, classes + 1),
        fg_iou_thresh=0.5,
        bg_iou_thresh=0.5,
        batch_size_per_image=config.rois,
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


def _fpn(backbone: ResNet, config: DetectConfig, classes: int) -> _Parts:
    """Return the parts of torchvision's FPN detector, with its defaults for all other settings."""
    layers = {f"layer{n}": f"{n - 1}" for n in (1, 2, 3, 4)}
    channels = [backbone.features // 8 * 2**n for n in range(4)]
    detector = (MaskRCNN if config.task == "coco" else FasterRCNN)(
        BackboneWithFPN(backbone, layers, channels, 256),
        classes + 1,
        rpn_post_nms_top_n_train=1000,
        box_batch_size_per_image=config.rois,
    )
    return detector.backbone, detector.rpn, detector.roi_heads


def _initialise(rpn_head: nn.Module, predictor: Any, mask_predictor: Any) -> None:
    """Initialise the weights like detectron2."""
    deviations: list[tuple[Any, float]] = []
    if mask_predictor is not None:
        nn.init.zeros_(mask_predictor.conv5_mask.bias)
        deviations.append((mask_predictor.mask_fcn_logits, 0.001))
    deviations += [(m, 0.01) for m in rpn_head.modules() if isinstance(m, nn.Conv2d)]
    deviations += [(predictor.cls_score, 0.01), (predictor.bbox_pred, 0.001)]
    for layer, deviation in deviations:
        nn.init.normal_(layer.weight, std=deviation)
        nn.init.zeros_(layer.bias)
