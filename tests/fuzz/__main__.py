"""`python -m tests.fuzz [TARGET ...] --cases N`: corrupt files at random and read them."""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from tests.fuzz.run import fuzz
from tests.fuzz.targets import TARGETS


def main() -> int:
    """Run the requested cases; return 1 if any of them failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--cases", type=int, default=1000, help="cases per target")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="parallel processes")
    asked = parser.parse_args()
    if unknown := [name for name in asked.targets if name not in TARGETS]:
        parser.error(f"no target {unknown[0]!r}; there are {', '.join(TARGETS)}")
    os.nice(19)
    failed, how = False, {"seed": asked.seed, "first": asked.first, "count": asked.cases}
    with ProcessPoolExecutor(asked.jobs, get_context("fork")) as pool:
        work = {pool.submit(fuzz, name, **how): name for name in asked.targets or TARGETS}
        for future in as_completed(work):
            found = future.result()
            print(f"{work[future]}: {asked.cases:,} cases, {len(found)} findings", flush=True)
            for number, what in [*found.items()][:20]:
                print(f"  case {number}: {what}", flush=True)
            failed |= bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
