"""Rules for imports between rooms, and the claims of docs/develop/architecture.md about them.

A room is a folder with its subfolders. The small modules next to the folders are the room "base",
except for those in ``ROOMS``.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

from tests.conftest import ROOT
from tests.modules import MODULES, parse_module

PAGE = ROOT / "docs/develop/architecture.md"

ROOMS = {
    "__main__": "cli",
    "demo": "demo",
    "collectives": "collectives",
    "environment": "kernels",
    "bad_image_list": "pipelines",
}
"""Rooms of modules next to the folders, other than "base"."""

PIPELINE_IMPORTERS = {"cli", "bench", "demo", "evaluate", "pipelines"}
"""Rooms that may import the pipelines."""
PIPELINE_IMPORTER_MODULES = {
    "train": {"command", "image_list", "run_images", "knn_monitor", "resolve", "verify"},
    "report": {"view_sheet"},
}
"""Modules that may import the pipelines, by room that otherwise may not: the training loop takes
its loader as an argument."""
PIPELINE_IMPORTS = {"pipelines", "views", "config", "kernels", "base"}
"""Rooms that the pipelines may import, so that they work in any training loop."""
TORCH_FREE = {"cli", "study", "config", "base"}
"""Rooms that import torch only inside functions, to keep ``--help`` fast."""


def room_of(module: str) -> str:
    """Return the room of a module."""
    _, first, *_ = *module.split("."), ""
    is_folder = MODULES.get(f"fastsiam.{first}", Path()).name == "__init__.py"
    return first if is_folder else ROOMS.get(first, "base")


def nodes(node: ast.AST, *, types: bool) -> Iterator[ast.AST]:
    """Yield a node and all nodes below it, without ``if TYPE_CHECKING`` unless ``types``."""
    if types or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from nodes(child, types=types)


@cache
def imported(module: str, *, types: bool = True) -> set[str]:
    """Return the modules of fastsiam that a module imports, at the top or inside functions.

    Args:
        types: whether imports for type checkers count.
    """
    path, names = MODULES[module], set[str]()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in nodes(parse_module(path), types=types):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            targets = [f"{source}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            while target and target not in MODULES:
                target = target.rpartition(".")[0]
            names.add(target)
    return names - {"", module}


def imported_rooms() -> dict[str, set[str]]:
    """Return the other rooms that each room imports."""
    rooms: dict[str, set[str]] = {room_of(module): set() for module in MODULES}
    for module in MODULES:
        rooms[room_of(module)] |= {room_of(one) for one in imported(module)} - {room_of(module)}
    return rooms


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Imports inside functions count, too."""
    TopologicalSorter({module: imported(module, types=False) for module in MODULES}).prepare()


def test_floors_are_those_of_the_page() -> None:
    """A room imports only rooms on lower floors.

    The picture leaves out an arrow to a room that another arrow's room imports, too.
    """
    rooms, lines, floor = imported_rooms(), list[str](), 0
    below: dict[str, set[str]] = {}
    """All rooms below each room."""
    order = TopologicalSorter(rooms)
    order.prepare()
    while ready := sorted(order.get_ready()):
        floor += 1
        for room in reversed(ready):
            below[room] = rooms[room].union(*(below[one] for one in rooms[room]))
            direct = rooms[room].difference(*(below[one] for one in rooms[room]))
            arrow = f" -> {', '.join(sorted(direct))}" if direct else ""
            lines.insert(0, f"{floor:2}  {room:11}{arrow}".rstrip())
        order.done(*ready)
    page = PAGE.read_text()
    assert re.findall(r"^ ?\d+  \w.*$", page, re.MULTILINE) == lines, "\n".join(lines)
    assert f"The {len(rooms)} rooms are on {floor} floors" in page


def test_only_some_modules_import_the_pipelines_and_bench() -> None:
    """Only the command line imports bench."""
    for module, path in MODULES.items():
        room, names = room_of(module), imported(module)
        if room not in PIPELINE_IMPORTERS and path.stem not in PIPELINE_IMPORTER_MODULES.get(
            room, ()
        ):
            assert not [name for name in names if name.startswith("fastsiam.pipelines")], path
        rooms = {room_of(name) for name in names}
        assert room != "pipelines" or rooms <= PIPELINE_IMPORTS, path
        assert room in {"cli", "bench"} or "bench" not in rooms, path


def test_relative_imports_stay_in_top_level_folder() -> None:
    for path in MODULES.values():
        inner = len(path.relative_to(ROOT).parts) - (2 if ROOT / "fastsiam" in path.parents else 1)
        for node in ast.walk(parse_module(path)):
            if isinstance(node, ast.ImportFrom):
                assert node.level <= inner, f"{path}:{node.lineno}"


def test_modules_share_a_name_only_behind_one_interface() -> None:
    """Files of cli, config and bench's cases are named after commands, sections and methods."""
    folders = ("fastsiam.cli", "fastsiam.config", "fastsiam.bench.cases")
    names = Counter(x.stem for module, x in MODULES.items() if not module.startswith(folders))
    shared = {name for name, count in names.items() if count > 1}
    assert shared <= {"__init__", "base", "command"}


def test_functions_named_on_the_page_exist() -> None:
    """The page names them as "`file`: `function`, `Class.method`"."""
    steps = re.findall(r"`([\w/]+\.(?:py|cpp))`: (`[\w.]+`(?:, `[\w.]+`)*)", PAGE.read_text())
    assert len(steps) > 40
    for file, functions in steps:
        text = (ROOT / file).read_text()
        for name in re.findall(r"[\w.]+", functions):
            patterns = [rf"\b(def|class|\w+_t|bool) {part}\b" for part in name.split(".")]
            assert all(re.search(pattern, text) for pattern in patterns), f"{file}: {name}"


def test_torch_dali_and_ffcv_imports_are_confined() -> None:
    """Only back-end modules import ``ffcv`` and ``nvidia.dali`` at the top level."""
    for module, path in MODULES.items():
        room, named = room_of(module), set[str]()
        for node in parse_module(path).body:
            if isinstance(node, ast.Import):
                named |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                named.add((node.module or "").split(".")[0])
        if named & {"nvidia", "ffcv"}:
            top = path.relative_to(ROOT / "pipelines").parts[0] if room == "pipelines" else ""
            assert top.startswith(("dali", "ffcv")), path
        assert room not in TORCH_FREE or not named & {"torch", "torchvision", "matplotlib"}, path


def test_exported_names_exist() -> None:
    """ruff does not check ``__all__`` in ``__init__.py``, where names may come from elsewhere."""
    for module, path in MODULES.items():
        if path.name == "__init__.py":
            package = importlib.import_module(module)
            exported = getattr(package, "__all__", ())
            assert [name for name in exported if not hasattr(package, name)] == [], module
