"""Commands in messages can be pasted into a shell: their paths are quoted."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from fastsiam.files import quote
from tests.modules import MODULES, parse_module

_BEFORE_PATH = re.compile(
    r"(--(cache|config|data|images|init|json|list|out|pretrained|resume|run|source)[ =]"
    r"|\bfastsiam (convert verify|eval [a-z]+|export|features|neighbours|report) |\brm )$"
)
"""The end of a string in front of a path in a command."""
_NOT_PATHS = {"error"}
"""Other values that may follow such a string: an error message about the option."""


def find_unquoted_paths(tree: ast.Module) -> Iterator[str]:
    """Yield the unquoted paths in a module's commands."""
    known = set(_NOT_PATHS)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and "quote(" in ast.unparse(node.value):
            names = [name for target in node.targets for name in ast.walk(target)]
            known |= {name.id for name in names if isinstance(name, ast.Name)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr):
            continue
        for before, value in zip(node.values, node.values[1:], strict=False):
            if isinstance(before, ast.Constant) and isinstance(value, ast.FormattedValue):
                text = ast.unparse(value.value)
                safe = text in known or text.startswith("quote(")
                if _BEFORE_PATH.search(str(before.value)) and not safe:
                    yield f"line {node.lineno}: {str(before.value)[-30:]}{{{text}}}"


def test_paths_in_commands_are_quoted() -> None:
    errors = [
        f"{path}, {one}"
        for path in MODULES.values()
        for one in find_unquoted_paths(parse_module(path))
    ]
    assert not errors, "\n".join(["not quoted (fastsiam.files.quote):", *errors])


def test_quoting_and_detection_of_unquoted_paths() -> None:
    assert quote("/data/a") == "/data/a" and quote("/my data/it's") == "'/my data/it'\"'\"'s'"
    source = 'x = f"convert it: fastsiam convert folder " f"--source {root}"'
    assert len(list(find_unquoted_paths(ast.parse(source)))) == 1
