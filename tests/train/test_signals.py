"""Signals sent to a process, to ranks and during evaluations; a closed terminal; torchrun."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from PIL import Image

from fastsiam.config import TrainConfig
from fastsiam.distributed import Place, Signalled, StopSignals, stop_signals
from fastsiam.errors import Interrupted, TrainingError
from fastsiam.evaluate.features import feature_batches
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from fastsiam.run.trackers import TRACKERS
from fastsiam.signals import ECHO
from fastsiam.train import knn_monitor
from fastsiam.train.trainer import Trainer
from tests.configs import flags, with_settings
from tests.conftest import ROOT
from tests.processes import Forked, command, fastsiam, run_program, signals_handled, wait_until
from tests.tiers import slow
from tests.train.runs import history, train_run, verify_run


def press_ctrl_c(process: Forked) -> None:
    """Send SIGINT to every process of the job, as Ctrl-C in a terminal does."""
    os.killpg(process.pid, signal.SIGINT)


@pytest.fixture
def endless_config(small: TrainConfig) -> TrainConfig:
    return with_settings(small, epochs=30000, save_every=10**6, knn_every=0)


def train_with_long_echo(*options: str) -> None:
    """Train; for a minute, further signals are repetitions, as a busy machine may delay them."""
    vars(stop_signals).update(ECHO=60.0, _LONG_ECHO=60.0)
    run_program("train", *options)


@pytest.mark.parametrize(
    ("processes", "number", "code"),
    [
        (1, signal.SIGUSR1, 138),
        (1, signal.SIGINT, 130),
        (2, signal.SIGTERM, 143),
        slow((2, signal.SIGINT, 130)),
        slow((1, signal.SIGHUP, 129)),
    ],
)
def test_signal_saves_checkpoint_and_exits(
    processes: int, number: int, code: int, endless_config: TrainConfig, tmp_path: Path
) -> None:
    """The signal goes to the launcher, which forwards it, and to the ranks, as from a terminal.

    A rank therefore receives it twice, almost at once.
    """
    config = with_settings(endless_config, pipeline="torchvision", workers=1, gpus=processes)
    run = tmp_path / "run"
    process = Forked(train_with_long_echo, *flags(config), session=True)
    wait_until(process, lambda: len(history(run)) >= 5)
    for _ in range(2 if number == signal.SIGINT else 1):
        os.killpg(process.pid, number)
    result = process.wait(60)
    assert result.returncode == code, result.stderr
    assert f"{signal.Signals(number).name}: stopped after step" in result.stderr
    assert f"last.pt; pass --resume {run} to continue from there\n" in result.stderr
    assert "Traceback" not in result.stderr
    state = checkpoints.load(run)
    assert state.step >= 5 and state.step == read_metrics(run)[-1]["step"]


def _run_under_nohup(*arguments: str) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run_program(*arguments)


def test_run_under_nohup_ignores_sighup(endless_config: TrainConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = Forked(
        _run_under_nohup, "train", *flags(with_settings(endless_config, gpus=2)), session=True
    )
    wait_until(process, lambda: len(history(run)) >= 5)
    os.killpg(process.pid, signal.SIGHUP)
    lines = len(history(run))
    wait_until(process, lambda: len(history(run)) >= lines + 5)
    os.killpg(process.pid, signal.SIGTERM)
    result = process.wait(60)
    assert result.returncode == 128 + signal.SIGTERM, result.stderr
    assert "SIGTERM: stopped after step" in result.stderr and "SIGHUP" not in result.stderr


def enlarge_images(images: Path) -> None:
    """Make the images so large that an evaluation takes a long time."""
    first, *other_paths = images.rglob("*.jpg")
    Image.effect_noise((8000, 6000), 60).convert("RGB").save(first)
    for path in other_paths:
        path.unlink()
        path.hardlink_to(first)


def train_and_show_evaluation(evaluates: Path, options: Sequence[str]) -> None:
    """Train; create the file ``evaluates`` when the first evaluation begins, which does not end."""
    evaluate = feature_batches

    def endless(*arguments: Any, **options: Any) -> Iterator[Any]:
        evaluates.touch()
        for batch in evaluate(*arguments, **options):
            threading.Event().wait()  # signals still arrive
            yield batch

    with patch.object(knn_monitor, "feature_batches", endless):
        run_program("train", *options)


def test_second_sigint_during_first_evaluation_exits(
    small: TrainConfig, images: Path, tmp_path: Path
) -> None:
    enlarge_images(images)
    config = with_settings(small, pipeline="torchvision", workers=2, knn_every=1)
    evaluates = tmp_path / "evaluates"
    process = Forked(train_and_show_evaluation, evaluates, flags(config), session=True)
    wait_until(process, evaluates.exists)
    press_ctrl_c(process)
    wait_until(process, lambda: "a second signal exits at once" in process.messages())
    time.sleep(2 * ECHO)  # so that the second signal is not taken for an echo of the first
    assert process.poll() is None
    press_ctrl_c(process)
    result = process.wait(60)
    assert result.returncode == 130, result.stderr
    assert (
        "SIGINT: stopping before the next step or batch; a second signal exits at once"
        in result.stderr
    )
    assert "Traceback" not in result.stderr
    assert not read_metrics(tmp_path / "run")


def test_evaluation_interrupted_by_signal_is_repeated(
    small: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation is repeated when the run resumes, which logs what an undisturbed run would."""
    config = with_settings(small, max_steps=6, knn_every=1, log_every=2)
    run, evaluate = Path(config.run.out), feature_batches

    def signalled(*arguments: Any, **options: Any) -> Iterator[Any]:
        for batch in evaluate(*arguments, **options):
            if checkpoints.last(run).exists():  # skip the first evaluation
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    monkeypatch.setattr(knn_monitor, "_KNN_BATCH", {"cpu": 4})
    with monkeypatch.context() as patch:
        patch.setattr(knn_monitor, "feature_batches", signalled)
        with pytest.raises(Interrupted, match="SIGTERM: stopped after step 3, saved") as caught:
            train_run(config)
    assert caught.value.exit_code == 128 + signal.SIGTERM
    assert [line["epoch"] for line in read_metrics(run) if line["kind"] == "knn"] == [0]
    assert checkpoints.load(train_run(config)).step == 6
    assert [line["epoch"] for line in read_metrics(run) if line["kind"] == "knn"] == [0, 1]
    assert "3 log lines agree: images and augmentations of steps 1 to 6" in verify_run(run)


