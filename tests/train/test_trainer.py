"""The training loop: its log lines and files, monitors, and collapse as in Fig. 2 of the paper."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from fastsiam.config import TrainConfig
from fastsiam.errors import TrainingError
from fastsiam.methods import build_method
from fastsiam.model.numerics import FiniteCheck
from fastsiam.pipelines import build_loader
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from fastsiam.train import metrics
from fastsiam.train.metrics import rank_of_gram, z_std
from fastsiam.views.batch import Batch
from tests.configs import flags, with_settings
from tests.conftest import write_images
from tests.processes import Forked, run_program
from tests.train.runs import history, train_run


def test_training_continues_while_eigenvalues_are_computed(
    small: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log line of step 2 is written after step 3 and before the line of step 4."""
    config = with_settings(small, batch=4, epochs=1, log_every=2)
    expected = history(train_run(config, out=tmp_path / "at once"))
    run, may_finish = tmp_path / "run", threading.Event()

    def when_it_may(gram: Tensor) -> Tensor:
        assert may_finish.wait(60)
        return rank_of_gram(gram)

    def look(step: int, batch: Batch) -> None:
        if step == 3:
            assert not history(run)
            may_finish.set()
        if step == 5:
            assert history(run)[0] == expected[0]

    monkeypatch.setattr(metrics, "host_is_idle", lambda device: True)
    monkeypatch.setattr(metrics, "rank_of_gram", when_it_may)
    train_run(config, look)
    assert may_finish.is_set() and history(run) == expected and len(expected) == 3


