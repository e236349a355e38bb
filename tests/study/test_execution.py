"""Running a study: parallel processes, kills, resuming, divergence and mismatched settings."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fastsiam.config.evaluate import KnnConfig
from fastsiam.config.settings_files import RunSettings
from fastsiam.config.study import StudyConfig, StudyRunConfig
from fastsiam.errors import DataError, FastSiamError
from fastsiam.evaluate.command import evaluate_knn
from fastsiam.run import checkpoint
from fastsiam.run.log import read_metrics
from fastsiam.signals import ECHO
from fastsiam.study import execution
from fastsiam.study.catalogue import STUDIES
from fastsiam.study.execution import check, execute_runs, slots
from fastsiam.study.record import collect, read_record, read_result, write_record
from fastsiam.study.result_table import caption, cells
from fastsiam.study.runs import Run, seeds_in
from tests.conftest import write_data, write_images
from tests.processes import Forked, wait_until
from tests.study.tiny import study, tiny, tiny_runs
from tests.train.runs import CPU as HERE
from tests.train.runs import same_state

CPU = StudyRunConfig(device="cpu")
EPOCHS = 17
STEPS = 3 * EPOCHS
SCALE = tiny(epochs=EPOCHS)
STUDY = replace(STUDIES["stop-gradient"], rows=STUDIES["stop-gradient"].rows[:1])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images shared by the tests of this module."""
    return write_data(tmp_path_factory.mktemp("stripes"))


