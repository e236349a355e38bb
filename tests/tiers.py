"""Two tiers: ``make test`` proves every property once; ``make test-all`` runs every case of it.

A test or a single case marked ``slow`` belongs to the second tier. One marked ``alone`` measures
time or memory, and runs when nothing else does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def rest_slow(cases: Sequence[Any], *, fast: int = 1) -> list[Any]:
    """Return the cases of a matrix, all but the first ``fast`` of them in the slow tier."""
    return [case if i < fast else _slow(case) for i, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    parameter = case if hasattr(case, "marks") else pytest.param(case)
    return parameter._replace(marks=(*parameter.marks, pytest.mark.slow))
