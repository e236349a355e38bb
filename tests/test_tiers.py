"""docs/develop/testing.md names each test whose cases are all slow, with its stand-in."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.conftest import ROOT


def find_fully_slow_tests() -> Iterator[str]:
    """Yield the names of tests without a case in ``make test``."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            marks = map(ast.unparse, getattr(node, "decorator_list", []))
            if isinstance(node, ast.FunctionDef) and "pytest.mark.slow" in marks:
                yield f"{path.relative_to(ROOT / 'tests')}: {node.name}"


def test_docs_list_every_fully_slow_test() -> None:
    text = (ROOT / "docs" / "develop" / "testing.md").read_text()
    cells = re.findall(r"^\| (`.+?`) \| .+? \|$", text, flags=re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(.+?)`", cell)}
    assert named == set(find_fully_slow_tests())
