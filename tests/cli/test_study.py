"""``fastsiam study`` as a command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fastsiam.study.catalogue import STUDIES
from tests.processes import fastsiam


def test_list_names_every_study() -> None:
    out = fastsiam("study", "list").stdout
    for study in STUDIES.values():
        assert f"{study.title} ({study.source})" in out
        assert all(row.title in out for row in study.rows)


@pytest.mark.parametrize("verb", ["run", "table"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["predictr"], "unknown study 'predictr'; there are stop-gradient"),
        (["all", "predictor", "x"], "unknown study 'x'"),
        (["predictor", "--scale", "huge"], "'huge' is not one of 'paper', 'cifar'"),
        (["predictor", "--epochs", "-1"], "epochs must be at least 0, not -1"),
        ([], "Missing argument"),
    ],
)
def test_wrong_usage_is_one_line(verb: str, arguments: list[str], said: str) -> None:
    err = fastsiam("study", verb, *arguments, code=2).stderr
    assert said in err and "Traceback" not in err


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    err = fastsiam("study", "table", "all", "--json", str(tmp_path / "x.json"), code=2).stderr
    assert "--json and --record are of one study" in err
    err = fastsiam("study", "run", "predictor", "--parallel", "0", code=2).stderr
    assert "parallel must be at least 1" in err


def test_missing_images_are_said_before_a_run_begins(tmp_path: Path) -> None:
    where = ["--data", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    err = fastsiam("study", "run", "batch", "--scale", "cifar-small", *where, code=1).stderr
    assert "error: " in err and str(tmp_path / "none") in err
    assert not (tmp_path / "out").exists()


def test_labels_are_looked_for_before_a_run_begins(images: Path, tmp_path: Path) -> None:
    shutil.rmtree(images / "val")
    where = ["--data", str(images), "--out", str(tmp_path / "out")]
    err = fastsiam("study", "run", "cifar10", "--scale", "cifar", *where, code=1).stderr
    assert err.startswith("error: ") and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_table_of_nothing_yet_and_its_record(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    out = ["--out", str(tmp_path / "out")]
    shown = fastsiam("study", "table", "predictor", *out, "--json", str(file)).stdout
    assert "no predictor" in shown and "seeds to judge by: 0; it takes two" in shown
    assert [row["paper"] for row in json.loads(file.read_text())["rows"]] == [67.7, 0.1, 1.5, 68.1]
    assert fastsiam("study", "table", "predictor", "--record", str(file)).stdout == shown
    page = fastsiam("study", "table", "predictor", "--record", str(file), "--markdown").stdout
    assert "| no predictor " in page
    err = fastsiam("study", "table", "batch", "--record", str(file), code=2).stderr
    assert "is a record of predictor" in err
