"""The audit fails for known vulnerabilities, and does not take a missing answer for a good one."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.audit import verdict

SKIPPED = {"name": "other", "skip_reason": "not on PyPI"}


def report(*vulnerabilities: dict[str, Any]) -> str:
    package = {"name": "left-pad", "version": "1.0", "vulns": list(vulnerabilities)}
    return json.dumps({"dependencies": [package, SKIPPED], "fixes": []})


@pytest.mark.parametrize(
    ("printed", "errors", "code", "text"),
    [
        (report({"id": "A", "fix_versions": ["1.1"]}), "", 1, "left-pad 1.0: A, fixed in 1.1"),
        (report({"id": "A", "fix_versions": []}), "", 1, "fixed in no version yet"),
        (report(), "", 0, "no known vulnerability in 1 of 2 packages"),
        (json.dumps({"dependencies": [SKIPPED]}), "", 0, "not known: PyPI knows none"),
        ("", "Traceback\nConnectionError: no route\n", 0, "not known: PyPI .* no route"),
        ("", "", 0, "not known: PyPI .*no answer"),
    ],
)
def test_verdict(printed: str, errors: str, code: int, text: str) -> None:
    found = verdict(printed, errors)
    assert found[0] == code and re.search(text, found[1])
