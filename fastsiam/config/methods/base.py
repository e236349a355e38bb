"""Base classes of the settings of methods, and what their recipes share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fastsiam.config.setting import Config, require, setting

Changes = dict[str, Any]
"""Settings that differ from the defaults, by name."""

# kNN reads the entire training set, which takes a considerable part of an epoch.
_SELDOM: Changes = {"knn_every": 10}
IMAGENET = _SELDOM | {"knn_first": False}
CIFAR10: Changes = _SELDOM | {
    "crop": 32, "blur_p": 0.0, "mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616),
    "backbone": "resnet18", "stem": "cifar", "projector_layers": 2,
    "epochs": 800, "lr": 0.03, "weight_decay": 5e-4,
}  # fmt: skip
LARGE_BATCH = IMAGENET | {
    "batch": 4096, "optimizer": "lars", "weight_decay": 1e-6, "warmup_epochs": 10.0,
    "scale_min": 0.08,
}  # fmt: skip
"""Settings that SimCLR, BYOL and SwAV share on ImageNet."""
STRONG_JITTER: Changes = {"brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.2}
"""SimCLR's colour jitter at strength 1, also used by SwAV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodConfig(Config):
    """Base class of the settings of a method. Each method has a subclass."""

    name: ClassVar[str]
    """Name for ``--method``."""
    title: ClassVar[str]
    """Name in the paper."""
    paper: ClassVar[str]
    """Citation of the paper, in Markdown, for model cards."""
    builder: ClassVar[str]
    """``module:name`` of its builder, called with these settings, a backbone and ``images``."""
    recipes: ClassVar[dict[str, Changes]] = {}
    """Its recipes by name: the settings that each changes from the defaults, its method included.

    The defaults are SimSiam's for ImageNet. Rates are for a batch of 256. A comment names the
    source of the numbers, or ``docs/methods`` does.
    """

    @property
    def centred(self) -> bool:
        """Whether BN centres the projector's output; its std is then near 1 unless it collapses."""
        return False

    def check_views(self, views: int) -> None:
        """Raise ``ValueError`` if the method does not support this number of views."""
        require(views == 2, f"{self.name} compares two views of each image, not {views}")

    def batch_warnings(self, *, images: int, batch: int, groups: int) -> list[str]:
        """Return warnings about settings that work but are probably unintended, one line each.

        Args:
            images: number of images in the data set.
            batch: number of images that pass through the layers together, over all ranks.
            groups: number of groups of them with separate BN statistics; 0 without BN.
        """
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedConfig(MethodConfig):
    """Projector: the head whose outputs the method compares."""

    projector_layers: int = setting(3, "Layers of the projection MLP.", at_least=1, option=False)
    dim: int = setting(128, "Output dimension of the projector.", at_least=1)
    projector_dim: int = setting(
        2048, "Width of the projector's hidden layers.", at_least=1, option=False
    )

    @property
    def hidden_widths(self) -> list[int]:
        """Widths of the projector's hidden layers."""
        return [self.projector_dim] * (self.projector_layers - 1)
