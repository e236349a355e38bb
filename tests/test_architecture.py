"""Import rules by folder: a layer imports only the layers below it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOME = {"pipelines": "fastsiam.pipelines", "bench": "fastsiam.bench"}

LAYERS = (
    "__main__", "cli", "bench", "study", "demo", "train", "evaluate", "report", "pipelines",
    "interchange", "methods", "model", "views", "distributed", "run", "bad_image_list", "config",
    "child_process", "environment", "kernels", "console", "files", "signals", "trace",
    "errors", "__init__",
)  # fmt: skip
"""Layers, from top to bottom: folders and top-level modules."""

PIPELINE_IMPORTERS = {"cli", "bench", "demo", "evaluate", "pipelines"}
"""Layers that may import the pipelines."""
PIPELINE_IMPORTER_MODULES = {
    "train": {"command", "image_list", "images", "knn_monitor", "resolve", "verify"},
    "report": {"views"},
}
"""Modules that may import the pipelines, by layer that otherwise may not: the training loop takes
its loader as an argument."""
PIPELINE_IMPORTS = {
    "pipelines", "views", "config", "kernels", "console", "bad_image_list",
    "child_process", "environment", "errors", "files", "signals", "trace", "__init__",
}  # fmt: skip
"""Layers that the pipelines may import, so that they work in any training loop."""
TORCH_FREE = {"__init__", "__main__", "cli", "study", "config", "errors"}
"""Layers that import torch only inside functions, to keep ``--help`` fast."""


def modules() -> Iterator[tuple[str, Path]]:
    """Yield each module's layer and file."""
    for folder in ("fastsiam", "pipelines", "bench"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[:2] not in {("fastsiam", "pipelines"), ("fastsiam", "bench")}:
                yield (parts[0] if parts[0] in HOME else parts[1]), path


@cache
def parse_module(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path, *, top_level: bool = False) -> Iterator[str]:
    """Yield the names that a file imports, except for relative imports."""
    for node in parse_module(path).body if top_level else ast.walk(parse_module(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == "fastsiam":
            yield from (f"fastsiam.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def imported_layers(path: Path) -> set[str]:
    names = [name.split(".") for name in imports(path)]
    folders = {
        parts[1] if len(parts) > 1 else "__init__" for parts in names if parts[0] == "fastsiam"
    }
    return {name if name in LAYERS else "__init__" for name in folders}  # fastsiam.__version__


def test_layers_import_only_lower_layers() -> None:
    """Only the top layers import the pipelines. Only the command line imports bench."""
    assert {layer for layer, _ in modules()} == set(LAYERS)
    for layer, path in modules():
        imported = imported_layers(path)
        for one in imported:
            assert LAYERS.index(layer) <= LAYERS.index(one), f"{path} imports {one}"
        if layer not in PIPELINE_IMPORTERS and path.stem not in PIPELINE_IMPORTER_MODULES.get(
            layer, ()
        ):
            assert "pipelines" not in imported, path
        assert layer != "pipelines" or imported <= PIPELINE_IMPORTS, path
        assert layer in {"cli", "bench"} or "bench" not in imported, path


def test_relative_imports_stay_in_top_level_folder() -> None:
    for _, path in modules():
        inner = len(path.relative_to(ROOT).parts) - (2 if ROOT / "fastsiam" in path.parents else 1)
        for node in ast.walk(parse_module(path)):
            if isinstance(node, ast.ImportFrom):
                assert node.level <= inner, f"{path}:{node.lineno}"


def test_torch_dali_and_ffcv_imports_are_confined() -> None:
    """Only back-end modules import ``ffcv`` and ``nvidia.dali`` at the top level."""
    for layer, path in modules():
        named = {name.split(".")[0] for name in imports(path, top_level=True)}
        if named & {"nvidia", "ffcv"}:
            top = path.relative_to(ROOT / "pipelines").parts[0] if layer == "pipelines" else ""
            assert top.startswith(("dali", "ffcv")), path
        assert layer not in TORCH_FREE or not named & {"torch", "torchvision", "matplotlib"}, path


def test_exported_names_exist() -> None:
    """ruff does not check ``__all__`` in ``__init__.py``, where names may come from elsewhere."""
    packages = [
        importlib.import_module(f"fastsiam.{name}")
        for name in (
            "evaluate.detection",
            "interchange",
            "pipelines",
            "pipelines.convert",
            "pipelines.remote",
            "pipelines.store",
            "views.photometric",
        )
    ]
    for package in packages:
        assert [name for name in package.__all__ if not hasattr(package, name)] == []
