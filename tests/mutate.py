"""Mutation testing: change single expressions of the program and see whether a test notices.

    make coverage
    python -m tests.mutate --count 200 --out runs/mutants.jsonl

A mutant is one change in a copy of the repository: another operator or number, a condition turned
round, a call, a result or a named argument left out. The tests of `make test` that ran the changed
line run on it, those of its folder first, until one fails. Which those are and how long they take,
`make coverage` has written down. What coverage cannot see (compiled kernels, other processes) is
tried on what `make test` has of the folder's tests. A mutant that no test fails on has survived:
either a test is missing, or the change has no effect.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).parents[1]

TIER = ("-m", "not slow and not alone")
"""The tests that mutants are tried on."""

HOMES = (
    "fastsiam/views", "fastsiam/model", "fastsiam/methods", "fastsiam/train",
    "pipelines/order.py",
)  # fmt: skip
"""What is changed."""

TESTS_OF = {
    "fastsiam/views/photometric/cpu": ["tests/views/test_photometric_cpu.py"],
    "fastsiam/views/photometric/cuda": ["tests/views/test_cuda_kernels.py"],
    "fastsiam/views": ["tests/views"],
    "fastsiam/model": ["tests/model"],
    "fastsiam/methods": ["tests/methods"],
    "fastsiam/train": ["tests/train", "tests/without_gpu"],
    "pipelines/order.py": ["tests/pipelines/test_order.py"],
}
"""Where the tests of a file's subject are: by how its path begins, first match."""

KERNELS = ("fastsiam/views/photometric/c",)
"""What runs compiled or in Triton's process, too: coverage sees a part of the tests that run it."""

PLANNED_SECONDS = 30.0
"""A mutant is tried on so many seconds of tests that ran its line."""
SECONDS = 240.0
"""A mutant on which they take longer than this counts as noticed: it hangs."""

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Mod: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.And: ast.Or,
    ast.Or: ast.And, ast.MatMult: ast.Mult,
}  # fmt: skip

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "torchvision", "pytest", "PIL.Image", "rich.progress", "typer"]
)

Code = ast.expr | ast.stmt


@dataclass(frozen=True)
class Mutant:
    """One change of a file: what stands between two of its bytes."""

    file: str
    line: int
    begin: int
    end: int
    before: str
    after: str

    def apply(self, folder: Path) -> None:
        """Change the file below a folder."""
        source = (ROOT / self.file).read_bytes()
        changed = source[: self.begin] + self.after.encode() + source[self.end :]
        (folder / self.file).write_bytes(changed)


def mutants(file: str) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    source = (ROOT / file).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _code(ast.parse(source)):
        for place, after in _changes(node):
            begin = starts[place.lineno - 1] + place.col_offset
            end = starts[(place.end_lineno or 0) - 1] + (place.end_col_offset or 0)
            yield Mutant(file, place.lineno, begin, end, source[begin:end].decode(), after)


def _code(node: ast.AST) -> Iterator[Code]:
    """Yield what can be changed: no types, messages, assertions or imports."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.expr | ast.stmt):
        yield node
    for name, value in ast.iter_fields(node):
        if name not in {"annotation", "returns", "decorator_list"}:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _code(child)


def _changes(node: Code) -> Iterator[tuple[Code, str]]:
    """Yield what may be changed about a node: a place, and what is put there."""
    match node:
        case ast.Compare(ops=[one]):
            yield node, _with(node, ops=[SWAPS[type(one)]()])
        case ast.BinOp() | ast.BoolOp():
            yield node, _with(node, op=SWAPS[type(node.op)]())
        case ast.AugAssign():
            yield node, _with(node, op=SWAPS[type(node.op)]())[1:-1]
        case ast.UnaryOp():
            yield node, f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value)):
            yield node, str(value + 1)
        case ast.Constant(value=float(value)):
            yield node, str(2 * value + 1)
        case ast.If() | ast.While() | ast.IfExp():
            yield node.test, f"(not ({ast.unparse(node.test)}))"
        case ast.Expr(value=ast.Call()) | ast.Break() | ast.Continue():
            yield node, "pass"
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield node, "return None"
        case ast.Call():
            for named in (keyword for keyword in node.keywords if keyword.arg):
                rest = [keyword for keyword in node.keywords if keyword is not named]
                yield node, _with(node, keywords=rest)


def _with(node: Code, **fields: object) -> str:
    """Write a node with some of its fields changed."""
    return f"({ast.unparse(type(node)(**dict(ast.iter_fields(node)) | fields))})"


class Choice:
    """Which tests a mutant is tried on.

    Args:
        coverage: A coverage file with a context for each test, of paths relative to the root.
        durations: What pytest wrote with ``--junitxml``, of the same tests.
    """

    def __init__(self, coverage: Path, durations: list[Path]) -> None:
        from coverage import CoverageData

        self._data = CoverageData(str(coverage))
        self._data.read()
        self._seconds: dict[str, float] = {}
        # Any other could not be run, and a mutant on which nothing runs is not noticed.
        tier = names_of_the_tests()
        for file in durations:
            for case in ElementTree.parse(file).iter("testcase"):
                name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
                if name in tier:
                    self._seconds[name] = float(case.get("time", 0))
        self._lines: dict[str, dict[int, list[str]]] = {}

    def tests(self, mutant: Mutant) -> list[str]:
        """Return names for pytest: tests that ran the line, where none did its subject's."""
        if mutant.file not in self._lines:
            self._lines[mutant.file] = self._data.contexts_by_lineno(mutant.file)
        named = self._lines[mutant.file].get(mutant.line, [])
        ran = {name.rpartition("|")[0] for name in named} & self._seconds.keys()
        own = next(tests for home, tests in TESTS_OF.items() if mutant.file.startswith(home))

        def order(test: str) -> tuple[bool, float]:
            return not test.startswith(tuple(own)), self._seconds[test]

        chosen: list[str] = []
        total = 0.0
        for test in sorted(ran, key=order):
            total += self._seconds[test]
            if chosen and total > PLANNED_SECONDS:
                break
            chosen.append(test)
        if mutant.file.startswith(KERNELS):
            chosen += [test for test in own if test not in chosen]
        return chosen or own


