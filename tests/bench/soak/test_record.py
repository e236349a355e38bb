"""The record of a soak: written, read, shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastsiam.bench.report import renew
from fastsiam.bench.soak.record import SoakRecord, SoakRun, as_markdown, read_record, write_record
from fastsiam.bench.soak.vitals import Growth
from fastsiam.errors import DataError


def record(**changed: object) -> SoakRecord:
    run = SoakRun(
        pipeline="memory",
        seed=3,
        steps=1200,
        starts=4,
        faults=("Ctrl-C", "Ctrl-C", "a full disk"),
        difference="",
        left=(),
    )
    growth = Growth(slope=0.5, low=-1.0, high=2.0, level=300.0, stretches=9, samples=400)
    whole = {
        "minutes": 12.0,
        "seed": 1,
        "ranks": 4,
        "runs": (run, run),
        "findings": (),
        "growth": {"memory": growth},
        "command": "fastsiam bench soak --minutes 12",
        "environment": {"cores": 2, "cpu": "a CPU", "packages": {"torch": "2"}},
        "date": "2026-11-23",
    }
    return SoakRecord(**(whole | changed))  # type: ignore[arg-type]


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    write_record(path, record())
    assert read_record(path) == record()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"growth": {}, "runs": [1], "findings": []}'])
def test_what_is_no_record_is_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"soak\.json holds no record of fastsiam bench soak$"):
        read_record(path)


def test_a_page_shows_it(tmp_path: Path) -> None:
    write_record(tmp_path / "soak.json", record(findings=("memory, seed 3: it hangs",)))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- soak: soak.json -->\nold\n<!-- /soak -->\nafter\n")
    assert renew(page, tmp_path) == ["soak.json"]
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("<!-- /soak -->\nafter\n")
    assert "old" not in text and as_markdown(record()).splitlines()[2] in text
    assert "2 runs of 4 gloo ranks in 12 minutes, seed 1" in text
    assert "- memory, seed 3: it hangs" in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["memory", "2", "2,400", "8", "6", "0"] in rows
    assert ["Ctrl-C", "4"] in rows and ["a full disk", "2"] in rows
    assert ["memory MB", "300.0", "+0.50", "-1.00 to +2.00", "9", "400"] in rows
