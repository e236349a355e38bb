"""The program's modules, their files and their syntax trees."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.conftest import ROOT


def _modules() -> dict[str, Path]:
    """Return the files of all modules by their full names."""
    modules = {}
    for folder in ("fastsiam", "pipelines", "bench"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[:2] in {("fastsiam", "pipelines"), ("fastsiam", "bench")}:
                continue  # links to the other two folders
            name = ".".join(parts if folder == "fastsiam" else ("fastsiam", *parts))
            modules[name.removesuffix(".__init__")] = path
    return modules


MODULES = _modules()


@cache
def parse_module(path: Path) -> ast.Module:
    return ast.parse(path.read_text())
