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
    options = parser.parse_args()
    if unknown := [name for name in options.targets if name not in TARGETS]:
        parser.error(f"no target {unknown[0]!r}; there are {', '.join(TARGETS)}")
    os.nice(19)
    failed, settings = False, {"seed": options.seed, "first": options.first, "count": options.cases}
    with ProcessPoolExecutor(options.jobs, get_context("fork")) as pool:
        work = {pool.submit(fuzz, name, **settings): name for name in options.targets or TARGETS}
        for future in as_completed(work):
            failures = future.result()
            print(f"{work[future]}: {options.cases:,} cases, {len(failures)} findings", flush=True)
            for number, failure in [*failures.items()][:20]:
                print(f"  case {number}: {failure}", flush=True)
            failed |= bool(failures)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
