"""Plain files: the backbone's weights, the code that rebuilds it, and what is known of it.

Every network has one. Beside its ``state_dict`` a file holds the ``snippet`` and, as ``fastsiam``,
the ``Facts`` that make it a network again here. A ``.safetensors`` file has both as metadata.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import fastsiam
from fastsiam.config import BackboneConfig

from .pretrained import Input, Pretrained


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a plain file says of its network."""

    backbone: dict[str, Any]
    """Its ``backbone``, ``stem`` and ``width``."""
    epoch: float | None
    """Epochs that it was trained for, if that is known."""
    input: Input | None
    """How it takes images, if that is known."""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Facts:
        """Return the facts of a file's content.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: they are no facts.
        """
        plain = content["fastsiam"]
        backbone, epoch, seen = plain["backbone"], plain["epoch"], plain["input"]
        kinds = {"backbone": str, "stem": str, "width": int}
        if {name: type(value) for name, value in backbone.items()} != kinds:
            raise ValueError(f"no backbone: {backbone}")
        BackboneConfig(**backbone)
        if epoch is not None and not (isinstance(epoch, float) and 0 <= epoch < math.inf):
            raise ValueError(f"no number of epochs: {epoch}")
        return cls(backbone=backbone, epoch=epoch, input=None if seen is None else _input(**seen))


def is_plain(content: Any) -> bool:
    """Tell whether a file's content is that of a plain file."""
    return (
        isinstance(content, dict)
        and isinstance(content.get("fastsiam"), Mapping)
        and isinstance(content.get("state_dict"), Mapping)
    )


def content(pretrained: Pretrained, weights: Mapping[str, Any], snippet: str) -> dict[str, Any]:
    """Return what a plain file holds.

    Args:
        pretrained: the network.
        weights: of its backbone, by its own names.
        snippet: Python that rebuilds it out of the file.
    """
    model = pretrained.model
    facts = Facts(
        backbone={"backbone": model.backbone, "stem": model.stem, "width": model.width},
        epoch=pretrained.epoch,
        input=pretrained.input,
    )
    about = {"version": fastsiam.__version__, **asdict(facts)}
    return {"state_dict": dict(weights), "snippet": snippet, "fastsiam": about}


def _input(*, crop: Any, resize: Any, mean: Any, std: Any) -> Input:
    (r, g, b), (r_std, g_std, b_std) = map(float, mean), map(float, std)
    seen = Input(crop=int(crop), resize=int(resize), mean=(r, g, b), std=(r_std, g_std, b_std))
    finite = all(map(math.isfinite, (*seen.mean, *seen.std)))
    if not finite or min(seen.crop, seen.resize, *seen.std) <= 0:
        raise ValueError(f"no way to take images: {seen}")
    return seen