@pytest.fixture(scope="module")
def finished_study(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study folder whose first run is finished. Do not modify it."""
    out = tmp_path_factory.mktemp("done")
    result = Forked(study, tiny_runs(data, out, SCALE)[:1], CPU).wait()
    assert result.returncode == 0, result.stdout + result.stderr
    return out


@pytest.fixture
def study_copy(finished_study: Path, tmp_path: Path) -> Path:
    """A copy of ``finished_study`` that a test may modify."""
    return Path(shutil.copytree(finished_study, tmp_path / "copy"))


def test_results_of_finished_study(data: Path, finished_study: Path) -> None:
    run, other = tiny_runs(data, finished_study, SCALE)
    assert [run.folder.name, other.folder.name] == [
        "predictor-lr-decayed-seed-0",
        "no-stop-gradient-seed-0",
    ]
    assert seeds_in(finished_study) == [0] and read_result(other) is None
    config = checkpoint.load(run.folder).config
    assert config.model == run.config.model and config.optim == run.config.optim
    result, knn = read_result(run), [x for x in read_metrics(run.folder) if x["kind"] == "knn"]
    assert result is not None and not result.diverged
    assert (result.untrained, result.top1) == (knn[0]["top1"], knn[-1]["top1"])
    assert result.knn_epochs == (0.0, EPOCHS) and result.epochs[-1] == EPOCHS
    assert result.images == 24 and len(result.loss_curve) == 26
    assert result.loss == pytest.approx(result.loss_curve[-1], rel=1e-4)
    assert f"done: step {STEPS} of {STEPS}" in run.log_file.read_text()
    before = {path: path.stat().st_mtime_ns for path in finished_study.rglob("*")}
    execute_runs([run], CPU)  # a finished run is skipped
    assert {path: path.stat().st_mtime_ns for path in finished_study.rglob("*")} == before


def test_study_with_other_images_is_rejected(
    data: Path, study_copy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A different number of images is a warning; different classes or images are errors."""
    runs = tiny_runs(data, study_copy, SCALE)
    check(runs)
    assert "warning" not in capfd.readouterr().err
    check([replace(run, scale=replace(SCALE, images=10_000)) for run in runs])
    stderr = capfd.readouterr().err
    assert "24 training images of 3 classes; --scale cifar expects 10,000 of 3" in stderr
    with pytest.raises(DataError, match="of 3 classes; --scale cifar expects 24 of 100"):
        check([replace(run, scale=replace(SCALE, classes=100)) for run in runs])
    other = tmp_path / "other"
    write_images(other / "train", each=7)
    write_images(other / "val", each=4, seed=1)
    with pytest.raises(
        DataError, match="-seed-0 was trained on different images than those in"
    ) as error:
        check(tiny_runs(other, study_copy, SCALE, study="similarity"))
    assert "\n" not in str(error.value)


def test_run_with_other_settings_is_rejected(data: Path, study_copy: Path) -> None:
    with pytest.raises(FastSiamError, match=r"-seed-0 contains .*lr: 0\.5 -> 0\.25") as error:
        execute_runs(tiny_runs(data, study_copy, tiny(epochs=EPOCHS, lr=0.25)), CPU)
    assert "\n" not in str(error.value)
    run = tiny_runs(data, study_copy, SCALE)[0]
    run.settings_file.write_text("[optim]\nlr = fast")
    with pytest.raises(FastSiamError, match=r"study\.toml: .*; choose another --out"):
        run.check_settings()
    shutil.rmtree(run.folder)  # a run that never trained may have other settings
    run.folder.mkdir()
    other = tiny_runs(data, study_copy, tiny(lr=0.25))[0]
    run.prepare()
    other.check_settings()
    other.prepare()
    assert "lr = 0.25" in run.settings_file.read_text()


def test_corrupt_file_is_named_in_error(data: Path, study_copy: Path) -> None:
    run = tiny_runs(data, study_copy, SCALE)[0]
    for name, text, damaged in (
        ("metrics.jsonl", '"z_std"', '"spread"'),
        ("metrics.jsonl", '"epoch"', '"era"'),
        ("config.json", '"cores"', '"horses"'),
    ):
        file = run.folder / name
        before = file.read_text()
        file.write_text(before.replace(text, damaged))
        with pytest.raises(FastSiamError, match=re.escape(str(file))) as error:
            collect(STUDY, run.scale, [run], StudyConfig())
        assert "\n" not in str(error.value)
        file.write_text(before)


def test_linear_evaluation_is_separate_stage(data: Path, study_copy: Path, tmp_path: Path) -> None:
    """Linear evaluation is a separate stage, cached if the scale says so, next to kNN in tables.

    The data have moved since training.
    """
    moved = Path(shutil.copytree(data, tmp_path / "moved"))
    run = replace(tiny_runs(moved, study_copy, replace(SCALE, cached=True))[0], linear=True)
    assert run.is_trained and not run.is_done and replace(run, linear=False).is_done
    assert Forked(study, [run], CPU).wait().returncode == 0
    assert run.linear_top1 is not None and replace(run, scale=SCALE).linear_top1 is None
    _assert_only_default_evaluation_counts(run)
    record = collect(STUDY, run.scale, [run], StudyConfig())
    assert record.command.endswith(" --linear") and "cached features" in caption(record)
    assert record.rows[0].results[0].images_digest
    used = RunSettings.read(run.folder).config.numerics.precision  # resolved from "auto"
    assert f"; precision: {used}; " in caption(record) and used in ("bf16", "fp32")
    write_record(tmp_path / "record.json", record)
    assert read_record(tmp_path / "record.json") == record
    heads, [row] = cells(record)
    ours = heads.index("ours: linear top-1, %")
    assert row[ours] == f"{run.linear_top1:.1f}"
    assert row[ours - 1] == f"{record.rows[0].results[0].top1:.1f}"
    half_done = replace(record.rows[0].results[0], seed=1, linear=None)
    rows = (replace(record.rows[0], results=(*record.rows[0].results, half_done)),)
    assert rows[0].linear == []


def test_pixel_baseline_needs_crop_of_run(data: Path, study_copy: Path) -> None:
    run, knn = (
        tiny_runs(data, study_copy, SCALE)[0],
        KnnConfig(baselines=True, workers=0, device="cpu"),
    )
    for crop in (20, 0):
        evaluate_knn(run.folder, replace(knn, crop=crop), HERE)
        record = collect(STUDY, run.scale, [run], StudyConfig())
        assert (record.pixels is not None) == (crop == 0)


def test_diverged_run_is_a_result(data: Path, tmp_path: Path) -> None:
    runs = tiny_runs(data, tmp_path, tiny(lr=1e30))[:1]
    process = Forked(study, runs, CPU).wait()
    assert process.returncode == 0 and "diverged: its loss was not finite" in process.stderr
    result = read_result(runs[0])
    assert result is not None and result.diverged and result.loss is None
    assert result.top1 == pytest.approx(100 / 3)
    assert "the loss is not finite at step" in runs[0].diverged_file.read_text()
    before = runs[0].log_file.read_text()
    execute_runs(runs, CPU)  # a diverged run is not repeated
    assert runs[0].log_file.read_text() == before


def test_failed_run_ends_study_after_parallel_runs(data: Path, tmp_path: Path) -> None:
    """One run fails at once. The reported reason comes only from its last attempt's log."""
    good, other = tiny_runs(data, tmp_path, tiny())
    bad = replace(good, folder=tmp_path / "bad")
    bad.folder.mkdir()
    bad.log_file.write_text("error: the loss is not finite at step 3\n")
    result = Forked(study, [bad, good, other], replace(CPU, parallel=2), "bad").wait()
    assert result.returncode == 1 and not result.stdout and not bad.is_diverged
    message = r"^fastsiam\.errors\.FastSiamError: bad failed \(no room\); see .*study.log\n\Z"
    assert re.search(message, result.stderr, re.MULTILINE), result.stderr
    assert good.is_done and not other.folder.exists()


def test_no_run_starts_after_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if another run succeeded at the same time, and left a slot."""
    started: list[int] = []

    async def execute(self: Any, code: int, slot: dict[str, str]) -> None:
        started.append(code)
        if code:
            raise FastSiamError("failed")

    monkeypatch.setattr(execution._Scheduler, "_execute", execute)
    codes: Any = [0, 1, 0]
    with pytest.raises(FastSiamError, match="failed"):
        asyncio.run(execution._Scheduler(codes).finish([{}, {}]))
    assert started == [0, 1]


@pytest.mark.parametrize("others", [0, 1])
def test_failure_is_reported_while_other_runs_are_active(
    others: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run that fails alone is reported by the study's error."""

    async def execute(self: Any, code: int, slot: dict[str, str]) -> None:
        if code:
            raise FastSiamError("first failed")
        self._active.add(Mock())
        while not self._failure:
            await asyncio.sleep(0)

    monkeypatch.setattr(execution._Scheduler, "_execute", execute)
    runs: Any = [0] * others + [1]
    with pytest.raises(FastSiamError, match="first failed"):
        asyncio.run(execution._Scheduler(runs).finish([{} for _ in runs]))
    line = "first failed; no further run starts, active runs finish\n"
    assert capfd.readouterr().err == line * others


def test_run_without_result_is_failure(
    data: Path, study_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not retried at once: an unwritable folder stays unwritable."""
    monkeypatch.setattr("fastsiam.study.execution._command", lambda run: ["true"])
    run = replace(tiny_runs(data, study_copy, SCALE)[0], linear=True)
    with pytest.raises(FastSiamError, match=r"failed \(it has no linear evaluation\); see "):
        execute_runs([run], CPU)
    bad = replace(run, folder=tmp_path / "bad")
    bad.folder.mkdir()
    bad.settings_file.symlink_to(Path(__file__) / "study.toml")
    with pytest.raises(FastSiamError, match=r"cannot write .*study\.toml"):
        execute_runs([bad, run], CPU)


def test_killed_study_resumes_bit_for_bit(data: Path, finished_study: Path, tmp_path: Path) -> None:
    """The study's training process notices that the study was killed and saves its state."""
    run, undisturbed = (tiny_runs(data, folder, SCALE)[0] for folder in (tmp_path, finished_study))
    last = checkpoint.last(run.folder)

    work = Forked(study, [run], CPU)
    wait_until(work, last.exists)
    work.send(signal.SIGKILL)
    assert work.wait().returncode == -signal.SIGKILL
    while (run.folder / "lock").exists():
        time.sleep(0.02)
    assert checkpoint.load(last).step < STEPS and "SIGTERM" in run.log_file.read_text()

    assert Forked(study, [run], CPU).wait().returncode == 0
    states = [checkpoint.load(one.folder) for one in (run, undisturbed)]
    assert states[0].step == states[1].step == STEPS
    for part in ("model", "optimizer"):
        assert same_state(*(getattr(state, part) for state in states))
    assert read_result(run) == read_result(undisturbed)


def test_second_signal_kills_runs(data: Path, tmp_path: Path) -> None:
    work = Forked(study, tiny_runs(data, tmp_path, SCALE)[:1], CPU)
    process = _wait_for_run_process(work)
    os.kill(process, signal.SIGSTOP)  # the run cannot react to signals
    wait_until(work, lambda: _is_stopped(process))  # until then SIGTERM would end it
    work.send(signal.SIGTERM)
    wait_until(work, lambda: "a second signal kills them" in work.messages())
    time.sleep(2 * ECHO)
    assert work.poll() is None
    work.send(signal.SIGTERM)
    result = work.wait()
    assert result.returncode == 128 + signal.SIGTERM
    assert "stopped, runs left: 1; run the same command to continue" in result.stdout
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_parallel_runs_share_cores_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("fastsiam.kernels.cores.cores", lambda: 8)
    assert slots(CPU, []) == [{}]
    share = {"FASTSIAM_CORES": "4", "OMP_NUM_THREADS": "4"}
    assert slots(replace(CPU, parallel=2), []) == [share, share]
    four = slots(replace(CPU, parallel=2, gpus=2), ["4", "5", "6", "7"])
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables in four] == ["4,5", "6,7"]
    one = slots(replace(CPU, parallel=3), ["0", "1"])
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables in one] == ["0", "1", "0"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert slots(replace(CPU, parallel=2), [])[0]["OMP_NUM_THREADS"] == "3"


def _assert_only_default_evaluation_counts(run: Run) -> None:
    """Edit the run's only linear record temporarily: other data or settings do not count."""
    (path,) = (run.folder / "eval").glob("linear-*.json")
    before = path.read_text()
    assert json.loads(before)["data"]["other_data"] == run.config.data.full_root
    for part, changes in (
        ("data", {"percent": 1.0, "chosen_crc32": "0"}),
        ("data", {"subset": "mine.txt", "chosen_crc32": "0"}),
        ("data", {"other_data": "/elsewhere"}),
        ("data", {"other_data": None}),  # as if the data had not moved
        ("data", {"holdout": "10%"}),
        ("images", {"crop": 24}),
        ("images", {"resize": 30}),
        ("images", {"exif": "apply"}),
        ("protocol", {"epochs": 1}),
        ("protocol", {"batch": 8}),
    ):
        plain = json.loads(before)
        plain[part].update(changes)
        path.write_text(json.dumps(plain))
        counts = changes == {"other_data": None}
        assert run.is_done == (run.linear_top1 is not None) == counts, changes
    path.write_text(before)


def _wait_for_run_process(work: Forked) -> int:
    """Wait until the study's training process has its own process group; return its PID."""
    children = Path(f"/proc/{work.pid}/task/{work.pid}/children")
    wait_until(work, lambda: bool(children.read_text()))
    process = int(children.read_text().split()[0])
    wait_until(work, lambda: os.getpgid(process) == process)
    return process


def _is_stopped(process: int) -> bool:
    stats = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)
