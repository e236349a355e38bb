"""Execution of a benchmark case: measure, print the table, write the records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fastsiam.bench.cases import CASES
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.finding import finding
from fastsiam.bench.records import Record, check_writable, write
from fastsiam.bench.session import session
from fastsiam.bench.tables import caption, differences, table
from fastsiam.errors import BackendError

_REPEATS, _FEW_REPEATS = 5, 3
"""If nobody asks for a number; the fewer are those of ``all``."""
HOW = (
    "Each runner is a process of its own. After a warm-up, runners are interleaved (A B C A B C "
    "...). A figure is the median over the repeats. The spread is half the distance between the "
    "fastest and the slowest repeat, divided by the median; above 15% it is marked as unsteady. "
    "One image means all of its views. CPU time counts all processes of a runner. Files are in "
    "the system's cache."
)
"""How all cases measure; printed below the table."""


def run(case: str, config: BenchConfig) -> list[Record]:
    """Run a case; print its table; write the records if that is asked for.

    Raises:
        BackendError: nothing of it could be measured here, or a variant of the step that was
            asked for failed; what was measured is printed and written first.
    """
    if config.json:
        check_writable(Path(config.json))
    repeats = config.repeats or (_FEW_REPEATS if case == "all" else _REPEATS)
    with session(replace(config, repeats=repeats)) as own:
        records = CASES[case].measure(own)
    if not records:
        raise BackendError("nothing could be measured; the reasons are above")
    print(f"{table(records)}\n\n{caption(records)}\n{HOW}")
    for line in differences(records):
        print(line)
    if case == "all":
        print(f"\n{finding(records)}")
    if config.json:
        write(Path(config.json), records)
    if case == "step" and own.failed:
        reasons = (f"{name} ({why})" for name, why in own.failed.items())
        raise BackendError(f"not measured: {'; '.join(reasons)}")
    return records
