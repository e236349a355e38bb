"""Two test tiers: ``make test`` tests every property once, ``make test-all`` in every case.

A test or case marked ``slow`` belongs to the second tier. One marked ``alone`` measures time or
memory, so it runs when no other test does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def rest_slow(cases: Sequence[Any], *, fast: int = 1) -> list[Any]:
    """Mark all parametrized cases after the first ``fast`` as slow.

    A case is a value, a tuple of values for several arguments, or a ``pytest.param``.
    """
    return [*cases[:fast], *map(slow, cases[fast:])]


def slow(case: Any) -> Any:
    """Mark a parametrized case as slow."""
    if not hasattr(case, "marks"):
        case = pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)
    return case._replace(marks=(*case.marks, pytest.mark.slow))
