"""``eval detect``: records, messages, resuming, ranks and bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastsiam.config.detect import DetectConfig
from fastsiam.errors import DataError, FastSiamError
from fastsiam.evaluate import record_files
from fastsiam.evaluate.detection import command as detect
from fastsiam.evaluate.detection import open_detection, training
from fastsiam.evaluate.detection.command import evaluate_detection
from fastsiam.evaluate.detection.training import DetectorTraining
from fastsiam.report.run_report import evaluation_tables
from fastsiam.run.records import read_records
from fastsiam.study.detection import _options
from tests.conftest import import_or_skip
from tests.evaluate.detection.tiny import QUICK
from tests.processes import Forked
from tests.ranks import fastsiam_on_ranks
from tests.train.runs import CPU as HERE


def killed_at(call: int, run: Path, config: DetectConfig) -> None:
    """Evaluate, saving after each step, and kill the process before a step."""
    record_files._SECONDS_BETWEEN_SAVES, training._STEPS_BETWEEN_READS = 0.0, 1
    step, calls = DetectorTraining.step, count(1)

    def step_or_die(self: DetectorTraining, *arguments: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *arguments)

    DetectorTraining.step = step_or_die  # type: ignore[assignment,method-assign]
    evaluate_detection(run, config, HERE)


def test_killed_detection_resumes_bit_for_bit(
    run: Path,
    detection_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run killed in its second trial after a save gives the same results and weights."""
    ends: list[dict[str, Any]] = []
    settle = DetectorTraining.compute_precise_bn

    def copy_weights(self: DetectorTraining, batches: Any) -> None:
        ends.append({name: x.clone() for name, x in self.network.state_dict().items()})
        settle(self, batches)

    monkeypatch.setattr(DetectorTraining, "compute_precise_bn", copy_weights)
    images: list[str] = []
    monkeypatch.setattr(detect, "check_same_images", lambda names, _: images.extend(names))
    with pytest.raises(FastSiamError, match="eval detect needs --data"):
        evaluate_detection(run, QUICK, HERE)
    before = (run / "checkpoints" / "last.pt").read_bytes()
    config = replace(QUICK, data=str(detection_data / "voc"), trials=2)
    record = evaluate_detection(run, config, HERE)
    truth = [
        one
        for name in ("train", "val")
        for one in open_detection("voc07", detection_data / "voc", name).pictures
    ]
    assert images == [f"{one.file.name} {record.data.labels_crc32}" for one in truth]
    stderr = capsys.readouterr().err
    assert "C4 of torchvision's parts, Faster R-CNN: 3 steps of 2" in stderr
    assert (
        "not the protocol's: steps 3 (not 24,000); warmup 1 (not 100); batch 2 (not 16)" in stderr
    )
    assert "backbone resnet10 (not resnet50)" in stderr
    assert [line["seed"] for line in record.results] == [0, 1]
    assert set(record.results[0]) == {"trial", "seed", "AP50", "AP", "AP75"}
    means, spread = record.over_trials
    assert means["AP"] == pytest.approx(np.mean([line["AP"] for line in record.results]))
    assert spread["AP"] == pytest.approx(np.std([line["AP"] for line in record.results], ddof=1))
    assert "voc07, C4 of torchvision's parts: AP50" in record.summary[0]
    assert "SimSiam, base 75.5 / 47.0 / 50.2" in record.summary[1]
    assert record.summary[2].startswith("not the protocol's: ")
    assert (run / "checkpoints" / "last.pt").read_bytes() == before
    (file,) = (run / "eval").iterdir()
    assert file.name.startswith("detect-voc07-c4-epoch") and read_records(run) == [record]
    plain = json.loads(file.read_text())
    assert plain["mean"] == means and plain["deviation"] == spread
    (table,) = evaluation_tables({"run": [record]})
    assert table.title == "Detection"
    assert "C4 of torchvision" in str(table.rows)
    assert "; unlike the paper: steps 3 (not 24,000), " in table.facts
    assert "backbone resnet10 (not resnet50)" in table.facts

    assert Forked(killed_at, 6, run, config).wait().returncode == -signal.SIGKILL
    assert file.with_suffix(".partial").exists()
    resumed = evaluate_detection(run, config, HERE)
    assert "resuming after trial 2 of 2, step 2 of 3" in capsys.readouterr().err
    assert (record.speed["steps"], resumed.speed["steps"]) == (6, 1)  # those of the last call
    assert resumed.results == record.results and not file.with_suffix(".partial").exists()
    _, last, again = ends
    for name, value in last.items():
        assert torch.equal(value, again[name]), name


def test_test_set_without_objects_is_rejected(
    run: Path, detection_data: Path, tmp_path: Path
) -> None:
    shutil.copytree(detection_data / "voc", tmp_path / "voc")
    for name in (tmp_path / "voc").rglob("*.xml"):
        name.write_text(name.read_text().replace("<difficult>0", "<difficult>1"))
    with pytest.raises(DataError, match=r"^VOC test 2007 in .* has no objects to detect$"):
        detect.preflight(run, replace(QUICK, data=str(tmp_path / "voc")))


def test_coco_record_has_mask_scores(run: Path, detection_data: Path) -> None:
    import_or_skip("pycocotools", "detection")
    record = evaluate_detection(
        run, replace(QUICK, data=str(detection_data / "coco"), task="coco", untrained=True), HERE
    )
    names = ("AP50", "AP", "AP75")
    assert set(record.results[0]) == {"trial", "seed", *names, *(f"mask {x}" for x in names)}
    assert record.network.untrained and record.over_trials[1]["AP"] is None
    assert record.summary[0].startswith("untrained network, coco, C4")
    assert "coco masks" in record.summary[2] and "54.2 / 33.2 / 35.2" in record.summary[3]


@pytest.mark.slow  # starts two processes
def test_two_ranks_write_one_record(run: Path, detection_data: Path) -> None:
    flags = _options(replace(QUICK, data=str(detection_data / "voc"), gpus=2))
    results = fastsiam_on_ranks(2, "eval", "detect", str(run), *flags)
    assert "AP50" in results[0].stdout and not results[1].stdout
    (record,) = read_records(run)
    assert record.images.ranks == 2 and record.images_validated == 6
