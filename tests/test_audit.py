"""What is made of pip-audit's answers: found, none, not asked."""

from __future__ import annotations

import json
from typing import Any

from tests.audit import LOCK, verdict


def report(*vulnerabilities: dict[str, Any]) -> str:
    known = {"name": "left-pad", "version": "1.0", "vulns": list(vulnerabilities)}
    skipped = {"name": "other", "skip_reason": "not on PyPI"}
    return json.dumps({"dependencies": [known, skipped], "fixes": []})


def test_a_vulnerability_is_an_error_that_says_where_it_is_mended() -> None:
    found = {"id": "PYSEC-1", "fix_versions": ["1.1"], "aliases": [], "description": "bad"}
    assert verdict(report(found), "") == (1, "left-pad 1.0: PYSEC-1, mended in 1.1")
    code, text = verdict(report(found, found | {"fix_versions": []}), "")
    assert code == 1 and text.splitlines()[1].endswith("mended in no version yet")


def test_what_was_not_asked_is_not_taken_for_good() -> None:
    assert verdict(report(), "") == (0, "no known vulnerability in 1 of 2 packages")
    nothing = json.dumps({"dependencies": [{"name": "other", "skip_reason": "no"}]})
    for printed, complaint in ((nothing, ""), ("", "Traceback\nConnectionError: no way\n")):
        code, text = verdict(printed, complaint)
        assert code == 0 and text.startswith("vulnerabilities are not known: PyPI")
    assert "no way" in verdict("", "ConnectionError: no way\n")[1]


def test_the_versions_are_those_of_the_lock() -> None:
    pinned = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    assert all("==" in line for line in pinned) and any(
        line.startswith("torch==") for line in pinned
    )
