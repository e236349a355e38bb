"""Settings of what is trained: a backbone's, and those of each method."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal, get_args

from .checks import require

Stem = Literal["imagenet", "cifar", "cifar-pad2", "cifar-no-relu"]

OWN_BACKBONES = ("resnet10", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
"""Networks that take a stem and a width; every other name is torchvision's or timm's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneConfig:
    """The encoder that every method trains (section 3 of the paper)."""

    backbone: str = "resnet50"
    (
        "Encoder without its classifier: resnet10 (one block a stage), 18, 34, 50, 101 or 152; any "
        "other classification network of torchvision's, such as convnext_tiny or vit_b_16; or "
        "timm/NAME. The paper's recipe is for ResNets: with others, ViTs above all, it is untried."
    )
    stem: Stem = "imagenet"
    (
        "First layers of a ResNet: 7x7 stride 2 and max-pool, or (for 32-pixel images) 3x3 stride "
        "1, no pool. cifar-pad2 pads that by 2 pixels, as solo-learn does; cifar-no-relu has no "
        "ReLU after it, as lightly's CIFAR networks in an nn.Sequential: to go on from theirs."
    )
    width: int = 64
    """Channels of a ResNet's first stage; 64 is the standard network, less makes a narrow one."""
    zero_init_residual: bool = True
    """Start each residual block as the identity: the scale of its last BN at 0."""

    def __post_init__(self) -> None:
        require(self.width >= 1, f"width must be at least 1, not {self.width}")
        stems = get_args(Stem)
        require(self.stem in stems, f"stem must be one of {', '.join(stems)}, not {self.stem!r}")
        require(
            self.is_own or (self.stem == "imagenet" and self.width == 64),
            f"stem and width are settings of {', '.join(OWN_BACKBONES)}: leave them out with "
            f"{self.backbone}",
        )

    @property
    def is_own(self) -> bool:
        """Whether the encoder is a ResNet of this package's, not torchvision's or timm's."""
        return self.backbone in OWN_BACKBONES

    @property
    def smallest_crop(self) -> int:
        """Side, in pixels, of the smallest image that leaves its last stage more than one pixel."""
        if not self.is_own:
            return 1
        # torch's bfloat16 convolution leaves its gradient unset for one pixel at stride 2 on a CPU.
        return 17 if self.stem == "imagenet" else 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodConfig:
    """Settings of a method: what is trained on a backbone. Each method has a class of its own."""

    name: ClassVar[str]
    """What ``--method`` calls it."""
    title: ClassVar[str]
    """What its paper calls it."""
    paper: ClassVar[str]
    """Its paper, for model cards, in Markdown."""

    def described(self) -> dict[str, str]:
        """Return its settings for people, by what they are of."""
        return {f.name.replace("_", " "): str(getattr(self, f.name)) for f in fields(self)}

    def check_views(self, views: int) -> None:
        """Raise ``ValueError`` if the method cannot be trained on so many views of each image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSiamConfig(MethodConfig):
    """SimSiam: its heads and its loss (section 3 of the paper)."""

    name: ClassVar[str] = "simsiam"
    title: ClassVar[str] = "SimSiam"
    paper: ClassVar[str] = (
        "Chen and He, [Exploring Simple Siamese Representation Learning]"
        "(https://arxiv.org/abs/2011.10566), 2020"
    )

    projector_layers: int = 3
    """Layers of the projection MLP (3 for ImageNet, 2 for CIFAR-10)."""
    dim: int = 2048
    """Dimension of the projector's output."""
    projector_dim: int = 0
    """Width of the projector's hidden layers; 0 takes dim, as in the paper."""
    predictor_dim: int = 512
    """Hidden width of the predictor; the paper's bottleneck is a quarter of dim."""
    predictor_lr: Literal["constant", "cosine"] = "constant"
    """Predictor's rate: constant (68.1 in the paper) or decaying with the rest (67.7)."""
    stop_gradient: bool = True
    (
        "Treat the other view's projection as a constant. "
        "Without it training collapses (the paper's Fig. 2)."
    )

    def __post_init__(self) -> None:
        for name in ("dim", "predictor_dim", "projector_layers"):
            value = getattr(self, name)
            require(value >= 1, f"{name.replace('_', '-')} must be at least 1, not {value}")
        require(self.projector_dim >= 0, f"projector-dim must be 0 or more: {self.projector_dim}")
        require(
            self.predictor_lr in ("constant", "cosine"),
            f"predictor-lr must be constant or cosine, not {self.predictor_lr!r}",
        )

    def described(self) -> dict[str, str]:
        """Return its settings for people, by what they are of."""
        return {
            "projector": f"{self.projector_layers} layers, {self.projector_dim or self.dim} wide, "
            f"to {self.dim}",
            "predictor": f"{self.dim}-{self.predictor_dim}-{self.dim}, "
            f"{self.predictor_lr} learning rate",
            "stop-gradient": "yes" if self.stop_gradient else "no",
        }

    def check_views(self, views: int) -> None:
        """Refuse all but two: the loss compares a pair."""
        require(views == 2, f"simsiam compares two views of each image, not {views}")


METHOD_CONFIGS: dict[str, type[MethodConfig]] = {SimSiamConfig.name: SimSiamConfig}
"""The settings of each method by its name; ``fastsiam.methods.METHODS`` has what they build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(BackboneConfig):
    """Model: a backbone, and the method that trains it."""

    method: MethodConfig = SimSiamConfig()
    """What is trained on the backbone."""
