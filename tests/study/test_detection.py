"""``fastsiam study detect``: the search of the rate, what is skipped, refused or missing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fastsiam.config.detect import DetectConfig
from fastsiam.config.study import StudyDetectConfig
from fastsiam.errors import FastSiamError
from fastsiam.evaluate.detection.command import preflight
from fastsiam.run.log import read_metrics
from fastsiam.study import detection
from fastsiam.study.detection import (
    DetectionRow,
    detection_rows,
    do_detection,
    table,
    write_detection,
)
from fastsiam.study.scales import scale
from tests.evaluate.conftest import trained_run  # noqa: F401
from tests.evaluate.detection.conftest import made  # noqa: F401
from tests.evaluate.detection.test_command import QUICK
from tests.processes import Forked, fork_programs
from tests.run.test_records import record_of


def work(rows: list[DetectionRow], config: StudyDetectConfig, how: DetectConfig, out: Path) -> None:
    """Do what the command does, with the children forked; write the record."""
    fork_programs()
    try:
        write_detection(out / "record.json", do_detection(rows, config, how, out), config, how)
    except FastSiamError as error:
        print(error)
        raise SystemExit(1) from error


def test_rows_and_their_networks(trained_run: Path, tmp_path: Path) -> None:  # noqa: F811
    base, folder = scale("demo"), tmp_path / "epochs-2x-seed-0"
    shutil.copytree(trained_run, folder)
    last = read_metrics(folder)[-1] | {"epoch": 2.0 * base.base.optim.epochs}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(last) + "\n")
    rows = detection_rows(base, tmp_path, StudyDetectConfig(supervised="resnet50.pth"))
    networks = {row.title: Path(row.network).name for row in rows if row.network}
    assert networks == {
        "scratch": "epochs-2x-seed-0",
        "ImageNet supervised": "resnet50.pth",
        "SimSiam, base": "epochs-2x-seed-0",
    }
    assert [row.title for row in rows if row.untrained] == ["scratch"]
    missing = {row.title: row.missing for row in rows if not row.network}
    assert "byol-2x-seed-0 is not trained: fastsiam study run related-2x" in missing["BYOL"]
    assert "fastsiam study run transfer --scale" in missing["SimSiam, optimal"]
    without = do_detection(
        [row for row in rows if not row.network], StudyDetectConfig(), QUICK, tmp_path
    )
    assert "| SwAV " in table(without, QUICK) and "75.5" in table(without, QUICK)


def test_the_best_rate_is_used_for_all_trials(
    trained_run: Path,  # noqa: F811
    made: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    rows = [DetectionRow("SimSiam, base", str(trained_run)), DetectionRow("BYOL", "", "run it")]
    how = replace(QUICK, data=str(made / "voc"), trials=2, steps=2)
    config = StudyDetectConfig(lrs=(0.02, 1e30, 0.01))
    ended = Forked(work, rows, config, how, tmp_path).wait(300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "no row 'BYOL': run it" in ended.stderr
    assert "SimSiam, base, rate 1e+30, seed 0: diverged" in ended.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    row, missing = record["rows"]
    assert [lr for lr, _ in row["searched"]] == [0.01, 0.02] and missing["trials"] == []
    assert dict(map(tuple, row["searched"]))[row["lr"]] == max(ap for _, ap in row["searched"])
    assert [trial["seed"] for trial in row["trials"]] == [0, 1]
    assert row["trials"][0]["AP"] == dict(map(tuple, row["searched"]))[row["lr"]]
    assert "steps 2 (not 24,000)" in row["differences"]
    assert not any(text.startswith(("trials", "lr ")) for text in row["differences"])

    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    found = do_detection(rows, config, how, tmp_path)  # nothing is left to do
    assert all(path.stat().st_mtime_ns == then for path, then in files.items())
    head, _, first, second, *_ = table(found, how).splitlines()
    assert "paper: AP50" in head and "75.5" in first and f"{row['lr']:g}" in first
    assert "BYOL" in second and second.split("|")[-2].strip() == "0"

    names = next((made / "voc").rglob("Main/test.txt"))
    before = names.read_text()
    names.write_text("\n".join(before.splitlines()[1:]))
    with pytest.raises(FastSiamError, match="seed 0 was trained on other annotations than those"):
        do_detection(rows, config, how, tmp_path)
    names.write_text(before)

    broken = next(path for path in files if "seed-1" in path.name)
    broken.write_text("{}")
    with pytest.raises(FastSiamError, match="is no record of an evaluation; delete it"):
        do_detection(rows, config, how, tmp_path)


def test_other_weights_data_and_settings_are_other_evaluations(
    trained_run: Path,  # noqa: F811
    made: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trial that diverges is told, with whatever the further ones give."""
    done: list[Path] = []
    line = {"trial": 1, "seed": 0, "AP50": 30.0, "AP": 20.0, "AP75": 10.0}
    plain = record_of("knn").to_dict() | {
        "kind": "detect", "results": [line], "protocol": {"differences": []}
    }  # fmt: skip
    plain["data"]["labels_crc32"] = preflight(trained_run, replace(QUICK, data=str(made / "voc")))

    def evaluate(row: DetectionRow, how: DetectConfig, path: Path, diverged: Path) -> None:
        done.append(path)
        diverged.parent.mkdir(parents=True, exist_ok=True)
        if how.seed == 1:
            diverged.touch()
        else:
            path.write_text(json.dumps(plain))

    monkeypatch.setattr(detection, "_evaluate", evaluate)
    rows = [DetectionRow(title, str(trained_run)) for title in ("SimSiam, base", "scratch")]
    config = StudyDetectConfig(lrs=(0.02,))
    how = replace(QUICK, data=str(made / "voc"), trials=3)
    found = do_detection(rows, config, how, tmp_path)
    assert [(len(row.trials), row.diverged) for row in found] == [(2, 1), (2, 1)]
    assert "scratch: 1 further trial diverged." in table(found, how)
    assert len({*done}) == 6
    shutil.copytree(made / "voc", tmp_path / "voc")
    for other in ({"steps": 4}, {"precision": "bf16"}, {"data": str(tmp_path / "voc")}):
        before = len(done)
        do_detection(rows, config, replace(how, **other), tmp_path)
        assert len({*done}) == len(done) == before + 6
    do_detection(rows, config, how, tmp_path)
    assert len(done) == 24


