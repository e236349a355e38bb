"""What the settings of every method have."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from fastsiam.config.checks import require
from fastsiam.config.setting import Config


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
        """Return its settings for people, by what they are of."""
        return {f.name.replace("_", " "): in_words(getattr(self, f.name)) for f in fields(self)}

    @property
    def centred(self) -> bool:
        """Whether BN centres the projector's output, so that its std is near 1 unless it fails."""
        return False

    def check_views(self, views: int) -> None:
        """Raise ``ValueError`` if the method cannot be trained on so many views of each image."""

    def doubts(self, *, images: int, batch: int, groups: int) -> list[str]:
        """Return warnings of a run that works, but hardly as it is meant to; a line each.

        Args:
            images: of the data set.
            batch: images that go through the layers together, of all ranks.
            groups: that BN cuts them into, each with statistics of its own.
        """
        return []


def in_words(value: Any) -> str:
    """Return the value of a setting for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def require_pair(config: MethodConfig, views: int) -> None:
    """Raise ``ValueError`` unless there are two views of each image."""
    require(views == 2, f"{config.name} compares two views of each image, not {views}")
