"""Settings of every method, and of those with a projection head."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from fastsiam.config.setting import Config, require, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodConfig(Config):
    """Settings of a method: what is trained on a backbone. Each method has a class of its own."""

    name: ClassVar[str]
    """What ``--method`` calls it."""
    title: ClassVar[str]
    """What its paper calls it."""
    paper: ClassVar[str]
    """Its paper, for model cards, in Markdown."""
    builder: ClassVar[str]
    """What builds it, as ``module:name``; called with these settings, a backbone and ``images``."""

    def described(self) -> dict[str, str]:
        """Return its settings as text, by name."""
        return {f.name.replace("_", " "): str(getattr(self, f.name)) for f in fields(self)}

    @property
    def centred(self) -> bool:
        """Whether BN centres the projector's output, so that its std is near 1 unless it fails."""
        return False

    def check_views(self, views: int) -> None:
        """Raise ``ValueError`` if the method does not take so many views: most compare a pair."""
        require(views == 2, f"{self.name} compares two views of each image, not {views}")

    def doubts(self, *, images: int, batch: int, groups: int) -> list[str]:
        """Return warnings of a run that works, but hardly as it is meant to; a line each.

        Args:
            images: of the data set.
            batch: images that go through the layers together, of all ranks.
            groups: that BN cuts them into, each with statistics of its own.
        """
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedConfig(MethodConfig):
    """Projector: the head whose outputs a method compares."""

    projector_layers: int = setting(3, "Layers of the projection MLP.", at_least=1)
    dim: int = setting(128, "Output dimension of the projector.", at_least=1)
    projector_dim: int = setting(2048, "Width of the projector's hidden layers.", at_least=1)

    @property
    def hidden_widths(self) -> list[int]:
        """Widths of the projector's hidden layers."""
        return [self.projector_dim] * (self.projector_layers - 1)