def test_failures_stop_it(trained_run: Path, made: Path, tmp_path: Path) -> None:  # noqa: F811
    rows = [DetectionRow("SwAV", str(trained_run))]
    how = replace(QUICK, data=str(made / "voc"))
    with pytest.raises(FastSiamError, match=r"no data at .*nowhere"):
        do_detection(rows, StudyDetectConfig(), replace(how, data="nowhere"), tmp_path / "none")
    gone = [*rows, DetectionRow("BYOL", str(tmp_path / "gone"))]
    with pytest.raises(FastSiamError, match="gone"):
        do_detection(gone, StudyDetectConfig(), how, tmp_path / "none")
    assert not (tmp_path / "none").exists()  # both are told before anything is trained
    shutil.copytree(made / "voc", tmp_path / "voc")
    for image in (tmp_path / "voc").rglob("*.jpg"):
        image.write_bytes(b"none")
    how = replace(how, data=str(tmp_path / "voc"))
    ended = Forked(work, rows, StudyDetectConfig(), how, tmp_path / "out").wait(300)
    assert ended.returncode == 1
    assert "SwAV, rate 0.01, seed 0 failed (" in ended.stdout and ".log" in ended.stdout
    with pytest.raises(ValueError, match="lrs must be rates, each once"):
        StudyDetectConfig(lrs=(0.1, 0.1))
