"""Tables show what records have."""

from __future__ import annotations

from fastsiam.bench.records import record
from fastsiam.bench.tables import caption, table
from fastsiam.bench.timing import Timing
from tests.bench.made import made, sample


def test_tables_leave_out_what_nobody_has() -> None:
    slow = Timing([sample(4.0)], 8)
    rows = table([made("a", torchvision=slow), made("b|c", torchvision=slow)]).splitlines()
    heads = [cell.strip() for cell in rows[0].split(" | ")]
    assert "times torchvision" in heads and "GPU MB" not in heads and len(rows) == 4
    assert len({len(row) for row in rows}) == 1 and "b\\|c" in rows[3]
    mixed = table([made("a", torchvision=slow), made("d", "step", baseline=("authors", slow))])
    assert "2 x torchvision" in mixed and "2 x authors" in mixed and "step" in mixed
    assert "8 images a repeat" in caption([made()])


def test_wide_spreads_are_marked() -> None:
    steady, wide = ([sample(t) for t in times] for times in ((1.0, 1.1), (1.0, 2.0)))
    rows = [record("loader", str(i), Timing(t, 4), config={}) for i, t in enumerate((steady, wide))]
    marks = ["(unsteady)" in line for line in table(rows).splitlines()[2:]]
    assert marks == [False, True]
