"""Records and tables of studies: their content, and lossless files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from fastsiam.config.study import StudyConfig
from fastsiam.study import pictures
from fastsiam.study import record as record_module
from fastsiam.study.catalogue import STUDIES
from fastsiam.study.record import (
    Result,
    StudyRecord,
    read_record,
    read_result,
    setting,
    write_record,
)
from fastsiam.study.result_table import as_markdown, as_text, caption, cells, reasons
from fastsiam.study.runs import runs_of
from fastsiam.study.scales import scale
from tests.conftest import ROOT
from tests.study.results import record, result, row


@pytest.fixture(scope="module")
def table_1() -> StudyRecord:
    """Record of Table 1: a healthy row, a collapsed one, a diverged one and another healthy one."""
    collapsed = tuple(result(seed, 11, z_std=0.02, rank=1.5) for seed in range(3))
    diverged = (result(0, diverged=True),)
    return record(rows=[row(60, 61, 59), collapsed, diverged, row(62, 63.5, 61.2)])


def test_record_round_trip(table_1: StudyRecord, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "predictor.json"
    write_record(path, table_1)
    assert read_record(path) == table_1
    lines = path.read_text().splitlines()
    assert sum("loss_curve" in line for line in lines) == 10 and len(lines) < 400


def test_result_has_dimensions_of_projections(tmp_path: Path) -> None:
    (run, *_) = runs_of([STUDIES["dimension"]], scale("demo"), tmp_path, seeds=[0])
    run.folder.mkdir()
    run.diverged_file.touch()
    one = read_result(run)
    assert run.variant == "eighth-dim" and one is not None and one.dim == 64


def test_stored_records_are_judged_by_current_claims(tmp_path: Path) -> None:
    """Records of version 0.2 may contain claims that the catalogue no longer makes."""
    files = sorted((ROOT / "bench/results/study").rglob("*.json"))
    old, text = tmp_path / "old.json", files[-1].read_text()
    old.write_text(text.replace('"works"', '"diverges"'))
    assert len(files) == 21 and old.read_text() != text
    for file in [*files, old]:
        study = read_record(file)
        claims = [row.claims for row in STUDIES[study.name].rows]
        assert [row.claims for row in study.rows] == claims and len(study.seeds) in (3, 10)


def test_page_lists_seeds_of_every_study() -> None:
    """The table in "Not run here" names every study, with "none" where a scale has no record."""
    page = (ROOT / "docs/study.md").read_text().partition("### Not run here\n")[2]
    lines = re.findall(r"^\| (`.*`) \| (.*) \| (.*) \|$", page.partition("\n## ")[0], re.MULTILINE)
    listed = {name: seeds for names, *seeds in lines for name in re.findall(r"`(.*?)`", names)}
    assert listed.keys() == STUDIES.keys()
    for name, seeds in listed.items():
        for scale_name, text in zip(("demo", "cifar-small"), seeds, strict=True):
            file = ROOT / f"bench/results/study/{scale_name}/{name}.json"
            expected = len(read_record(file).seeds) if file.exists() else "none"
            assert text.split(",")[0] == str(expected), (name, scale_name)


def test_setting_column_uses_numbers_of_scale() -> None:
    expected = {
        "baseline": "",
        "eighth-batch": "batch 16",
        "batch-8x": "batch 1024, warmup-epochs 1.2",
        "no-stop-gradient": "predictor-lr cosine, no stop-gradient",
        "asymmetric-2x": "views 4, no symmetric",
    }
    assert {variant: setting(scale("demo"), variant) for variant in expected} == expected


def test_table_rows(table_1: StudyRecord) -> None:
    heads, rows = cells(table_1)
    assert heads[2:4] == ["paper: linear top-1, %", "ours: kNN top-1, %"]
    decayed, none, fixed, constant = rows
    assert decayed[1:8] == [
        "predictor-lr cosine", "67.7", "60.0 ± 1.0", "3", "0.95 ± 0.00", "40.0 ± 0.0",
        "-0.900 ± 0.000",
    ]  # fmt: skip
    assert none[-1] == "collapses: holds; fails: holds"
    assert fixed[3:8] == ["10.0", "1, 1 diverged", "-", "-", "-"]
    assert constant[1:3] == ["as the recipe", "68.1"]
    better = 'better than "predictor\'s rate decayed": holds'
    assert constant[-1] == f"works: holds; does not collapse: holds; {better}"


def test_reasons_contain_figures(table_1: StudyRecord) -> None:
    lines = reasons(table_1)
    assert len(lines) == 2 + 2 + 2 + 3
    assert (
        "no predictor: collapses: holds (3 of 3 seeds; loss -0.90, std 0.02, rank 1.5)" in lines
        and sum("inconclusive" in line for line in lines) == 2
    )


@pytest.mark.parametrize(
    ("seeds_by_row", "seeds", "table_text", "picture_text"),
    [
        (([0, 1, 2, 3], [0, 1, 2, 3]), 4, "over the seeds 0 to 3;", "; seeds: 0 to 3;"),
        (([0, 1, 2, 3], []), 4, "over the seeds 0 to 3;", "; seeds: 0 to 3;"),
        (([0, 1, 2, 3], [0, 1]), 2, "over each row's seeds;", "; seeds: each row's;"),
        (([0, 1], [2, 3]), 0, "over each row's seeds;", "; seeds: each row's;"),
    ],
)
def test_captions_and_command_name_seeds_that_rows_share(
    seeds_by_row: tuple[list[int], list[int]],
    seeds: int,
    table_text: str,
    picture_text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If rows have different seeds, the captions say so; ``--seeds`` covers those of all rows."""
    study, config = STUDIES["stop-gradient"], StudyConfig(out=str(tmp_path))
    runs = [
        one
        for row, row_seeds in zip(study.rows, seeds_by_row, strict=True)
        for one in runs_of([replace(study, rows=(row,))], scale("demo"), tmp_path, seeds=row_seeds)
    ]
    monkeypatch.setattr(record_module, "read_result", lambda run: result(run.seed, 50))
    monkeypatch.setattr(record_module, "RunSettings", Mock())
    study_record = record_module.collect(study, scale("demo"), runs, config)
    flag = f" --seeds {seeds}" if seeds else ""
    assert study_record.command == f"fastsiam study run stop-gradient --scale demo{flag}"
    plain = replace(study_record, environments=(), precisions=())
    assert table_text in caption(plain)
    assert picture_text in pictures._caption(plain)


