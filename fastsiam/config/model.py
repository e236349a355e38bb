"""Settings of the backbone and of the method that trains it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from .methods import METHOD_CONFIGS, MethodConfig, SimSiamConfig
from .setting import Config, check_name, nearest, require, setting, settings_of

Stem = Literal["imagenet", "cifar", "cifar-pad2", "cifar-no-relu"]

OWN_BACKBONES = ("resnet10", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
"""ResNets with a configurable stem and width; other names are torchvision's or timm's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneConfig(Config):
    """Backbone: the encoder that every method trains (section 3 of the paper)."""

    backbone: str = setting(
        "resnet50",
        "Encoder: resnet10 (one block per stage), resnet18, 34, 50, 101 or 152; another "
        "classification network of torchvision, such as vit_b_16, without its classifier; or "
        "timm/NAME. The paper's recipe is for ResNets and is untested with other networks.",
    )
    stem: Stem = setting(
        "imagenet",
        "First layers of a ResNet. imagenet: 7x7 convolution with stride 2 and max-pooling. "
        "cifar: 3x3 convolution with stride 1, no pooling, for 32-pixel images. cifar-pad2: like "
        "cifar with 2 pixels of padding, as in solo-learn. cifar-no-relu: like cifar without a "
        "ReLU, to continue from weights of lightly's CIFAR networks.",
    )
    width: int = setting(
        64, "Channels of a ResNet's first stage; the standard networks have 64.", at_least=1
    )
    zero_init_residual: bool = setting(
        True,
        "Initialise the last BN scale of each residual block to 0, so that the block starts as "
        "the identity.",
        option=False,
    )

    def check(self) -> None:
        """Raise ``ValueError`` if settings contradict each other."""
        if self.is_own or (self.stem == "imagenet" and self.width == 64):
            return
        hint = nearest(self.backbone, OWN_BACKBONES, alike=0.8)
        require(not hint, f"unknown backbone {self.backbone!r}; {hint}")
        raise ValueError(
            f"stem and width are settings of {', '.join(OWN_BACKBONES)}; with {self.backbone}, "
            "pass --stem imagenet --width 64 if the recipe sets other values",
        )

    @property
    def is_own(self) -> bool:
        """Whether the encoder is one of fastsiam's ResNets, not torchvision's or timm's."""
        return self.backbone in OWN_BACKBONES

    @property
    def smallest_crop(self) -> int:
        """Smallest image side, in pixels, with more than one pixel left in the last stage."""
        if not self.is_own:
            return 1
        # On a CPU, torch's bfloat16 convolution sets no gradient for one pixel at stride 2.
        return 17 if self.stem == "imagenet" else 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(BackboneConfig):
    """Method: how the backbone is trained."""

    method: MethodConfig = setting(SimSiamConfig(), "Method that trains the backbone.", nested=str)

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> Self:
        """Build it from values by name; settings of other methods must be missing or None."""
        method = flags.get("method", SimSiamConfig.name)
        check_name("method", method, METHOD_CONFIGS)
        kind = METHOD_CONFIGS[method]
        all_names = {name for other in METHOD_CONFIGS.values() for name in settings_of(other)}
        for name in all_names - settings_of(kind).keys():
            require(
                flags.get(name) is None, f"{name.replace('_', '-')} is not a setting of {method}"
            )
        backbone_flags = {
            name: flags[name] for name in settings_of(BackboneConfig) if name in flags
        }
        return cls(method=kind.from_flags(flags), **backbone_flags)

    def to_flags(self) -> dict[str, Any]:
        """Return the values of all settings by name, including the method's."""
        return Config.to_flags(self) | {"method": self.method.name} | self.method.to_flags()
