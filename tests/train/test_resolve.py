"""How ``auto`` settings resolve: once per run, equal on all ranks, and kept when it resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastsiam.config import TrainConfig
from fastsiam.config.evaluate import EvalConfig
from fastsiam.config.settings_files import RunSettings
from fastsiam.evaluate.subject import open_subject
from fastsiam.report.run_report import write_report
from fastsiam.run import checkpoint as checkpoints
from tests.configs import flags, with_settings
from tests.pipelines.cases import make_readable
from tests.processes import fastsiam
from tests.train.runs import CPU, train_run


def resolved_pipelines(run: Path) -> tuple[str, str]:
    """Return the pipelines recorded in config.json and in the checkpoint."""
    return RunSettings.read(run).config.data.pipeline, checkpoints.load(run).config.data.pipeline


def test_pipeline_is_resolved_once_and_kept(small: TrainConfig, tmp_path: Path) -> None:
    config, run = with_settings(small, pipeline="auto"), tmp_path / "run"
    first = fastsiam("train", *flags(config), "--max-steps", "3").stderr
    assert first.count("pipeline memory: 24 images take 41 kB of ") == 1
    assert resolved_pipelines(run) == ("memory", "memory")
    assert RunSettings.read(run).user_config.data.pipeline == "auto"
    assert json.loads((run / "config.json").read_text())["resolved"] == {
        "ranks": 1,
        "device": "cpu",
        "images_per_rank": 8,
        "peak_lr": config.optim.lr * 8 / 256,
        "eval_resize": config.augment.crop,
        "steps_per_epoch": 3,
        "last_step": 3,
    }
    # Resuming by the path alone keeps what the user asked for, and what was chosen for it.
    fastsiam("train", "--resume", str(run), "--max-steps", "4")
    asked = RunSettings.read(run).user_config
    assert (asked.data.pipeline, asked.run.max_steps) == ("auto", 4)
    assert resolved_pipelines(run) == ("memory", "memory")
    # A resumed run keeps its pipeline unless the user passes another one.
    result = fastsiam("train", *flags(config), "--pipeline", "torchvision", "--max-steps", "6")
    assert "take " not in result.stderr
    assert resolved_pipelines(run) == ("torchvision", "torchvision")
    later = fastsiam("train", *flags(config)).stderr
    assert "pipeline torchvision: as when the run started" in later
    assert resolved_pipelines(run) == ("torchvision", "torchvision")
    assert "pipeline torchvision" in write_report([run], tmp_path / "page.html").read_text()


@pytest.mark.ffcv
def test_pipeline_that_cannot_read_images_is_replaced(
    small: TrainConfig, images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Evaluations and resumed runs choose another pipeline, unless the user passes this one."""
    beton = make_readable("ffcv", images / "train")
    run = train_run(small, pipeline="ffcv", data=beton, knn_every=0, max_steps=2)

    def pipeline(**settings: Any) -> str:
        return open_subject(run, EvalConfig(**settings), CPU).data.pipeline

    assert pipeline() == "ffcv"
    assert pipeline(data=str(images)) == "native"
    assert pipeline(data=str(images), pipeline="ffcv") == "ffcv"  # users are told why it fails
    train_run(small, pipeline="auto", knn_every=0, max_steps=4)
    assert resolved_pipelines(tmp_path / "run") == ("memory", "memory")
    assert "pipeline memory: 24 images" in capfd.readouterr().err


def test_rank_0_chooses_pipeline_for_all_ranks(ranks: Any) -> None:
    """Free memory is the minimum over the ranks."""
    (first, line, free), (second, none, _) = ranks("pipelines", 2)
    assert first == second == "ffcv" and (line, none) == ("pipeline ffcv: of rank 0", "")
    assert free == 1000


def test_ranks_on_different_processors_agree_on_precision(ranks: Any) -> None:
    assert ranks("precisions", 2) == [["fp32", "torch.float32"]] * 2


def test_path_from_fastsiam_data_is_recorded(
    small: TrainConfig, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later commands use the run's images, whatever the variable is set to by then."""
    monkeypatch.setenv("FASTSIAM_DATA", str(images))
    run = train_run(small, data="", max_steps=1)
    monkeypatch.setenv("FASTSIAM_DATA", str(tmp_path / "others"))
    recorded = RunSettings.read(run)
    assert (recorded.config.data.data, recorded.user_config.data.data) == (str(images), "")
    assert open_subject(run, EvalConfig(), CPU).data.root == images
