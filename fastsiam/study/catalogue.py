"""The paper's experiments: variants of a recipe, and studies whose rows are variants.

``catalogue.toml`` lists them; this module defines their types and reads the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ClaimKind = Literal[
    "collapses", "stands", "degenerates", "works", "fails", "better", "worse", "alike",
    "comparable", "unstable",
]  # fmt: skip
ORIGINAL = "original"
"""``Claim.than`` of a claim that compares a row with ``Row.original``."""
Changes = Mapping[str, Any]
"""Changed settings by flag name: a value, or a multiple of the recipe's value such as "2 x"."""
Figure = str | float | None
"""A published result: accuracy in percent, or a description such as "unstable"; None if unknown."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A qualitative claim of the paper about a row; ``verdicts`` judges it."""

    kind: ClaimKind
    than: str = ""
    """Variant that the row is compared with, or ``ORIGINAL``; empty for claims without one."""


@dataclass(frozen=True)
class Row:
    """A row of a study's table: a variant and the paper's results for it."""

    variant: str
    """Key in ``VARIANTS``."""
    title: str
    paper: Figure
    claims: tuple[Claim, ...]
    original: Figure = None
    """The result in the paper that introduced the method."""


@dataclass(frozen=True, kw_only=True)
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


def _row(variant: str, title: str, paper: Figure, claims: str, original: Figure = None) -> Row:
    """Build a row; ``claims`` are text: ``works, better than simclr swav`` are three claims."""
    parsed_claims: list[Claim] = []
    for text in filter(None, claims.split(", ")):
        kind, _, names = text.replace(" to ", " than ").partition(" than ")
        parsed_claims += (Claim(kind, name) for name in names.split() or [""])  # type: ignore[arg-type]
    return Row(variant, title, paper or None, tuple(parsed_claims), original)


_DATA = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text())

VARIANTS: dict[str, Changes] = _DATA["variants"]
"""Changes by variant name, applied to the scale's recipe or, if they name a method, to its own."""

STUDIES: dict[str, Study] = {
    name: Study(name=name, **study | {"rows": tuple(_row(*row) for row in study["rows"])})
    for name, study in _DATA["studies"].items()
}
"""Every study by name, in the paper's order."""
