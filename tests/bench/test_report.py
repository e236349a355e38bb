"""The bench report: a self-contained page with the measured figures, and tables in the docs."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fastsiam.bench import report
from fastsiam.bench.charts import chart
from fastsiam.bench.measurements import Record, write
from fastsiam.bench.report import write_report
from fastsiam.bench.tables import caption, table
from fastsiam.cli.bench import _study_table
from fastsiam.errors import DataError
from tests.bench.sample_records import build_record
from tests.conftest import ROOT

renew = partial(report.renew, study_table=_study_table)
IMAGES = 100
HOSTILE = "</td><script>x()</script>$\\frac{$ | & '\""


def build_case_record(case: str, name: str, seconds: float = 1.0, **more: Any) -> Record:
    return build_record(name, case, seconds, images=IMAGES, **more)


def build_loader_record(pipeline: str, output: str) -> Record:
    ceiling, facts = ("bare decoding", 4 * IMAGES), {"what": output, "stored": "original"}
    name = f"{pipeline} {output}"
    return build_case_record("loader", name, pipeline=pipeline, ceiling=ceiling, facts=facts)


def build_record_of_each_case() -> list[Record]:
    return [
        build_loader_record("torchvision", "views"),
        build_loader_record("ffcv", "crops"),
        build_case_record("step", "compiled", 0.5, baseline=("authors' setting", IMAGES)),
        build_case_record("train", "dali", pipeline="dali", facts={"data_wait": 0.25}),
        build_case_record("startup", "of version 0.2", 5.0, facts={"first_batch": 2.0}),
        build_case_record("peers", HOSTILE, 2.0, facts={"differs": "no hue", "version": "1.2"}),
        build_case_record("sweep", "ffcv, workers 1", facts={"over": "workers", "value": 1}),
    ]


def save_records(path: Path, records: list[Record]) -> Path:
    write(path, records)
    return path


def test_report_is_self_contained_and_complete(tmp_path: Path) -> None:
    records = build_record_of_each_case()
    files = write_report([save_records(tmp_path / "run.json", records)], tmp_path / "out")
    assert sorted(files) == sorted((tmp_path / "out").iterdir())
    pictures = [path for path in files if path.suffix == ".png"]
    assert {path.stem for path in pictures} == {one.case for one in records}
    text = (tmp_path / "out" / "index.html").read_text()
    assert not re.search(r'(src|href)\s*=(?!"data:image/png;base64,)', text)
    assert "<script" not in text and "@import" not in text and "url(" not in text
    inside = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert [base64.b64decode(one) for one in inside] == [path.read_bytes() for path in pictures]
    for one in records:
        assert f"<td>{one.name}</td>" in html.unescape(text)
        assert one.command in html.unescape(text) and one.date in text
    machine = records[0].environment
    for fact in (machine["cpu"], machine["commit"], machine["packages"]["torch"], "no hue"):
        assert fact in text
    tables = (tmp_path / "out" / "tables.md").read_text()
    loader = [one for one in records if one.case == "loader"]
    assert table(loader) in tables and caption(loader) in tables and records[0].command in tables


def test_bars_show_ceiling_and_shares() -> None:
    figure = chart(
        [
            build_loader_record("ffcv", "crops"),
            replace(build_loader_record("dali", "views"), spread=0.4),
        ]
    )
    assert figure
    axes = figure.axes[0]
    bars = [bar for bar in axes.patches if bar.get_width()]  # type: ignore[attr-defined]
    assert [bar.get_width() for bar in bars] == [100.0] * 2  # type: ignore[attr-defined]
    assert [bar.get_hatch() for bar in bars] == [None, "////"]
    assert [text.get_text() for text in axes.texts].count("100 (25%)") == 2
    assert "dashed: bare decoding" in axes.get_xlabel().replace("\n", " ")


def test_caption_names_common_number_of_images_and_repeats() -> None:
    once, twice = build_record(images=8), build_record("b", "loader", 1.0, 2.0, images=16)
    assert caption([once]).startswith("8 images per repeat, one repeat;")
    assert caption([twice]).startswith("16 images per repeat, medians of 2 interleaved repeats;")
    assert caption([once, twice]).startswith("medians of 1 or 2 interleaved repeats;")


def test_only_tables_in_page_are_updated(tmp_path: Path) -> None:
    records = [build_case_record("step", "new"), build_case_record("peers", "others")]
    save_records(tmp_path / "results" / "a.json", records)
    save_records(tmp_path / "b.json", records[1:])
    readme = tmp_path / "README.md"

    def text(step: str, peers: str) -> str:
        return (
            "# Title  \né `<!-- x -->` \x0c\n"
            f"<!-- bench: results/a.json step -->\n{step}<!-- /bench -->\nbetween\t\n"
            f"<!-- bench: b.json -->\n{peers}<!-- /bench -->\nend, without a line's end"
        )

    readme.write_text(text("| old |\n", ""))
    tables = (f"\n{caption([x])}; `{x.command}`\n\n{table([x])}\n\n" for x in records)
    expected = text(*tables)
    for _ in range(2):
        assert renew(readme, tmp_path) == ["results/a.json step", "b.json"]
        assert readme.read_text() == expected


def test_non_utf8_path_in_command_is_escaped(tmp_path: Path) -> None:
    record = replace(build_case_record("step", "x"), command="fastsiam bench step --json caf\udce9")
    file, readme = save_records(tmp_path / "a.json", [record]), tmp_path / "README.md"
    readme.write_text(GOOD)
    renew(readme, tmp_path)
    for path in (readme, *write_report([file], tmp_path / "out")[:2]):
        assert r"--json caf\udce9" in path.read_text("utf-8")


def test_records_with_same_name_have_separate_rows(tmp_path: Path) -> None:
    """For example, records of two runs in one file."""
    records = [
        build_case_record("step", name, seconds) for name, seconds in (("x", 1), ("y", 2), ("x", 3))
    ]
    save_records(tmp_path / "a.json", records)
    for rows, expected in (("", records), (": y; x", [records[1], records[0], records[2]])):
        page = tmp_path / "page.md"
        page.write_text(f"<!-- bench: a.json step{rows} -->\n<!-- /bench -->\n")
        renew(page, tmp_path)
        assert table(expected) in page.read_text()


GOOD = "<!-- bench: a.json step -->\nold\n<!-- /bench -->\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- bench: missing.json step -->\n<!-- /bench -->\n", "cannot read .*missing.json"),
        ("<!-- bench: a.json loader -->\n<!-- /bench -->\n", "no case 'loader', only step, peers"),
        ("<!-- bench: a.json -->\n<!-- /bench -->\n", "name a case of .*: step, peers"),
        ("<!-- bench: a.json step -->\nold\n", "not closed"),
        (f"<!-- bench: a.json step -->\n{GOOD}", "line 4: .*not closed"),
        ("<!-- bench: a.json step: x; z -->\n<!-- /bench -->\n", "no row 'z', only x"),
        ("<!-- soak: cut.json -->\n<!-- /soak -->\n", "cut.json is damaged: .*'pipeline'"),
        (
            "<!-- soak: a.json -->\n<!-- /soak -->\n",
            "a.json holds no record of fastsiam bench soak",
        ),
        ("<!-- study: old.json -->\n<!-- /study -->\n", "old.json is damaged: .*'cpu'"),
    ],
)
def test_errors_leave_page_unchanged(tmp_path: Path, text: str, message: str) -> None:
    file = save_records(
        tmp_path / "a.json", [build_case_record("step", "x"), build_case_record("peers", "y")]
    )
    soak = json.loads(next((ROOT / "bench/results/soak").glob("*.json")).read_text())
    (tmp_path / "cut.json").write_text(json.dumps(soak | {"runs": [{}]}))
    study = (ROOT / "bench/results/study/demo/predictor.json").read_text()
    (tmp_path / "old.json").write_text(study.replace('"cpu"', '"chip"'))
    readme = tmp_path / "README.md"
    readme.write_text(GOOD + text)
    with pytest.raises(DataError, match=message) as error:
        renew(readme, tmp_path)
    assert "\n" not in str(error.value) and readme.read_text() == GOOD + text
    with pytest.raises(DataError, match="cannot write the report"):
        write_report([file], file)


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record["environment"].pop("cpu"),
        lambda record: record["environment"].pop("packages"),
        lambda record: record["environment"].clear(),
        lambda record: record.update(images_per_second="fast"),
        lambda record: record.update(facts=7),
        lambda record: record.update(n=[3]),
    ],
)
def test_file_of_corrupt_record_is_named_in_error(
    change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    file = save_records(tmp_path / "a.json", [build_case_record("step", "x")])
    (record,) = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps([record]))
    readme = tmp_path / "README.md"
    readme.write_text(GOOD)
    for fails in (lambda: write_report([file], tmp_path / "out"), lambda: renew(readme, tmp_path)):
        with pytest.raises(DataError, match=r"a\.json is damaged: a value in it is") as error:
            fails()
        assert "\n" not in str(error.value)
    assert readme.read_text() == GOOD and not (tmp_path / "out").exists()


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES_WITH_TABLES = [
    page for page in PAGES if re.search("<!-- (bench|study|soak):", page.read_text())
]


def test_every_record_file_is_cited_in_docs() -> None:
    text = " ".join(page.read_text() for page in PAGES)
    results = ROOT / "bench" / "results"
    for file in [*results.glob("*.json"), *results.glob("study/**/*.json")]:
        assert str(file.relative_to(results)) in text, file


def test_published_tables_match_records(tmp_path: Path) -> None:
    copy = tmp_path / "copy.md"
    for page in PAGES_WITH_TABLES:
        copy.write_bytes(page.read_bytes())
        assert renew(copy, page.parent)
        assert copy.read_text() == page.read_text(), page
