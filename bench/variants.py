"""Ways to take the same training step, for ``fastsiam bench step``: names and settings, no torch.

Each is said by the settings in which it differs from the default, which is what a long run does:
compiled, in bfloat16 where there is such a thing, channels last. The plain ones have none of the
levers, or one; the authors' is their code's way, not ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to take a training step."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of ``NumericsConfig`` and ``StepConfig``."""
    only_on: Literal["", "cuda"] = ""
    """The kind of device that it makes a difference on; empty is any."""
    several_ranks: bool = False
    """It takes several processes, and is measured beside the same without shared statistics."""


_PLAIN: dict[str, Any] = {
    "precision": "fp32",
    "channels_last": False,
    "compile": "off",
}

AUTHORS = "authors"
"""The step of the paper's authors, which others are compared with."""

VARIANTS: dict[str, Variant] = {
    "default": Variant(),
    "eager": Variant(settings={"compile": "off"}),
    "fp32": Variant(settings={"precision": "fp32"}),
    "fp16": Variant(settings={"precision": "fp16"}, only_on="cuda"),
    "nchw": Variant(settings={"channels_last": False}),
    "recompute": Variant(settings={"activation_memory": 0.5}),
    "cuda-graphs": Variant(settings={"cuda_graphs": True}, only_on="cuda"),
    "plain": Variant(settings=_PLAIN),
    "plain-bf16": Variant(settings=_PLAIN | {"precision": "bf16"}),
    "plain-channels-last": Variant(settings=_PLAIN | {"channels_last": True}),
    "plain-compiled": Variant(settings=_PLAIN | {"compile": "on"}),
    "syncbn": Variant(settings={"sync_bn": True}, several_ranks=True),
    AUTHORS: Variant(settings=_PLAIN),
}
"""All of them, by name."""
