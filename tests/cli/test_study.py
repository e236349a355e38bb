"""The command line of ``fastsiam study``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from fastsiam.study.catalogue import STUDIES
from tests.processes import fastsiam


def test_list_names_every_study() -> None:
    out = fastsiam("study", "list").stdout
    for study in STUDIES.values():
        assert f"{study.title} ({study.source})" in out
        assert all(row.title in out for row in study.rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "predictr"], "unknown study 'predictr'; did you mean predictor?"),
        (["run", "cifar10", "--data", "x"], "--scale demo generates its own images: leave out"),
        (["table", "all", "--json", "x.json"], "--json and --record apply to a single study"),
        (["table", "batch", "--record", "x", "--scale", "demo"], "--record and --scale cannot be"),
    ],
)
def test_wrong_usage_exits_2(arguments: list[str], message: str) -> None:
    err = fastsiam("study", *arguments, code=2).stderr
    assert message in err and "Traceback" not in err


def test_missing_images_are_rejected_before_run_starts(images: Path, tmp_path: Path) -> None:
    shutil.rmtree(images / "val")
    for data in (tmp_path / "none", images):
        where = ["--data", str(data), "--out", str(tmp_path / "out")]
        err = fastsiam("study", "run", "cifar10", "--scale", "cifar", *where, code=1).stderr
        assert err.startswith("error: ") and str(data) in err and err.count("\n") == 1
        assert "--holdout" not in err
        assert not (tmp_path / "out").exists()


def test_table_without_results_writes_record_and_picture(tmp_path: Path) -> None:
    file, picture = tmp_path / "record.json", tmp_path / "pictures" / "predictor.png"
    out = ["--out", str(tmp_path / "out")]
    stdout = fastsiam("study", "table", "predictor", *out, "--json", str(file)).stdout
    assert "no predictor" in stdout and "seeds to judge by: 0; it takes two" in stdout
    assert [row["paper"] for row in json.loads(file.read_text())["rows"]] == [67.7, 0.1, 1.5, 68.1]
    assert fastsiam("study", "table", "predictor", "--record", str(file)).stdout == stdout
    also = ["--markdown", "--picture", str(picture)]
    page = fastsiam("study", "table", "predictor", "--record", str(file), *also).stdout
    assert "| no predictor " in page
    with Image.open(picture) as image:
        assert image.format == "PNG" and image.width == 900
    err = fastsiam("study", "table", "predictor", "--picture", "a.pdf", code=2).stderr
    assert "--picture a.pdf: its name must end in .png" in err
    err = fastsiam("study", "table", "batch", "--record", str(file), code=2).stderr
    assert "is a record of predictor" in err
    file.write_text(json.dumps(json.loads(file.read_text()) | {"environments": [{"cpu": 1}]}))
    err = fastsiam("study", "table", "predictor", "--record", str(file), code=1).stderr
    assert f"{file} is damaged: " in err and err.count("\n") == 1
