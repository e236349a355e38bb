"""The loop: exact resume, signals, monitors, collapse as in the paper's Fig. 2, no hidden waits."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastsiam import checkpoint as checkpoints
from fastsiam.checkpoint import Checkpoint
from fastsiam.config import TrainConfig
from fastsiam.console import Console
from fastsiam.distributed import Place
from fastsiam.errors import CheckpointError, DataError, TrainingError
from fastsiam.jobs import train as job
from fastsiam.jobs.subject import labelled_loaders
from fastsiam.jobs.train import train_here
from fastsiam.methods import build_method
from fastsiam.pipelines import build_loader
from fastsiam.training import monitor
from fastsiam.training.collapse import rank_of_gram
from fastsiam.training.log import read_metrics
from fastsiam.training.loop import train
from fastsiam.training.monitor import LogPoints
from fastsiam.training.numerics import FiniteCheck
from fastsiam.training.step import TrainingStep
from fastsiam.views.batch import Batch, Loader
from tests.configs import flags, with_settings
from tests.conftest import ROOT, write_images
from tests.pipelines.cases import PIPELINES, readable
from tests.processes import fastsiam

CPU = Place(0, 1, torch.device("cpu"))


class Killed(BaseException):
    """Ends a run as a kill does: nothing is caught, nothing is saved."""


class Wrapped:
    """A loader that runs ``before(step)`` ahead of each batch."""

    def __init__(self, loader: Loader, before: Any) -> None:
        self._loader, self._before = loader, before
        self.source, self.images, self.steps = loader.source, loader.images, loader.steps

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[Batch]:
        for step, batch in enumerate(
            self._loader.epoch(number, skip=skip), start=number * self.steps + skip
        ):
            yield self._before(step, batch) or batch

    def close(self) -> None:
        self._loader.close()


def run_once(
    config: TrainConfig, folder: Path, before: Any = None, start: Checkpoint | None = None
) -> Path:
    loader = build_loader(
        config.data, config.augment, batch=config.optim.batch, seed=config.numerics.seed
    )
    if config.data.pipeline == "synthetic":
        loader.steps, loader.images = 3, 24  # type: ignore[misc]
    wrapped = Wrapped(loader, before or (lambda step, batch: None))
    torch.manual_seed(config.numerics.seed)
    try:
        folder.mkdir(exist_ok=True)
        method = build_method(config.model, images=wrapped.images)
        step = TrainingStep(config, method, CPU, steps_per_epoch=wrapped.steps)
        step.prepare()
        return train(step, wrapped, run=folder, start=start)
    finally:
        loader.close()


def history(run: Path) -> list[tuple[Any, ...]]:
    fields = ("step", "epoch", "loss", "z_std", "rank", "lr")
    return [tuple(line[f] for f in fields) for line in read_metrics(run) if line["kind"] == "train"]


def same_state(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_state(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_state, one, other))
    return bool(one == other)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_killed_and_resumed_run_is_bit_identical(
    pipeline: str, small: TrainConfig, tmp_path: Path
) -> None:
    """Killed before every step in turn, with a checkpoint every 2 steps; 12 steps in 4 epochs."""
    data = str(readable(pipeline, small.data.root))
    config = with_settings(small, pipeline=pipeline, data=data, save_every=2)
    whole = tmp_path / "whole"
    expected = checkpoints.load(run_once(config, whole))
    assert expected.step == 12 and len(history(whole)) == 12
    for kill_at in range(1, 12):
        run = tmp_path / f"killed{kill_at}"

        def kill(step: int, batch: Batch, at: int = kill_at) -> None:
            if step == at:
                raise Killed

        with pytest.raises(Killed):
            run_once(config, run, before=kill)
        last = checkpoints.last(run)
        start = checkpoints.load(last) if last.exists() else None
        assert (start.step if start else 0) == kill_at // 2 * 2
        state = checkpoints.load(run_once(config, run, start=start))
        assert same_state(state.model, expected.model), kill_at
        assert same_state(state.optimizer, expected.optimizer), kill_at
        assert history(run) == history(whole), kill_at


@pytest.fixture
def slow_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a thread find them, as on a GPU, longer than a step takes."""

    def slow(gram: Tensor) -> Tensor:
        time.sleep(0.05)
        return rank_of_gram(gram)

    monkeypatch.setattr(monitor, "works_beside", lambda device: True)
    monkeypatch.setattr(monitor, "rank_of_gram", slow)