def test_captions_name_the_epochs_of_the_runs() -> None:
    """Not those of the recipe, of which a study's rows may train a multiple."""
    short, long = (
        tuple(replace(one, knn_epochs=(0.0, epochs)) for one in row(60, 61))
        for epochs in (12.0, 96.0)
    )
    lost = replace(result(0, diverged=True), knn_epochs=(0.0,))
    for rows, text in (
        ([short, long, long, (lost,)], "12 to 96 epochs"),
        ([long, (lost,)] * 2, "96 epochs"),
    ):
        of_runs = record("schedule", rows=rows)
        assert f", {text}; mean" in caption(of_runs)
        assert f", {text}; seeds" in pictures._caption(of_runs)
    assert ", 12 epochs; mean" in caption(record("schedule", rows=[()] * 4))


def test_table_names_original(tmp_path: Path) -> None:
    """The claims survive a file, and the table shows the figure that they refer to."""
    path = tmp_path / "reproduction.json"
    write_record(path, record("reproduction"))
    heads, rows = cells(read_record(path))
    assert heads[2] == "original: linear top-1, %"
    assert [line[2] for line in rows][:2] == ["66.6", "68.3"]
    assert rows[0][-1].endswith("better than the original: inconclusive")
    assert rows[4][-1].endswith("comparable to the original: inconclusive")


def test_runs_on_other_images_are_named(table_1: StudyRecord) -> None:
    def on(digest: str, results: Sequence[Result]) -> tuple[Result, ...]:
        return tuple(replace(one, images_digest=digest) for one in results)

    rows = [replace(row, results=on("a", row.results)) for row in table_1.rows]
    assert "Not comparable" not in as_text(replace(table_1, rows=tuple(rows)))
    rows[2] = replace(rows[2], results=on("b", rows[2].results))
    other = replace(table_1, rows=tuple(rows))
    message = (
        "Not comparable: trained on other images than the first run: fixed random predictor, seed 0"
    )
    assert message in as_text(other).splitlines() and message in as_markdown(other).splitlines()
