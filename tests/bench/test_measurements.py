"""Benchmark records: derived figures, files and tables."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from fastsiam.bench.measurements import read, write
from fastsiam.bench.tables import table
from tests.bench.sample_records import build_record


def test_record_has_ratios_config_and_environment(tmp_path: Path) -> None:
    one = build_record(torchvision=2, ceiling=("bare", 16), pipeline="ffcv")
    assert (one.images_per_second, one.ratio_to_torchvision, one.ratio) == (4.0, 2.0, 2.0)
    assert (one.share_of_ceiling, one.cpu_seconds_per_image, one.cores_busy) == (0.25, 0.375, 1.5)
    contract = {
        "case", "pipeline", "images_per_second", "spread", "n", "ratio_to_torchvision",
        "share_of_ceiling", "cpu_seconds_per_image", "config", "environment", "date",
    }  # fmt: skip
    assert contract <= set(asdict(one))
    assert one.environment["packages"]["torch"] and one.environment["commit"]
    write(tmp_path / "new" / "records.json", [one, build_record("b")])
    assert read(tmp_path / "new" / "records.json") == [one, build_record("b")]
    assert len(json.loads((tmp_path / "new" / "records.json").read_text())) == 2


def test_median_and_spread() -> None:
    one = build_record("a", "loader", 1.0, 4.0, 2.0, images=10, cpu=6.0)
    assert (one.spread, one.images_per_second, one.cores_busy) == (0.75, 5.0, 3.0)


def test_table_omits_empty_columns_and_marks_wide_spreads() -> None:
    rows = table(
        [build_record("a", torchvision=2), build_record("b|c", torchvision=2)]
    ).splitlines()
    heads = [cell.strip() for cell in rows[0].split(" | ")]
    assert "times torchvision" in heads and "GPU MB" not in heads and len(rows) == 4
    assert len({len(row) for row in rows}) == 1 and "b\\|c" in rows[3]
    mixed = table(
        [build_record("a", torchvision=2), build_record("d", "step", baseline=("authors", 2))]
    )
    assert "2 x torchvision" in mixed and "2 x authors" in mixed and "step" in mixed
    wide = table([build_record(), build_record("wide", "loader", 1.0, 2.0)]).splitlines()[2:]
    assert ["(unsteady)" in line for line in wide] == [False, True]
