"""The paper's experiments: variants of a recipe, and studies whose rows are variants.

``catalogue.toml`` lists them; this module defines their types and reads the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from fastsiam.config import TrainConfig
from fastsiam.config.files import Settings, merge

ClaimKind = Literal[
    "collapses", "stands", "degenerates", "works", "fails", "better", "worse", "alike", "unstable"
]
Changes = Mapping[str, Any]
"""Changed settings by flag name: a value, or a multiple of the recipe's value such as "2 x"."""
Figure = str | float | None
"""A published result: accuracy in percent, or a description such as "unstable"; None if unknown."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A qualitative claim of the paper about a row; ``verdicts`` judges it."""

    kind: ClaimKind
    than: str = ""
    """Variant that the row is compared with; empty for claims that compare no rows."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a study's table: a variant and the paper's results for it."""

    variant: str
    """Key in ``VARIANTS``."""
    title: str
    paper: Figure
    claims: tuple[Claim, ...]
    original: Figure = None
    """The result in the paper that introduced the method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A table or figure of the paper."""

    name: str
    title: str
    source: str
    """Table, figure or section of the paper."""
    rows: tuple[Row, ...]
    reference: str = "baseline"
    """Variant of the reference row, which the claims "fails" and "unstable" compare with."""
    figure: str = "linear top-1 of ResNet-50 on ImageNet after 100 epochs"
    """What the paper's numbers measure."""
    panels: Sequence[str] = ("loss", "kNN")
    """Quantities that the picture plots over epochs: any of loss, std, rank and kNN."""


def with_changes(recipe: TrainConfig, changes: Changes) -> TrainConfig:
    """Apply changes to a recipe. A changed method starts from that method's own defaults."""
    flags = recipe.to_flags()
    changed_flags = {flag: _value(flag, value, flags) for flag, value in changes.items()}
    return TrainConfig.from_flags(merge(Settings(flags=flags), Settings(flags=changed_flags)).flags)


def _value(flag: str, value: Any, flags: Mapping[str, Any]) -> Any:
    """Resolve a value: ``1/4 x dim`` is a quarter of the recipe's dim.

    A multiple of ``encoder_momentum`` scales its distance from 1.
    """
    factor, separator, base_flag = str(value).partition(" x")
    if not separator:
        return value
    base, share = flags[base_flag.strip() or flag], Fraction(factor)
    if flag == "encoder_momentum":
        return round(1 - (1 - base) * float(share), 6)
    product = base * share.numerator / share.denominator
    if isinstance(flags[flag], float):
        return round(product, 6 if flag == "lr" else 12)
    return round(product)


def _row(variant: str, title: str, paper: Figure, claims: str, original: Figure = None) -> Row:
    row_claims = tuple(claim for text in claims.split(", ") if text for claim in _claims(text))
    return Row(variant, title, None if paper == "" else paper, row_claims, original)


def _claims(text: str) -> list[Claim]:
    """Parse claims: ``works``, ``alike to baseline``, or ``better than simclr swav`` (two)."""
    kind, _, names = text.replace(" to ", " than ").partition(" than ")
    return [Claim(kind, name) for name in names.split() or [""]]  # type: ignore[arg-type]


_DATA = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text())

VARIANTS: dict[str, Changes] = _DATA["variants"]
"""Changes by variant name, applied to the scale's recipe or, if they name a method, to its own."""

STUDIES: dict[str, Study] = {
    name: Study(name=name, **study | {"rows": tuple(_row(*row) for row in study["rows"])})
    for name, study in _DATA["studies"].items()
}
"""Every study by name, in the paper's order."""
