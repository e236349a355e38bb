"""Backbones by name: fastsiam's ResNets, and torchvision's and timm's networks.

Each maps normalised images to pooled features, without a classifier. Dropout and stochastic depth
are off, so that resumed runs are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
import torchvision
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.ops import StochasticDepth

from fastsiam.config import OWN_BACKBONES, BackboneConfig
from fastsiam.config.setting import nearest
from fastsiam.errors import BackendError
from fastsiam.files import why
from fastsiam.model.batch_norm import recomputation, unknown_batch_norm

Network = TypeVar("Network", bound=nn.Module)

BLOCKS: dict[str, tuple[type[BasicBlock | Bottleneck], tuple[int, int, int, int]]] = {
    "resnet10": (BasicBlock, (1, 1, 1, 1)),
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
    "resnet152": (Bottleneck, (3, 8, 36, 3)),
}
"""fastsiam's ResNets: block type, and number of blocks in each stage."""
assert tuple(BLOCKS) == OWN_BACKBONES

_STEMS = {
    "imagenet": (7, 2, 3),
    "cifar": (3, 1, 1),
    "cifar-pad2": (3, 1, 2),
    "cifar-no-relu": (3, 1, 1),
}
"""Kernel size, stride and padding of the first convolution."""

_SIDE = 224
"""Image side, in pixels, of torchvision's networks that accept only one size."""


_FEWEST_SAFE_CHANNELS = 16


class StridedPointwise(nn.Conv2d):
    """A strided 1x1 convolution that, on a CPU, subsamples its input and convolves without stride.

    This works around a bug: oneDNN in torch 2.11 to 2.15 writes out of bounds in the backward pass
    of a channels-last strided 1x1 convolution with fewer than 16 input channels, if the batch size
    is not a multiple of the number of threads. The compiler makes every convolution channels-last.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Convolve (N, C, H, W); the result differs from ``nn.Conv2d`` only by rounding."""
        if input.device.type != "cpu":
            return super().forward(input)
        down, right = self.stride
        return nn.functional.conv2d(input[..., ::down, ::right], self.weight, self.bias)


def _without_unsafe_convolutions(network: nn.Module) -> None:
    """Convert affected convolutions to ``StridedPointwise``; keys and weights stay the same."""
    for conv in network.modules():
        if (
            type(conv) is nn.Conv2d
            and conv.kernel_size == (1, 1)
            and conv.stride != (1, 1)
            and conv.padding == (0, 0)
            and conv.groups == 1
            and conv.in_channels < _FEWEST_SAFE_CHANNELS
        ):
            conv.__class__ = StridedPointwise


class Backbone(nn.Module):
    """An encoder without its classifier: (N, 3, S, S) to (N, ``features``)."""

    features: int
    """Dimension of the output."""
    classifier: str = "fc"
    """torchvision's name of the removed classifier; "" for timm's networks."""
    recompute: bool = False
    """Whether to checkpoint activations: save only each block's input, recompute in backward."""


class ResNet(Backbone):
    """A ResNet up to its pooled features ("pool5"): (N, 3, S, S) to (N, ``features``).

    Modules and state dict keys are those of torchvision's ``ResNet`` without ``fc``, so that
    weights can be exchanged, but other widths than 64 are possible. The "cifar" stem is that of He
    et al. for 32-pixel images (CVPR 2016, section 4.2): 3x3, stride 1, no pooling. "cifar-pad2" has
    padding 2, as in solo-learn (solo/methods/base.py). "cifar-no-relu" has no ReLU: lightly's
    ``ResNetGenerator`` calls that ReLU only in ``forward``, so it is lost when the network's
    children are put into an ``nn.Sequential``.
    """

    def __init__(self, name: str, *, stem: str, width: int) -> None:
        super().__init__()
        block, depths = BLOCKS[name]
        kernel, stride, padding = _STEMS[stem]
        self.conv1 = nn.Conv2d(3, width, kernel, stride, padding, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.Identity() if stem == "cifar-no-relu" else nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if stem == "imagenet" else nn.Identity()
        channels, stages = width, []
        for stage, depth in enumerate(depths):
            planes, stride = width * 2**stage, 1 if stage == 0 else 2
            blocks = []
            for i in range(depth):
                blocks.append(_build_block(block, channels, planes, stride if i == 0 else 1))
                channels = planes * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.features = channels

    def forward(self, x: Tensor) -> Tensor:
        """Return pooled features (N, ``features``) of normalised images (N, 3, S, S)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            for block in stage:
                x = _run_checkpointed(block, x) if self.recompute and self.training else block(x)
        pooled: Tensor = self.avgpool(x).flatten(1)
        return pooled


class LibraryNetwork(Backbone):
    """A network from torchvision or timm, with that library's state dict keys.

    The network is a submodule because some (ConvNeXt, DenseNet) have a module called ``features``.
    """

    def __init__(self, network: nn.Module, *, features: int, classifier: str = "") -> None:
        super().__init__()
        self.network = network
        self.features, self.classifier = features, classifier

    def forward(self, x: Tensor) -> Tensor:
        """Return features (N, ``features``) of normalised images (N, 3, S, S)."""
        features: Tensor = self.network(x)
        return features

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the network's state dict, with the library's keys."""
        return self.network.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}network.{name.removeprefix(prefix)}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)


