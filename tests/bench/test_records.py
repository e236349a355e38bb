"""Records and their tables: what they depend on, in files and in columns."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from fastsiam.bench.records import Timing, read, write
from fastsiam.bench.tables import caption, table
from fastsiam.errors import DataError
from tests.bench.made import made, record, sample


def test_records_say_what_they_depend_on(tmp_path: Path) -> None:
    slow, fast = Timing([sample(4.0)], 8), Timing([sample(1.0)], 16)
    one = made(torchvision=slow, ceiling=("bare", fast), pipeline="ffcv")
    assert (one.images_per_second, one.ratio_to_torchvision, one.ratio) == (4.0, 2.0, 2.0)
    assert (one.share_of_ceiling, one.cpu_seconds_per_image, one.cores_busy) == (0.25, 0.375, 1.5)
    contract = {
        "case", "pipeline", "images_per_second", "spread", "n", "ratio_to_torchvision",
        "share_of_ceiling", "cpu_seconds_per_image", "config", "environment", "date",
    }  # fmt: skip
    assert contract <= set(asdict(one))
    assert one.environment["packages"]["torch"] and one.environment["commit"]
    write(tmp_path / "new" / "records.json", [one, made("b")])
    assert read(tmp_path / "new" / "records.json") == [one, made("b")]
    assert len(json.loads((tmp_path / "new" / "records.json").read_text())) == 2


def test_medians_and_spreads() -> None:
    timing = Timing([sample(1.0, 5.0), sample(4.0, 6.0), sample(2.0, 9.0)], images=10)
    one = record("loader", "a", timing, config={})
    assert (timing.median, one.spread, one.images_per_second) == (2.0, 0.75, 5.0)
    assert one.cores_busy == 3.0


@pytest.mark.parametrize("text", ["", "[]", "[1]", '[{"case": "loader"}]'])
def test_other_files_are_no_records(text: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(DataError, match="holds no records"):
        read(tmp_path / "file.json")


def test_tables_leave_out_empty_columns_and_mark_wide_spreads() -> None:
    slow = Timing([sample(4.0)], 8)
    rows = table([made("a", torchvision=slow), made("b|c", torchvision=slow)]).splitlines()
    heads = [cell.strip() for cell in rows[0].split(" | ")]
    assert "times torchvision" in heads and "GPU MB" not in heads and len(rows) == 4
    assert len({len(row) for row in rows}) == 1 and "b\\|c" in rows[3]
    mixed = table([made("a", torchvision=slow), made("d", "step", baseline=("authors", slow))])
    assert "2 x torchvision" in mixed and "2 x authors" in mixed and "step" in mixed
    assert "8 images per repeat" in caption([made()])
    wide = record("loader", "wide", Timing([sample(1.0), sample(2.0)], 4), config={})
    assert ["(unsteady)" in line for line in table([made(), wide]).splitlines()[2:]] == [0, 1]
