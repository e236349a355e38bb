"""The paper's experiments: variants of a recipe, and studies whose rows are variants.

``catalogue.toml`` lists them; this module defines their types and reads the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from fastsiam.config import TrainConfig

ClaimKind = Literal[
    "collapses", "stands", "degenerates", "works", "fails", "better", "worse", "alike", "unstable"
]
Changes = Mapping[str, Any]
"""Changed settings by their flags' names: a value, or a function of the recipe's settings."""
_METHODS = ("simclr", "mocov2", "byol", "swav", "simsiam")
"""The methods of Table 4."""
Figure = str | float | None
"""A result of the paper in percent, or its description; None if there is neither."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A change of a method's base recipe, with a name for the folders of its runs."""

    name: str
    changes: Changes = field(default_factory=dict)
    method: str = ""
    """Method whose base recipe is changed; empty for the scale's own method."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A qualitative claim of the paper about a row; ``verdicts`` explains how it is judged."""

    kind: ClaimKind
    than: str = ""
    """Name of the variant that the row is compared with; empty for claims without one."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a study's table: a variant and the paper's results for it."""

    variant: Variant
    title: str
    paper: Figure
    claims: tuple[Claim, ...]
    original: Figure = None
    """The result in the method's original paper."""


@dataclass(frozen=True, slots=True)
class Study:
    """A table or figure of the paper."""

    name: str
    title: str
    source: str
    """Table or figure number in the paper."""
    rows: tuple[Row, ...]
    reference: str = "baseline"
    """Name of the row whose gain over an untrained network the other rows are compared with."""
    figure: str = "linear top-1 of ResNet-50 on ImageNet after 100 epochs"
    """Description of the paper's numbers."""


def with_changes(recipe: TrainConfig, changes: Changes) -> TrainConfig:
    """Return a recipe with changed settings."""
    flags = recipe.to_flags()
    own = {k: value(flags) if callable(value) else value for k, value in changes.items()}
    return TrainConfig.from_flags(flags | own)


def _variant(name: str, changes: Changes) -> Variant:
    own = {flag: _multiple(flag, value) for flag, value in changes.items() if flag != "method"}
    return Variant(name, own, changes.get("method", ""))


def _multiple(flag: str, value: Any) -> Any:
    """Parse a value of the catalogue; ``1/4 x dim`` becomes a function of a recipe's settings."""
    factor, found, of = str(value).partition(" x")
    if not found:
        return value
    share = Fraction(factor)

    def multiple(flags: Mapping[str, Any]) -> Any:
        base = flags[of.strip() or flag]
        product = base * share.numerator / share.denominator
        return product if isinstance(flags[flag], float) else round(product)

    return multiple


def _longer(method: str, times: int) -> Variant:
    """Return the variant that trains a method ``times`` as long as its recipe."""
    if times == 1:
        return Variant(method, method=method)
    others = _byol_times(times) if method == "byol" else {}
    return Variant(
        f"{method}-{times}x", {"epochs": _multiple("epochs", f"{times} x")} | others, method
    )


def _byol_times(times: int) -> dict[str, Callable[[Mapping[str, Any]], float]]:
    """Return the settings of BYOL that depend on the length of training.

    The paper's runs of 200 and 400 epochs, and of 800, follow BYOL's recipes for 300 and 1000: a
    rate of 0.3 and 0.2 to 0.45 for 100 epochs, decay of 1e-6 and 1.5e-6 to 1e-6, momentum of 0.99
    and 0.996 to 0.99 (section 6.1).
    """
    rate, decay, left = (4 / 9, 1.5, 0.4) if times >= 8 else (2 / 3, 1.0, 1.0)
    return {
        "lr": lambda flags: round(flags["lr"] * rate, 6),
        "weight_decay": lambda flags: float(f"{flags['weight_decay'] * decay:.6g}"),
        "encoder_momentum": lambda flags: round(1 - (1 - flags["encoder_momentum"]) * left, 6),
    }


def _row(variant: str, title: str, paper: Figure, claims: str, original: Figure = None) -> Row:
    own = tuple(claim for text in claims.split(", ") if text for claim in _claims(text))
    return Row(VARIANTS[variant], title, None if paper == "" else paper, own, original)


def _claims(text: str) -> list[Claim]:
    """Parse ``works``, ``alike to baseline``, or two claims: ``better than simclr swav``."""
    kind, _, names = text.replace(" to ", " than ").partition(" than ")
    return [Claim(kind, name) for name in names.split() or [""]]  # type: ignore[arg-type]


def _study(name: str, *, rows: Sequence[Any], **others: str) -> Study:
    return Study(name=name, rows=tuple(_row(*row) for row in rows), **others)


_DATA = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text())

VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        *(_variant(name, changes) for name, changes in _DATA["variants"].items()),
        *(_longer(method, times) for method in _METHODS for times in (1, 2, 3, 4, 8)),
    )
}
"""Every variant by its name."""

STUDIES: dict[str, Study] = {
    name: _study(name, **study) for name, study in _DATA["studies"].items()
}
"""Every study by its name, in the paper's order."""