def names_of_the_tests() -> set[str]:
    """Return what pytest calls the tests that mutants are tried on."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *TIER]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return {line for line in done.stdout.splitlines() if "::" in line}


def outcome(mutant: Mutant, tests: list[str], folder: Path) -> dict[str, Any]:
    """Try a mutant in a copy of the repository; the copy is as it was afterwards."""
    began, output = time.monotonic(), folder / "output.txt"
    mutant.apply(folder)
    process = _CONTEXT.Process(target=_test, args=(str(folder), tests, str(output)))
    process.start()
    process.join(SECONDS)
    found = {0: "survived", None: "hung"}.get(process.exitcode, "noticed")
    with suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    shutil.copyfile(ROOT / mutant.file, folder / mutant.file)
    last = output.read_text(errors="replace").splitlines()[-1:]
    seconds = round(time.monotonic() - began, 1)
    return asdict(mutant) | {
        "outcome": found, "tests": tests, "seconds": seconds, "last": last,
    }  # fmt: skip


def _test(folder: str, tests: list[str], output: str) -> None:
    """Run pytest in a folder, in a process group of its own."""
    os.setsid()
    for number in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(folder)
    sys.path[:] = [folder, *(path for path in sys.path if path not in {"", str(ROOT)})]
    for name in [name for name in sys.modules if name.split(".")[0] in {"tests", "fastsiam"}]:
        del sys.modules[name]
    multiprocessing.set_start_method(None, force=True)
    import pytest

    how = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *TIER]
    sys.exit(pytest.main([*how, *tests]))


def copy_of_the_repository(folder: Path) -> Path:
    """Copy what the tests need."""
    apart = shutil.ignore_patterns(".git", ".venv", "runs", "results", "*_cache")
    return Path(shutil.copytree(ROOT, folder, symlinks=True, ignore=apart))


def main() -> None:
    """Try some mutants, drawn at random, and write down what became of each."""
    parser = argparse.ArgumentParser(description="Mutation testing.")
    parser.add_argument("--count", type=int, default=200, help="mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=2, help="at once")
    parser.add_argument("--coverage", type=Path, default=ROOT / "runs" / "coverage")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutants.jsonl")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("FASTSIAM_TEST_DATA", str(ROOT.parent / "shared" / "data"))
    choice = Choice(options.coverage / "data", sorted(options.coverage.glob("*.xml")))
    files = [
        str(path.relative_to(ROOT))
        for home in HOMES
        for path in sorted([ROOT / home] if home.endswith(".py") else (ROOT / home).rglob("*.py"))
    ]
    everything = [mutant for file in files for mutant in mutants(file)]
    drawn = random.Random(options.seed).sample(everything, options.count)
    print(f"{len(drawn)} of {len(everything)} mutants of {len(files)} files")
    with (
        tempfile.TemporaryDirectory() as home,
        options.out.open("w") as out,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        copies: SimpleQueue[Path] = SimpleQueue()
        for job in range(options.jobs):
            copies.put(copy_of_the_repository(Path(home) / str(job)))

        def attempt(mutant: Mutant) -> dict[str, Any]:
            copy = copies.get()
            try:
                return outcome(mutant, choice.tests(mutant), copy)
            finally:
                copies.put(copy)

        for number, found in enumerate(pool.map(attempt, drawn), start=1):
            out.write(json.dumps(found) + "\n")
            out.flush()
            print(f"{number}: {found['outcome']} {found['file']}:{found['line']}", flush=True)


if __name__ == "__main__":
    main()
