"""Plain files: the backbone's weights, the code that rebuilds it, and what is known of it.

Every network has one. Beside its ``state_dict`` a file holds the ``snippet`` and, as ``fastsiam``,
the facts that make it a network again here. A ``.safetensors`` file has both as metadata.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import fastsiam
from fastsiam.config import BackboneConfig

from .pretrained import Input, Pretrained


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
    model, seen = pretrained.model, pretrained.input
    about = {
        "version": fastsiam.__version__,
        "backbone": {"backbone": model.backbone, "stem": model.stem, "width": model.width},
        "epoch": pretrained.epoch,
        "input": seen and asdict(seen),
    }
    return {"state_dict": dict(weights), "snippet": snippet, "fastsiam": about}


def facts(content: Mapping[str, Any]) -> tuple[BackboneConfig, float | None, Input | None]:
    """Return a file's backbone, its epochs and how it takes images, as far as they are known.

    Raises:
        KeyError, TypeError, ValueError, OverflowError: the content is not that of a plain file.
    """
    about = content["fastsiam"]
    backbone, epoch, seen = about["backbone"], about["epoch"], about["input"]
    kinds = {"backbone": str, "stem": str, "width": int}
    if {name: type(value) for name, value in backbone.items()} != kinds:
        raise ValueError(f"no backbone: {backbone}")
    if epoch is not None and not (isinstance(epoch, float) and 0 <= epoch < math.inf):
        raise ValueError(f"no number of epochs: {epoch}")
    return BackboneConfig(**backbone), epoch, None if seen is None else _input(**seen)


def _input(*, crop: Any, resize: Any, mean: Any, std: Any) -> Input:
    (r, g, b), (r_std, g_std, b_std) = map(float, mean), map(float, std)
    seen = Input(crop=int(crop), resize=int(resize), mean=(r, g, b), std=(r_std, g_std, b_std))
    finite = all(map(math.isfinite, (*seen.mean, *seen.std)))
    if not finite or min(seen.crop, seen.resize, *seen.std) <= 0:
        raise ValueError(f"no way to take images: {seen}")
    return seen
