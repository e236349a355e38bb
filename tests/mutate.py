"""Mutation testing: change single expressions of the program and see whether a test notices.

    python -m tests.mutate --count 200 --out runs/mutants.jsonl

A mutant is one change in a copy of the repository: another operator or number, a condition turned
round, a call, a result or a named argument left out. What `make test` has of its folder's tests
runs on it until one fails. A mutant that no test fails on has survived: either a test is missing,
or the change has no effect.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).parents[1]

TESTS_OF = {
    "fastsiam/views": ["tests/views", "tests/kernels/test_colours.py"],
    "fastsiam/model": ["tests/model", "tests/methods"],
    "fastsiam/methods": ["tests/methods"],
    "fastsiam/train": ["tests/train", "tests/without_gpu"],
    "pipelines/order.py": ["tests/pipelines/test_order.py"],
}
"""What is changed, and the tests that run on it."""

SECONDS = 900.0
"""A mutant on which they take longer than this counts as noticed: it hangs."""

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Mod: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.And: ast.Or,
    ast.Or: ast.And, ast.MatMult: ast.Mult,
}  # fmt: skip

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


def outcome(mutant: Mutant, folder: Path) -> dict[str, Any]:
    """Try a mutant in a copy of the repository; the copy is as it was afterwards."""
    began = time.monotonic()
    tests = next(tests for home, tests in TESTS_OF.items() if mutant.file.startswith(home))
    how = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow and not alone"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    mutant.apply(folder)
    # In a process group of its own: what the tests have started ends with them.
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *how, *tests],
        cwd=folder, env=environment, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            found = "noticed" if process.wait(SECONDS) else "survived"
        except subprocess.TimeoutExpired:
            found = "hung"
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    shutil.copyfile(ROOT / mutant.file, folder / mutant.file)
    return asdict(mutant) | {"outcome": found, "seconds": round(time.monotonic() - began, 1)}


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
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutants.jsonl")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("FASTSIAM_TEST_DATA", str(ROOT.parent / "shared" / "data"))
    files = [
        str(path.relative_to(ROOT))
        for home in TESTS_OF
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
                return outcome(mutant, copy)
            finally:
                copies.put(copy)

        for number, found in enumerate(pool.map(attempt, drawn), start=1):
            out.write(json.dumps(found) + "\n")
            out.flush()
            print(f"{number}: {found['outcome']} {found['file']}:{found['line']}", flush=True)


if __name__ == "__main__":
    main()
