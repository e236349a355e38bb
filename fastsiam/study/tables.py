"""What a study is: rows with the paper's figures, and what it claims of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastsiam.study.variants import Variant

ClaimKind = Literal[
    "collapses",
    "stands",
    "works",
    "fails",
    "better",
    "worse",
    "alike",
    "no better",
    "unstable",
    "diverges",
]


@dataclass(frozen=True, slots=True)
class Claim:
    """What the paper says of a row, apart from its figure; ``verdicts`` says how it is judged."""

    kind: ClaimKind
    than: str = ""
    """Name of the variant that a row is better or worse than, no better than, or alike to."""

    def __str__(self) -> str:
        """Say it for people, without the name of the other row."""
        return {"stands": "does not collapse"}.get(self.kind, self.kind)


@dataclass(frozen=True, slots=True)
class Row:
    """A variant's place in a study's table."""

    variant: Variant
    paper: float | str | None
    """The paper's accuracy in percent, or its word for it; None where it gives no figure."""
    claims: tuple[Claim, ...] = ()
    original: float | str | None = None
    """The figure of the method's own paper in percent, where the table has it beside."""


@dataclass(frozen=True, slots=True)
class Study:
    """A table or figure of the paper."""

    name: str
    title: str
    source: str
    """Where the paper has it."""
    rows: tuple[Row, ...]
    reference: str = "baseline"
    """Name of the row whose gain over an untrained network the others are judged by."""
    figure: str = "linear top-1 of ResNet-50 on ImageNet after 100 epochs"
    """What the paper's figures are."""

    def row(self, variant: str) -> Row:
        """Return the row of a variant, by its name."""
        return next(row for row in self.rows if row.variant.name == variant)


GOOD = (Claim("works"), Claim("stands"))
COLLAPSED = (Claim("collapses"), Claim("fails"))
"""The claims on a row whose accuracy is that of chance, by its collapse."""


def worse_than(variant: str) -> tuple[Claim, ...]:
    """Return the claims on a row that works, though less well than another."""
    return (*GOOD, Claim("worse", variant))
