"""Two tiers: ``make test`` proves every property once; ``make test-all`` runs every case of it.

A test or a single case marked ``slow`` belongs to the second tier. One marked ``alone`` measures
time or memory, and runs when nothing else does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def rest_slow(cases: Sequence[Any], *, fast: int = 1) -> list[Any]:
    """Return the cases of a matrix, all but the first ``fast`` of them in the slow tier.

    A case is a value, a tuple of values for several arguments, or a ``pytest.param``.
    """
    return [*cases[:fast], *map(slow, cases[fast:])]


def slow(case: Any) -> Any:
    """Return a case of a matrix, in the slow tier."""
    if not hasattr(case, "marks"):
        case = pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)
    return case._replace(marks=(*case.marks, pytest.mark.slow))