@pytest.mark.parametrize("log_every", [1, 3])
def test_lines_that_come_late_are_neither_lost_nor_doubled(
    log_every: int, small: TrainConfig, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Killed between a log point and its line, whose checkpoint is there already, and resumed."""
    config = with_settings(small, save_every=2, log_every=log_every)
    whole = history_of(config, tmp_path / "whole")
    request.getfixturevalue("slow_eigenvalues")
    assert history_of(config, tmp_path / "late") == whole
    for kill_at in (3, 5, 10):
        run = tmp_path / f"killed{kill_at}"

        def kill(step: int, batch: Batch, at: int = kill_at) -> None:
            if step == at:
                raise Killed

        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            patch.setattr(LogPoints, "close", lambda points: None)  # nothing is written any more
            run_once(config, run, before=kill)
        start = checkpoints.load(run)
        assert start.step == kill_at // 2 * 2
        saved = [line for line in whole if line[0] <= start.step]
        assert history(run)[: len(saved)] == saved
        run_once(config, run, start=start)
        assert history(run) == whole


def test_training_goes_on_while_eigenvalues_are_found(
    small: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line of step 2 is written after step 3, and before that of step 4."""
    config = with_settings(small, batch=4, epochs=1, log_every=2)
    expected = history_of(config, tmp_path / "at once")
    run, found = tmp_path / "run", threading.Event()

    def when_it_may(gram: Tensor) -> Tensor:
        assert found.wait(60)
        return rank_of_gram(gram)

    def look(step: int, batch: Batch) -> None:
        if step == 3:
            assert not history(run)
            found.set()
        if step == 5:
            assert history(run)[0] == expected[0]

    monkeypatch.setattr(monitor, "works_beside", lambda device: True)
    monkeypatch.setattr(monitor, "rank_of_gram", when_it_may)
    run_once(config, run, before=look)
    assert found.is_set() and history(run) == expected and len(expected) == 3


def test_the_resume_test_would_notice_another_order(small: TrainConfig, tmp_path: Path) -> None:
    other = with_settings(small, seed=1)
    assert history_of(small, tmp_path / "a") != history_of(other, tmp_path / "b")
    assert history_of(small, tmp_path / "a2") == history_of(small, tmp_path / "a3")


def history_of(config: TrainConfig, folder: Path) -> list[tuple[Any, ...]]:
    run_once(config, folder)
    return history(folder)


def test_kill_9_of_the_whole_program(small: TrainConfig, tmp_path: Path) -> None:
    """Killed for real and run again with the same words, it equals the undisturbed run."""
    config = with_settings(small, epochs=40, save_every=5, knn_every=10)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    fastsiam("train", *flags(config), "--out", str(whole))
    command = [sys.executable, "-m", "fastsiam", "train", *flags(config), "--out", str(killed)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    while not (checkpoints.last(killed).exists() and checkpoints.load(killed).step >= 20):
        assert process.poll() is None, "finished before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = fastsiam("train", *flags(config), "--out", str(killed))
    assert "going on after step" in done.stderr
    assert history(killed) == history(whole)
    assert same_state(checkpoints.load(killed).model, checkpoints.load(whole).model)
    knn = [[line for line in read_metrics(run) if line["kind"] == "knn"] for run in (whole, killed)]
    assert knn[0] == knn[1] and [line["epoch"] for line in knn[0]] == [0, 10, 20, 30, 40]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("processes", [1, 2])
def test_signals_save_and_leave(
    number: int, code: int, processes: int, small: TrainConfig, tmp_path: Path
) -> None:
    config = with_settings(
        small, epochs=3000, save_every=10**6, knn_every=0, pipeline="torchvision", gpus=processes
    )
    run = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "fastsiam",
        "train",
        *flags(config),
        "--out",
        str(run),
        "--workers",
        "1",
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while len(read_metrics(run)) < 5:
        assert process.poll() is None
        time.sleep(0.05)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does: to every process of the group
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert f"{signal.Signals(number).name}: stopped after step" in errors
    assert "Traceback" not in errors
    state = checkpoints.load(run)
    assert state.step >= 5 and state.step == read_metrics(run)[-1]["step"]


def test_a_signal_to_launcher_and_ranks_at_once_still_saves(
    small: TrainConfig, tmp_path: Path
) -> None:
    """As a scheduler does: every process of the job gets SIGTERM, so the ranks get it twice."""
    config = with_settings(
        small, epochs=3000, save_every=10**6, knn_every=0, pipeline="torchvision", gpus=2
    )
    run = tmp_path / "run"
    command = [sys.executable, "-m", "fastsiam", "train", *flags(config), "--out", str(run)]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while len(read_metrics(run)) < 5:
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert "SIGTERM: stopped after step" in errors
    assert checkpoints.load(run).step >= 5


def test_two_cpu_ranks_by_the_launcher(small: TrainConfig, tmp_path: Path) -> None:
    """``--gpus 2 --device cpu`` gives the losses of one process, to float32's rounding."""
    config = with_settings(small, epochs=2)
    fastsiam("train", *flags(config), "--out", str(tmp_path / "one"))
    fastsiam("train", *flags(config), "--gpus", "2", "--out", str(tmp_path / "two"))
    one, two = (read_metrics(tmp_path / name) for name in ("one", "two"))
    assert [line["kind"] for line in one] == [line["kind"] for line in two]
    for a, b in zip(one, two, strict=True):
        if a["kind"] == "train":
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-3)
            assert a["z_std"] == pytest.approx(b["z_std"], abs=1e-3)
        else:
            assert a["bank"] == b["bank"] == 24


def test_plain_torchrun_works(small: TrainConfig, tmp_path: Path) -> None:
    config = with_settings(small, epochs=1, knn_every=0)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command += ["-m", "fastsiam", "train", *flags(config), "--out", str(tmp_path / "run")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    assert len(read_metrics(tmp_path / "run")) == 3


@pytest.mark.parametrize("late", [False, True])
def test_lines_and_files_of_a_run(
    late: bool, small: TrainConfig, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if late:
        request.getfixturevalue("slow_eigenvalues")
    run = train_here(small, "imagenet")
    assert run == tmp_path / "run"
    lines = read_metrics(run)
    kinds = [line["kind"] for line in lines]
    assert kinds == ["knn"] + ["train"] * 6 + ["knn"] + ["train"] * 6 + ["knn"]
    fields = {
        "kind",
        "step",
        "epoch",
        "loss",
        "z_std",
        "rank",
        "lr",
        "images_per_second",
        "data_wait",
        "seconds",
    }
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


def test_no_evaluation_before_the_first_epoch(small: TrainConfig) -> None:
    """Also where a run begins again because it was killed before its first checkpoint."""

    def kinds(run: Path) -> str:
        return "".join(line["kind"][0] for line in read_metrics(run))

    run = train_here(with_settings(small, knn_first=False, max_steps=1), "imagenet")
    assert kinds(run) == "t"
    checkpoints.last(run).unlink()
    assert kinds(train_here(with_settings(small, max_steps=1), "imagenet")) == "kt"
    checkpoints.last(run).unlink()
    later = with_settings(small, knn_first=False)
    assert kinds(train_here(later, "imagenet")) == "k" + "t" * 6 + "k" + "t" * 6 + "k"


@pytest.mark.parametrize(("device", "batch"), [("cpu", 256), ("cuda", 1024)])
def test_the_monitor_takes_large_batches_on_a_gpu(
    device: str, batch: int, small: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def noting(*args: Any, batch: int, place: Place, **settings: Any) -> Any:
        asked.append(batch)
        return labelled_loaders(*args, batch=batch, place=CPU, **settings)

    monkeypatch.setattr(job, "labelled_loaders", noting)
    place = Place(0, 1, torch.device(device))
    assert job._monitor(small, place, Console(quiet=True), torch.float32)
    assert asked == [batch]


def test_resume_refuses_other_settings_and_never_overwrites(
    small: TrainConfig, tmp_path: Path
) -> None:
    train_here(with_settings(small, max_steps=4), "imagenet")
    with pytest.raises(CheckpointError, match=r"lr: 0\.5 -> 0\.1"):
        train_here(with_settings(small, lr=0.1), "imagenet")
    with pytest.raises(CheckpointError, match="holds a run already"):
        train_here(with_settings(small, resume="never"), "imagenet")
    assert checkpoints.load(tmp_path / "run").step == 4
    branch = tmp_path / "branch"
    train_here(with_settings(small, resume=str(tmp_path / "run"), out=str(branch)), "imagenet")
    assert checkpoints.load(branch).step == 12


def test_a_refused_resume_leaves_the_run_as_it_was(small: TrainConfig, tmp_path: Path) -> None:
    run = train_here(with_settings(small, max_steps=4), "imagenet")
    before = {path: path.read_bytes() for path in run.glob("*.json*")}
    with pytest.raises(CheckpointError):
        train_here(with_settings(small, lr=0.1), "imagenet")
    assert before == {path: path.read_bytes() for path in run.glob("*.json*")}


def test_resuming_from_another_run_twice_keeps_the_progress(
    small: TrainConfig, tmp_path: Path
) -> None:
    first = train_here(with_settings(small, max_steps=4), "imagenet")
    branch = with_settings(small, resume=str(first), out=str(tmp_path / "branch"))
    train_here(with_settings(branch, max_steps=7), "imagenet")
    assert checkpoints.load(tmp_path / "branch").step == 7
    train_here(with_settings(branch, max_steps=7), "imagenet")
    assert [line[0] for line in history(tmp_path / "branch")] == [5, 6, 7]


def test_a_branch_of_a_finished_run_owns_a_checkpoint(small: TrainConfig, tmp_path: Path) -> None:
    first = train_here(small, "imagenet")
    branch = with_settings(small, resume=str(first), out=str(tmp_path / "branch"))
    assert checkpoints.load(train_here(branch, "imagenet")).step == 12


def test_what_auto_means_is_written_down(
    small: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    run = train_here(with_settings(small, precision="auto", max_steps=2), "imagenet")
    assert checkpoints.load(run).config.numerics.precision == "fp32"
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    with pytest.raises(CheckpointError, match="precision: fp32 -> bf16"):
        train_here(with_settings(small, precision="auto"), "imagenet")


def test_data_without_validation_labels_trains_without_the_monitor(
    small: TrainConfig, images: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for folder in list((images / "val").iterdir()):
        for path in folder.iterdir():
            path.rename(images / "val" / f"{folder.name}-{path.name}")
        folder.rmdir()
    run = train_here(with_settings(small, epochs=1), "imagenet")
    assert {line["kind"] for line in read_metrics(run)} == {"train"}
    assert "no kNN monitor: the training and validation images" in capfd.readouterr().err


def test_a_finished_run_stays_finished(small: TrainConfig) -> None:
    run = train_here(small, "imagenet")
    before, state = read_metrics(run), checkpoints.load(run)
    train_here(small, "imagenet")
    assert read_metrics(run) == before
    assert same_state(checkpoints.load(run).model, state.model)


def test_a_broken_image_loses_nothing(small: TrainConfig, images: Path, tmp_path: Path) -> None:
    config = with_settings(small, pipeline="torchvision", epochs=50, knn_every=0)
    path = images / "train" / "class1" / "003.jpg"
    good = path.read_bytes()

    def damage(step: int, batch: Batch) -> None:
        if step == 4:
            path.write_bytes(good[:100])

    with pytest.raises(DataError, match=r"003\.jpg") as error:
        run_once(config, tmp_path / "run", before=damage)
    (note,) = error.value.__notes__
    assert re.fullmatch(r"saved .*last\.pt at step \d+", note)
    assert checkpoints.load(tmp_path / "run").step >= 5


@pytest.mark.parametrize(("log_every", "save_every"), [(10, 4), (8, 4), (1, 4)])
def test_a_loss_that_is_not_finite_stops_the_run(
    log_every: int, save_every: int, small: TrainConfig, tmp_path: Path
) -> None:
    """The step is named exactly whenever somebody looks, and the last good state is kept."""
    config = with_settings(
        small, epochs=10, log_every=log_every, save_every=save_every, knn_every=0
    )

    def poison(step: int, batch: Batch) -> Batch | None:
        if step == 5:
            return replace(batch, views=(batch.view1 * math.nan, batch.view2))
        return None

    with pytest.raises(
        TrainingError,
        match=r"not finite at step 6; the last good checkpoint is .*last\.pt \(step 4\)",
    ):
        run_once(config, tmp_path / "run", before=poison)
    assert checkpoints.load(tmp_path / "run").step == 4


def test_a_loss_that_is_not_finite_before_the_first_checkpoint(
    small: TrainConfig, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=r"not finite at step \d; nothing was saved yet; try"):
        run_once(with_settings(small, lr=1e30), tmp_path / "run")
    assert not checkpoints.last(tmp_path / "run").exists()


@pytest.mark.parametrize("stop_gradient", [True, False])
def test_without_stop_gradient_the_solution_collapses(
    stop_gradient: bool, small: TrainConfig, tmp_path: Path
) -> None:
    """Fig. 2 of the paper, small: loss to -1 and std to 0, but not with stop-gradient."""
    data = write_images(tmp_path / "many", classes=4, each=128)
    config = with_settings(
        small, data=str(data), batch=512, epochs=40, knn_every=0, stop_gradient=stop_gradient
    )
    run_once(config, tmp_path / "run")
    first, last = (read_metrics(tmp_path / "run")[i] for i in (0, -1))
    assert first["z_std"] > 0.9 and first["loss"] > -0.5
    if stop_gradient:
        assert last["loss"] > -0.8 and last["z_std"] > 0.75 and last["rank"] > 4
    else:
        assert last["loss"] < -0.88 and last["z_std"] < 0.5 and last["rank"] < 2.5


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("on_collapse", ["stop", "warn"])
def test_the_guard_speaks_up(
    on_collapse: str,
    late: bool,
    small: TrainConfig,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    if late:
        request.getfixturevalue("slow_eigenvalues")
    config = with_settings(
        small,
        stop_gradient=False,
        epochs=40,
        lr=2.0,
        knn_every=0,
        on_collapse=on_collapse,
        log_every=10,
    )
    if on_collapse == "stop":
        with pytest.raises(TrainingError, match=r"collapses at step \d+: std .*usual causes"):
            run_once(config, tmp_path / "run")
    else:
        run_once(config, tmp_path / "run")
        warnings = capfd.readouterr().err.count("warning: the representation collapses")
        assert 1 <= warnings < 8  # once an episode, not at every log point
        assert checkpoints.load(tmp_path / "run").step == 120


class HostReads(TorchDispatchMode):
    """Counts reads of a tensor's value by the host, which on a GPU wait for the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.is_nonzero.default,
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_never_reads_a_value_back(accumulate: int, small: TrainConfig) -> None:
    config = with_settings(small, accumulate=accumulate)
    step = TrainingStep(config, build_method(config.model), CPU, steps_per_epoch=3)
    step.prepare()
    loader = build_loader(config.data, config.augment, batch=8)
    batch, finite = next(iter(loader.epoch(0))), FiniteCheck(CPU.device)
    with HostReads() as reads:  # type: ignore[no-untyped-call]
        loss, _ = step(batch, at=0)
        finite.note(1, loss)
        assert reads.count == 0
        loss.item()
        assert reads.count == 1