def build_backbone(config: BackboneConfig) -> Backbone:
    """Build the backbone that the config names, randomly initialised; nothing is downloaded.

    fastsiam's ResNets are initialised like torchvision's (He et al., fan-out), other networks by
    their library. With ``zero_init_residual`` the last BN of each block starts at scale 0 (Goyal et
    al. 2017), in all networks with torchvision's residual blocks. Dropout and stochastic depth are
    off.

    Raises:
        ValueError: the network is unknown, or has no classifier to remove.
        BackendError: timm is not installed.
    """
    backbone: Backbone
    if config.is_own:
        backbone = ResNet(config.backbone, stem=config.stem, width=config.width)
        for module in backbone.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif config.backbone.startswith("timm/"):
        backbone = _build_timm(config.backbone.removeprefix("timm/"))
    else:
        backbone = _build_torchvision(config.backbone)
    for module in backbone.modules():
        if config.zero_init_residual and isinstance(module, Bottleneck):
            nn.init.zeros_(module.bn3.weight)
        if config.zero_init_residual and isinstance(module, BasicBlock):
            nn.init.zeros_(module.bn2.weight)
        _without_randomness(module)
    _without_unsafe_convolutions(backbone)
    return backbone


def check_backbone(config: BackboneConfig, *, crop: int, joins_views: bool = False) -> None:
    """Check that the backbone can be trained on views of a given size.

    Args:
        config: names the network.
        crop: side of the views, in pixels.
        joins_views: whether batches may contain several views, which BN must normalise separately.

    Raises:
        ValueError: as ``check_crop``.
        BackendError: timm is not installed, or the network's batch normalisation is unsupported.
    """
    if config.is_own:
        return
    backbone = skeleton(config).train()
    if unknown := unknown_batch_norm(backbone):
        raise BackendError(
            f"{config.backbone} uses {unknown}, which cannot normalise each view separately; "
            "choose a network with GroupNorm, LayerNorm or a BatchNorm with running averages"
        )
    check_crop(config, crop, training=True)
    if not joins_views:
        return
    batches = set[int]()  # batch sizes that BN layers receive when the network gets two images
    for module in backbone.modules():
        if isinstance(module, _BatchNorm):
            module.register_forward_pre_hook(lambda _, inputs: batches.add(len(inputs[0])))
    _run_on_meta(backbone, crop)
    if batches - {2}:
        raise BackendError(
            f"{config.backbone} folds parts of images into the batch dimension, so BN would mix up "
            "views; pass --compile off, without --bn-images"
        )


def check_crop(config: BackboneConfig, crop: int, *, training: bool) -> None:
    """Check, on the meta device, that the backbone works on images of a given size.

    Args:
        config: names the network.
        crop: side of the images, in pixels.
        training: whether to check training mode, in which some networks have other outputs.

    Raises:
        ValueError: the network is unknown, does not accept this size, or has no (N, d) features.
        BackendError: timm is not installed.
    """
    if config.is_own:
        return
    backbone, name = skeleton(config).train(training), config.backbone
    try:
        out = _run_on_meta(backbone, crop)
    except Exception as error:  # libraries may raise anything for a wrong size
        default_cfg = getattr(backbone.network, "default_cfg", {})  # timm's
        side = int((default_cfg.get("input_size") or (_SIDE,))[-1])
        try:
            _run_on_meta(backbone, side)
        except Exception:
            raise ValueError(
                f"{name} does not work on images of {crop} pixels: {why(error)[:200]}"
            ) from error
        raise ValueError(
            f"{name} needs images of {side} pixels, not {crop}; pass --crop {side}"
        ) from error
    if not isinstance(out, Tensor) or out.shape != (2, backbone.features):
        actual = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(
            f"{name} does not return one feature vector per image{' in training' * training} "
            f"({actual} for 2 images); choose another backbone"
        )


