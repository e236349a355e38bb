"""Who may import whom: the core knows no back-end, the loop no pipeline, and --help no torch."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOME = {"pipelines": "fastsiam.pipelines", "bench": "fastsiam.bench"}
TOP = {"cli", "convert", "demo", "embed", "evaluation", "run", "subject", "supervised", "__main__"}
"""Modules that put things together; they may import everything."""
FOR_PIPELINES = {"config", "errors", "batch", "augment", "photometric", "rng"} | {
    "threads",
    "compiled",
    "trace",
}
TORCH_FREE = {
    "__init__",
    "__main__",
    "cli",
    "config",
    "errors",
    "options",
    "recipes",
    "augment",
    "rng",
}


def modules() -> list[tuple[str, Path]]:
    found = []
    for folder in ("fastsiam", "pipelines", "bench"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[:2] not in {("fastsiam", "pipelines"), ("fastsiam", "bench")}:
                found.append((".".join((HOME.get(parts[0], parts[0]), *parts[1:])), path))
    return found


def imports(path: Path, *, top_level: bool = False) -> list[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level else list(ast.walk(tree))
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def test_pipelines_need_little_of_the_core() -> None:
    for module, path in modules():
        if module.startswith("fastsiam.pipelines"):
            own = {name.split(".")[1] for name in imports(path) if name.startswith("fastsiam.")}
            assert own <= FOR_PIPELINES, (module, own - FOR_PIPELINES)


def test_the_core_does_not_know_the_pipelines() -> None:
    for module, path in modules():
        name = module.split(".")[1]
        if name not in TOP | {"pipelines", "bench"}:
            for imported in imports(path):
                assert not imported.startswith(
                    ("fastsiam.pipelines", "fastsiam.bench", "fastsiam.cli", "fastsiam.jobs.train")
                ), module


def test_help_needs_no_torch() -> None:
    for module, path in modules():
        if module.count(".") == 1 and module.split(".")[1] in TORCH_FREE:
            for imported in imports(path, top_level=True):
                assert imported.split(".")[0] not in {"torch", "torchvision", "matplotlib"}, module


def test_no_back_end_on_the_import_path() -> None:
    for module, path in modules():
        for imported in imports(path):
            if imported.split(".")[0] in {"nvidia", "ffcv"}:
                assert module.split(".")[-1] in {"dali_cropper", "ffcv_library"} or (
                    module.startswith("fastsiam.bench")
                    and imported not in imports(path, top_level=True)
                ), module


def test_bench_leaves_the_command_line_alone() -> None:
    for module, path in modules():
        if module.startswith("fastsiam.bench"):
            assert not any(name.startswith("fastsiam.cli") for name in imports(path)), module


def test_every_module_is_found() -> None:
    names = {module for module, _ in modules()}
    assert {
        "fastsiam.training.loop",
        "fastsiam.methods.simsiam",
        "fastsiam.pipelines.order",
    } <= names
