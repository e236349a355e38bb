"""`python -m tests.fuzz [TARGET ...] --cases N --record FILE`: damage files, and read them."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import fastsiam
from fastsiam.report.markdown import markdown
from tests.fuzz.run import Finding, fuzz
from tests.fuzz.targets import TARGETS

RECORD = Path(__file__).parent / "record.json"


def main() -> int:
    """Do the cases that are asked for; exit code 1 if one of them went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--cases", type=int, default=1000, help="of each target")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="in all, shared by the targets")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--record", type=Path, help="file to count the cases in")
    parser.add_argument("--table", action="store_true", help="print the record as a table")
    asked = parser.parse_args()
    if asked.table:
        print(table(json.loads((asked.record or RECORD).read_text())))
        return 0
    if unknown := [name for name in asked.targets if name not in TARGETS]:
        parser.error(f"no target {unknown[0]!r}; there are {', '.join(TARGETS)}")
    os.nice(19)
    failed, names = False, asked.targets or list(TARGETS)
    of = {"seed": asked.seed, "first": asked.first}
    seconds = 60 * asked.minutes * asked.jobs / len(names)
    with ProcessPoolExecutor(asked.jobs, get_context("fork")) as pool:
        work = {pool.submit(_cases, x, **of, count=asked.cases, seconds=seconds): x for x in names}
        for future in as_completed(work):
            name, (done, found) = work[future], future.result()
            print(f"{name}: {done:,} cases, {len(found)} findings", flush=True)
            for finding in found[:20]:
                print(f"  {finding}", flush=True)
            failed |= bool(found)
            if asked.record:
                note(asked.record, name, **of, cases=done, found=len(found))
    return int(failed)


def _cases(name: str, **how: Any) -> tuple[int, list[Finding]]:
    return fuzz(TARGETS[name], **how)  # a target itself cannot be sent to a process


def note(path: Path, name: str, *, seed: int, first: int, cases: int, found: int) -> None:
    """Add a stretch of cases to a record."""
    record: dict[str, list[dict[str, Any]]] = json.loads(path.read_text()) if path.exists() else {}
    stretch = {
        "seed": seed,
        "first": first,
        "cases": cases,
        "findings": found,
        "fastsiam": fastsiam.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    others = [x for x in record.get(name, []) if (x["seed"], x["first"]) != (seed, first)]
    record[name] = [*others, stretch]
    path.write_text(json.dumps(record, indent=1) + "\n")


def table(record: Mapping[str, list[dict[str, Any]]]) -> str:
    """Return a record as a Markdown table."""
    rows = [
        [
            name,
            f"{sum(x['cases'] for x in stretches):,}",
            f"{sum(x['findings'] for x in stretches):,}",
            max(x["date"] for x in stretches),
        ]
        for name, stretches in record.items()
    ]
    return markdown(("reader", "cases", "findings", "last on"), rows)


if __name__ == "__main__":
    sys.exit(main())
