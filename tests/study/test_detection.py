"""``fastsiam study detect``: learning rate search, finished and missing rows, errors."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastsiam.config.detect import DetectConfig
from fastsiam.config.study import StudyDetectConfig
from fastsiam.errors import FastSiamError
from fastsiam.evaluate.subject import open_network
from fastsiam.interchange import Input
from fastsiam.methods import build_method
from fastsiam.run.log import read_metrics
from fastsiam.study import detection
from fastsiam.study.detection import (
    DetectionRow,
    detection_rows,
    run_detection,
    table,
    write_detection,
)
from fastsiam.study.scales import scale
from tests.conftest import ROOT
from tests.evaluate.conftest import trained_run  # noqa: F401
from tests.evaluate.detection.conftest import detection_data  # noqa: F401
from tests.evaluate.detection.tiny import QUICK
from tests.processes import Forked, fork_programs


def run_and_write_detection(
    rows: list[DetectionRow], config: StudyDetectConfig, detect: DetectConfig, out: Path
) -> None:
    """Run the study and write its record like the command, with forked child processes."""
    fork_programs()
    write_detection(out / "record.json", run_detection(rows, config, detect, out), config, detect)


def test_detection_rows_find_networks(trained_run: Path, tmp_path: Path) -> None:  # noqa: F811
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
    without = run_detection(
        [row for row in rows if not row.network], StudyDetectConfig(), QUICK, tmp_path
    )
    assert "| SwAV " in table(without, QUICK) and "75.5" in table(without, QUICK)


def test_scratch_does_not_need_a_run(tmp_path: Path) -> None:
    """Its network has the initial weights, and the preprocessing, that the run would have."""
    rows = detection_rows(scale("demo"), tmp_path, StudyDetectConfig())
    assert [row.title for row in rows if row.network] == ["scratch"]
    run_config = scale("demo").settings("epochs-2x")
    torch.manual_seed(0)
    initial = build_method(run_config.model).get_submodule("backbone").state_dict()
    network = open_network(Path(rows[0].network), replace(QUICK, untrained=rows[0].untrained))
    state = network.network().state_dict()
    assert all(torch.equal(state[name], value) for name, value in initial.items())
    assert network.input == Input.of(run_config)


def test_detectors_are_trained_once(
    trained_run: Path,  # noqa: F811
    detection_data: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    rows = [DetectionRow("SimSiam, base", str(trained_run)), DetectionRow("BYOL", "", "run it")]
    detect = replace(QUICK, data=str(detection_data / "voc"), steps=2)
    config = StudyDetectConfig(lrs=(1e30, 0.02))
    result = Forked(run_and_write_detection, rows, config, detect, tmp_path).wait(300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped row 'BYOL': run it" in result.stderr
    assert "SimSiam, base, rate 1e+30, seed 0: diverged" in result.stderr
    row, missing = json.loads((tmp_path / "record.json").read_text())["rows"]
    assert row["lr"] == 0.02 and missing["trials"] == []
    assert row["searched"] == [[0.02, row["trials"][0]["AP"]]] and row["trials"][0]["seed"] == 0
    assert "steps 2 (not 24,000)" in row["differences"]
    assert not any(text.startswith(("trials", "lr ")) for text in row["differences"])

    (file,) = (tmp_path / "voc07").glob("*.json")
    before = file.stat().st_mtime_ns
    results = run_detection(rows, config, detect, tmp_path)  # nothing is left to do
    assert file.stat().st_mtime_ns == before
    head, _, first, second, *_ = table(results, detect).splitlines()
    assert "paper: AP50" in head and "75.5" in first and "0.02" in first
    assert "BYOL" in second and second.split("|")[-2].strip() == "0"

    file.write_text("{}")
    with pytest.raises(FastSiamError, match="is not an evaluation record; move it"):
        run_detection(rows, config, detect, tmp_path)


def test_best_rate_is_used_for_all_trials(
    trained_run: Path,  # noqa: F811
    detection_data: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Diverged trials are reported; other annotations or settings are evaluated separately.

    Data and runs may move.
    """
    record_paths: list[Path] = []
    path = next(ROOT.glob("bench/results/cifar10-evaluation/eval/knn-*.json"))
    plain = json.loads(path.read_text()) | {"kind": "detect", "protocol": {"differences": []}}

    def evaluate(row: DetectionRow, trial: DetectConfig, path: Path, diverged: Path) -> None:
        record_paths.append(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if trial.seed == 1:
            diverged.touch()
        else:
            line = {"trial": 1, "seed": trial.seed, "AP50": 30.0, "AP": 1 / trial.lr, "AP75": 10.0}
            path.write_text(json.dumps(plain | {"results": [line]}))

    monkeypatch.setattr(detection, "_evaluate", evaluate)
    rows = [DetectionRow(title, str(trained_run)) for title in ("SimSiam, base", "scratch")]
    config = StudyDetectConfig(lrs=(0.02, 0.01))
    detect = replace(QUICK, data=str(detection_data / "voc"), trials=3)
    results = run_detection(rows, config, detect, tmp_path)
    assert {(row.lr, len(row.trials), row.diverged) for row in results} == {(0.01, 2, 1)}
    assert [trial["seed"] for trial in results[0].trials] == [0, 2]
    assert results[0].searched == {0.02: 50.0, 0.01: 100.0}
    assert "scratch: 1 further trial diverged." in table(results, detect)
    assert len({*record_paths}) == 8
    data = Path(shutil.copytree(detection_data / "voc", tmp_path / "voc"))
    moved_run = str(shutil.copytree(trained_run, tmp_path / "run"))
    moved = [replace(row, network=moved_run) for row in rows], replace(detect, data=str(data))
    run_detection(moved[0], config, moved[1], tmp_path)
    assert len(record_paths) == 8
    names = next(data.rglob("ImageSets/Main/trainval.txt"))
    names.write_text("\n".join(names.read_text().splitlines()[:-1]))
    for trial in (replace(detect, steps=4), replace(detect, precision="bf16"), moved[1]):
        before = len(record_paths)
        run_detection(rows, config, trial, tmp_path)
        assert len({*record_paths}) == len(record_paths) == before + 8
    run_detection(rows, config, detect, tmp_path)
    assert len(record_paths) == 32


def test_missing_data_or_run_stops_before_training(
    trained_run: Path,  # noqa: F811
    detection_data: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    rows = [DetectionRow("SwAV", str(trained_run))]
    detect = replace(QUICK, data=str(detection_data / "voc"))
    with pytest.raises(FastSiamError, match=r"no data at .*nowhere"):
        run_detection(rows, StudyDetectConfig(), replace(detect, data="nowhere"), tmp_path / "none")
    with_missing = [*rows, DetectionRow("BYOL", str(tmp_path / "gone"))]
    with pytest.raises(FastSiamError, match="gone"):
        run_detection(with_missing, StudyDetectConfig(), detect, tmp_path / "none")
    assert not (tmp_path / "none").exists()  # both errors come before any training
    shutil.copytree(detection_data / "voc", tmp_path / "voc")
    for image in (tmp_path / "voc").rglob("*.jpg"):
        image.write_bytes(b"none")
    detect = replace(detect, data=str(tmp_path / "voc"))
    result = Forked(
        run_and_write_detection, rows, StudyDetectConfig(), detect, tmp_path / "out"
    ).wait(300)
    assert result.returncode == 1
    message = r"FastSiamError: SwAV, rate 0\.01, seed 0 failed \(.*\); see .*\.log\n\Z"
    assert re.search(message, result.stderr), result.stderr
    with pytest.raises(ValueError, match="lrs must be learning rates without duplicates"):
        StudyDetectConfig(lrs=(0.1, 0.1))