def skeleton(config: BackboneConfig) -> Backbone:
    """Build the backbone on the meta device: parameter names and shapes, without memory.

    Raises:
        ValueError, BackendError: as ``build_backbone``.
    """
    return _build_on_meta(lambda: build_backbone(config))


def _build_on_meta(build: Callable[[], Network]) -> Network:
    try:
        with torch.device("meta"):
            return build()
    except (NotImplementedError, RuntimeError):  # RegNet's constructor computes with tensors
        return build().to("meta")


def classifier_keys(config: BackboneConfig) -> set[str]:
    """Return the state dict keys of the library's classifier, which the backbone lacks.

    Raises:
        ValueError, BackendError: as ``build_backbone``.
    """
    backbone = skeleton(config)
    if backbone.classifier:
        return {f"{backbone.classifier}.weight", f"{backbone.classifier}.bias"}
    import timm

    name = config.backbone.removeprefix("timm/")
    network = _build_on_meta(lambda: timm.create_model(name, pretrained=False))
    return set(network.state_dict()) - set(backbone.state_dict())


def _run_on_meta(backbone: Backbone, side: int) -> Any:
    """Run the backbone on two images on the meta device; return its output."""
    return backbone(torch.empty(2, 3, side, side, device="meta"))


def _build_torchvision(name: str) -> LibraryNetwork:
    model_names = torchvision.models.list_models(module=torchvision.models)
    if name not in model_names:
        raise ValueError(_unknown_message(name, [*OWN_BACKBONES, *model_names, *_timm_names()]))
    # GoogLeNet and Inception warn that the default of this option will change.
    options = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
    network = torchvision.models.get_model(name, weights=None, **options)
    if isinstance(network, torchvision.models.MNASNet):
        raise ValueError(
            f"{name} is not supported: torchvision's MNASNet needs a version number with its "
            "weights, which plain weight files lack; choose another backbone"
        )
    linear = [(path, m) for path, m in network.named_modules() if isinstance(m, nn.Linear)]
    if not linear:
        raise ValueError(
            f"{name} has no fully-connected classifier, so no pooled features; choose another "
            "backbone"
        )
    path, last = linear[-1]
    network.set_submodule(path, nn.Identity())
    return LibraryNetwork(network, features=last.in_features, classifier=path)


def _build_timm(name: str) -> LibraryNetwork:
    try:
        import timm
    except ImportError as error:
        raise BackendError(
            f"timm/{name} needs timm: pip install 'fastsiam[timm]' ({error})"
        ) from error
    name, _, tag = name.partition(".")
    if tag:
        raise ValueError(
            f"timm/{name}.{tag} names pretrained weights, which cannot be loaded; pass timm/{name}"
        )
    if not timm.is_model(name):
        raise ValueError(_unknown_message(f"timm/{name}", _timm_names()))
    network: Any = timm.create_model(name, pretrained=False, num_classes=0)
    return LibraryNetwork(
        network, features=getattr(network, "head_hidden_size", network.num_features)
    )


def _timm_names() -> list[str]:
    try:
        import timm
    except ImportError:
        return []
    return [f"timm/{name}" for name in timm.list_models()]


def _unknown_message(name: str, names: Iterable[str]) -> str:
    choices = (
        f"pass {', '.join(OWN_BACKBONES)}, a classification network of torchvision or timm/NAME"
    )
    return f"unknown backbone {name!r}; {nearest(name, names, most=4) or choices}"


def _without_randomness(module: nn.Module) -> None:
    """Set the probabilities of dropout and stochastic depth to 0."""
    if isinstance(module, _DropoutNd | StochasticDepth):
        module.p = 0.0
    for name in ("drop_prob", "drop_rate"):  # timm may apply these without a module
        if isinstance(getattr(module, name, None), float):
            setattr(module, name, 0.0)


def _run_checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    """Run a block with activation checkpointing; its BNs must be ``ViewBatchNorm``."""
    out: Tensor = checkpoint(
        block,
        x,
        use_reentrant=False,
        preserve_rng_state=False,  # a block has no randomness
        context_fn=lambda: (nullcontext(), recomputation()),
    )
    return out


def _build_block(
    block: type[BasicBlock | Bottleneck], channels: int, planes: int, stride: int
) -> BasicBlock | Bottleneck:
    """Build a residual block, with a 1x1 convolution on the shortcut if the shape changes."""
    out = planes * block.expansion
    shortcut = None
    if stride != 1 or channels != out:
        shortcut = nn.Sequential(
            nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
        )
    return block(channels, planes, stride, shortcut)
