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


def rows() -> Iterator[tuple[str, str]]:
    """Yield the rows of the table: names of slow tests, and their stand-ins."""
    text = (ROOT / "docs" / "develop" / "testing.md").read_text()
    yield from re.findall(r"^\| (`.+?`) \| (.+?) \|$", text, flags=re.MULTILINE)


def test_docs_list_every_fully_slow_test() -> None:
    named = {name for slow, _ in rows() for name in re.findall(r"`(.+?)`", slow)}
    assert named == set(find_fully_slow_tests())