def test_trackers_receive_outcome_of_run(
    small: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last evaluation is interrupted, then fails, then succeeds."""
    outcomes: list[str] = []
    monkeypatch.setitem(TRACKERS, "tensorboard", lambda *_: Mock(close=outcomes.append))
    evaluations = [None, Signalled(signal.SIGTERM), TrainingError("no"), None]
    monkeypatch.setattr(Trainer, "_evaluate", Mock(side_effect=evaluations))
    for _ in range(3):
        with contextlib.suppress(Interrupted, TrainingError):
            train_run(small, epochs=1, tracker="tensorboard", knn_every=1)
    assert outcomes == ["KILLED", "FAILED", "FINISHED"]


@pytest.mark.parametrize("launcher", [False, True])
def test_second_sigint_is_repetition_under_launcher(
    launcher: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher forwards Ctrl-C, also to the only rank of a run, which has it already."""
    if launcher:
        monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(stop_signals, "exit_immediately", exits := Mock())
    clock = Mock(monotonic=Mock(return_value=0.0))
    monkeypatch.setattr("fastsiam.signals.time", clock)
    handled = signals_handled(signal.default_int_handler, signal.SIGINT)
    with handled, StopSignals(Place(0, 1, torch.device("cpu"))):
        signal.raise_signal(signal.SIGINT)
        clock.monotonic.return_value += 2 * ECHO
        signal.raise_signal(signal.SIGINT)
    assert exits.called is not launcher


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_during_tracker_close(
    second: signal.Signals, small: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repetition is ignored. The message of another signal replaces that of the first."""
    interrupts = Mock(side_effect=lambda *_: signal.raise_signal(second))
    tracker = Mock(close=interrupts)
    monkeypatch.setitem(TRACKERS, "tensorboard", lambda *_: tracker)
    run = Path(small.run.out)

    def stop(step: int, _: Any) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    handled = signals_handled(signal.default_int_handler, signal.SIGINT, signal.SIGTERM)
    with handled, pytest.raises(Interrupted) as caught:
        train_run(small, stop, tracker="tensorboard", knn_every=0)
    step, last = checkpoints.load(run).step, checkpoints.last(run)
    assert str(caught.value) == (
        f"{second.name}: stopped after step {step}, saved {last}; "
        f"pass --resume {run} to continue from there"
    )


def test_sigint_ends_evaluation_command_without_traceback(
    stopped_copy: TrainConfig, images: Path
) -> None:
    """An evaluation exits without a traceback."""
    enlarge_images(images)
    options = ["--data", str(images), "--workers", "2"]
    process = command("eval", "knn", stopped_copy.run.out, *options, session=True)
    wait_until(process, lambda: "images from" in process.messages())
    press_ctrl_c(process)
    result = process.wait(60)
    assert result.returncode == 130, result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_training_runs_under_torchrun(small: TrainConfig, tmp_path: Path) -> None:
    config = with_settings(small, epochs=1, knn_every=0)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    line = [*torchrun, "--nproc-per-node", "2", "-m", "fastsiam", "train", *flags(config)]
    subprocess.run(line, cwd=ROOT, check=True, capture_output=True, timeout=120)
    other = with_settings(config, gpus=2, out=str(tmp_path / "other"))
    fastsiam("train", *flags(other))
    assert len(history(tmp_path / "run")) == 3
    assert history(tmp_path / "run") == history(tmp_path / "other")