def test_run_writes_expected_log_lines_and_files(
    small: TrainConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = train_run(small)
    pattern = r"step 12 \(epoch 4\.00\): loss -?\d\.\d{3}, std \d\.\d\d, rank \d+, "
    stderr = capfd.readouterr().err
    assert re.search(pattern, stderr) and "\ndone: step 12 of 12, saved " in stderr
    assert run == tmp_path / "run"
    lines = read_metrics(run)
    kinds = [line["kind"] for line in lines]
    assert kinds == ["knn", "initial"] + ["train"] * 6 + ["knn"] + ["train"] * 6 + ["knn"]
    fields = {"kind", "step", "epoch", "loss", "z_std", "rank", "lr", "images_per_second"}
    fields |= {"data_wait", "seconds", "since", "seen"}
    train_lines = [line for line in lines if line["kind"] == "train"]
    assert all(set(line) == fields for line in train_lines)
    assert [line["step"] for line in train_lines] == list(range(1, 13))
    assert all(-1 <= line["loss"] <= 1 and 0 <= line["data_wait"] <= 1 for line in train_lines)
    assert all(line["images_per_second"] > 0 for line in train_lines)
    assert all(
        set(line) == {"kind", "epoch", "top1", "k", "temperature", "bank"}
        for line in lines
        if line["kind"] == "knn"
    )
    recorded = json.loads((run / "config.json").read_text())
    assert TrainConfig.from_dict(recorded["config"]) == small
    assert recorded["environment"]["packages"]["torch"] == torch.__version__
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    board = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert [step for step, _ in board] == list(range(1, 13))
    assert [value for _, value in board] == pytest.approx([line["loss"] for line in train_lines])
    tags = {f"{line['kind']}/{name}" for line in lines for name in line}
    places = {
        f"{kind}/{name}" for kind in kinds for name in ("kind", "step", "epoch", "since", "seen")
    }
    assert set(events.Tags()["scalars"]) == tags - places


def test_initial_std_is_measured_once_on_untrained_network(
    small: TrainConfig, tmp_path: Path
) -> None:
    """The initial std is measured once, also for a run that is resumed or branched off."""
    config = with_settings(small, head_bn="none", knn_every=0)
    run = train_run(config, max_steps=2)
    (std,) = [line["z_std"] for line in read_metrics(run) if line["kind"] == "initial"]
    with closing(build_loader(config.data, config.augment, batch=8)) as loader:
        torch.manual_seed(config.numerics.seed)
        method = build_method(config.model, images=loader.images)
        batch = next(iter(loader.epoch(0)))
        assert z_std(method(batch.views, batch.index).embedding).item() == pytest.approx(std)
    branch = tmp_path / "branch"
    for resume, steps in ((run, 3), ("auto", 4)):
        train_run(config, resume=resume, out=branch, max_steps=steps)
        lines = read_metrics(branch)
        assert [line["z_std"] for line in lines if line["kind"] == "initial"] == [std]
    train_run(config)
    assert [line["z_std"] for line in read_metrics(run) if line["kind"] == "initial"] == [std]


def test_knn_first_false_skips_first_evaluation(small: TrainConfig) -> None:
    """This includes a run that restarts because it was killed before its first checkpoint."""

    def kinds(run: Path) -> str:
        return "".join(line["kind"][0] for line in read_metrics(run))

    run = train_run(small, knn_first=False, max_steps=1)
    assert kinds(run) == "it"
    checkpoints.last(run).unlink()
    assert kinds(train_run(small, max_steps=1)) == "kit"
    checkpoints.last(run).unlink()
    train_run(small, knn_first=False)
    assert kinds(run) == "i" + "t" * 6 + "k" + "t" * 6 + "k"


@pytest.mark.parametrize(
    ("settings", "at", "kept"),
    [
        ({"log_every": 10, "save_every": 4}, 5, 4),
        ({"log_every": 100, "knn_every": 1}, 4, 3),  # detected before an evaluation saves
    ],
)
def test_non_finite_loss_stops_run(
    settings: dict[str, int], at: int, kept: int, small: TrainConfig, tmp_path: Path
) -> None:
    """The step is exact however late the check runs, and the last good checkpoint is kept."""
    config = with_settings(small, **{"epochs": 10, "knn_every": 0, **settings})

    def poison(step: int, batch: Batch) -> Batch | None:
        if step == at:
            return replace(batch, views=(batch.view1 * math.nan, batch.view2))
        return None

    good = rf"the last good checkpoint is .*last\.pt \(step {kept}\)"
    advice = "try a lower --lr or --precision fp32$"
    with pytest.raises(TrainingError, match=f"not finite at step {at + 1}; {good}; {advice}"):
        train_run(config, poison)
    assert checkpoints.load(tmp_path / "run").step == kept


def test_step_that_is_logged_and_saved_is_checked_once(
    small: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check exchanges values between ranks, and waits for the device."""
    verdict = Mock(return_value=None)
    monkeypatch.setattr(FiniteCheck, "verdict", verdict)
    train_run(small, epochs=1, log_every=1, save_every=1)
    assert verdict.call_count == 3


@pytest.mark.parametrize("stop_gradient", [True, False])
def test_training_collapses_only_without_stop_gradient(
    stop_gradient: bool, small: TrainConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fig. 2 of the paper in small: without stop-gradient the loss goes to -1 and the std to 0."""
    data = write_images(tmp_path / "many", classes=4, each=64)
    config = with_settings(small, data=data, batch=256, lr=1.0, knn_every=0)
    run = train_run(config, stop_gradient=stop_gradient, epochs=50 if stop_gradient else 100)
    lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    first, last = lines[0], lines[-1]
    assert first["z_std"] > 0.9 and first["loss"] > -0.5
    warnings = capfd.readouterr().err.count("warning: the representation collapsed")
    if stop_gradient:
        assert last["loss"] > -0.8 and last["z_std"] > 0.75 and last["rank"] > 4 and not warnings
    else:
        assert last["loss"] < -0.88 and last["z_std"] < 0.5 and last["rank"] < 2.5
        assert 1 <= warnings < 8  # once per episode, not at every log point


@pytest.mark.usefixtures("slow_eigenvalues")
def test_collapse_guard_stops_run(small: TrainConfig) -> None:
    """It stops although the eigenvalues arrive some steps later."""
    config = with_settings(small, stop_gradient=False, epochs=40, lr=2.0, knn_every=0)
    with pytest.raises(TrainingError, match=r"collapsed at step \d+: std .*usual causes"):
        train_run(config, on_collapse="stop", log_every=10)


def test_collapse_guard_tolerates_small_micro_batches(small: TrainConfig) -> None:
    """Centred outputs of four images span at most three dimensions, which is not a collapse."""
    config = with_settings(small, batch=16, accumulate=4, knn_every=0, on_collapse="stop")
    run = train_run(config, max_steps=1)
    (line,) = [line for line in read_metrics(run) if line["kind"] == "train"]
    assert line["rank"] < 4


def train_without_stderr(arguments: list[str]) -> None:
    """Run the command line with stderr closed, from startup to its exit code."""
    os.close(2)
    sys.stderr = None
    run_program(*arguments)


def test_run_completes_with_closed_stderr(small: TrainConfig) -> None:
    """stderr is closed (``2>&-``). For a full disk see tests/test_console.py."""
    result = Forked(train_without_stderr, ["train", *flags(small)]).wait(120)
    assert result.returncode == 0 and len(history(Path(small.run.out))) == 12
