"""Collapse measures compared with float64, the collapse guard, and the metrics file."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from fastsiam.config import SimSiamConfig, TrainConfig
from fastsiam.config.methods.byol import BYOLConfig
from fastsiam.config.methods.mocov2 import MoCoV2Config
from fastsiam.config.methods.simclr import SimCLRConfig
from fastsiam.config.methods.swav import SwAVConfig
from fastsiam.console import Console
from fastsiam.distributed import Place
from fastsiam.errors import FastSiamError, TrainingError
from fastsiam.model.numerics import FiniteCheck
from fastsiam.run.log import MetricsLog, read_metrics
from fastsiam.run.run_folder import RunFolder
from fastsiam.train import clock, metrics, trainer
from fastsiam.train.clock import Clock
from fastsiam.train.guard import CollapseGuard
from fastsiam.train.metrics import gram, rank_of_gram, z_std
from fastsiam.train.trainer import Trainer
from tests.configs import with_settings
from tests.disks import fill, small_disk


def rank_of(z: Tensor) -> float:
    return rank_of_gram(gram(z)).item()


def test_std_and_rank_equal_float64_numpy() -> None:
    z = torch.randn(60, 32) @ torch.randn(32, 32)
    x = z.double().numpy()
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    assert z_std(z).item() == pytest.approx(x.std(0).mean() * 32**0.5, rel=1e-5)
    for images in (60, 20):
        s = np.linalg.svd(x[:images], compute_uv=False)
        s /= s.sum()
        expected = np.exp(-(s * np.log(s)).sum())
        assert rank_of(z[:images]) == pytest.approx(expected, rel=1e-4)


def test_std_and_rank_at_their_limits() -> None:
    spread = torch.randn(4096, 256)
    assert z_std(spread).item() == pytest.approx(1, abs=0.01)
    point = torch.ones(64, 16)
    assert z_std(point).item() == pytest.approx(0, abs=1e-6)
    assert rank_of(point) == pytest.approx(1, abs=1e-3)
    assert rank_of(point * 0) == 1
    assert rank_of(torch.eye(16)) == pytest.approx(16, rel=1e-4)


def test_rank_detects_collapse_that_std_misses() -> None:
    """3 of 64 dimensions are in use, but the std is that of a healthy run."""
    z = torch.randn(512, 3) @ torch.randn(3, 64)
    assert z_std(z) > 0.85
    assert rank_of(z) < 3.1
    guard = CollapseGuard("warn", batch=64)
    assert guard.check(5, z_std(z).item(), rank_of(z))
    full_rank = torch.randn(512, 4)  # uses all of its 4 dimensions, which is healthy
    guard = CollapseGuard("warn", batch=512, dim=4)
    assert guard.check(5, z_std(full_rank).item(), rank_of(full_rank)) is None
    assert guard.check(6, z_std(full_rank[:, :1].expand(-1, 4)).item(), 1.0)


def test_guard_warns_once_per_collapse_or_stops() -> None:
    guard = CollapseGuard("warn", batch=64)
    assert guard.check(10, 0.98, 60) is None
    warning = guard.check(20, 0.3, 2.0)
    assert warning and "step 20" in warning and "learning rate" in warning
    assert guard.check(30, 0.2, 1.5) is None
    assert guard.check(40, 0.9, 50) is None
    assert guard.check(50, 0.1, 1.1)
    with pytest.raises(TrainingError, match="collapsed at step 7"):
        CollapseGuard("stop", batch=64).check(7, 0.1, 1.1)
    assert CollapseGuard("warn", batch=4).check(1, 0.99, 3.0) is None  # the maximum of four images
    assert CollapseGuard("warn", batch=64).check(1, 0.5, 4.0) is None  # the lowest healthy values


def test_guard_without_final_bn_compares_with_first_std() -> None:
    """An untrained MoCo has a std below 0.5 already; a collapse is a fall from that start."""
    assert not MoCoV2Config().centred and not BYOLConfig().centred and not SwAVConfig().centred
    assert SimCLRConfig().centred and SimSiamConfig().centred
    assert not SimSiamConfig(head_bn="hidden").centred
    guard = CollapseGuard("warn", batch=64, centred=False)
    assert [guard.check(i, x, 20.0) for i, x in enumerate((0.4, 0.8, 0.3))] == [None] * 3
    assert "std 0.190 (healthy: near 0.4)" in str(guard.check(4, 0.19, 20.0))
    guard = CollapseGuard("warn", batch=64, centred=False, first=0.6)
    assert "healthy: near 0.6" in str(guard.check(1, 0.29, 20.0))
    guard = CollapseGuard("warn", batch=64, centred=False)
    assert "effective rank 1.5" in str(guard.check(0, 0.4, 1.5))


def test_finite_check_names_first_bad_step() -> None:
    check = FiniteCheck(torch.device("cpu"))
    for step, loss in [(1, -0.5), (2, -0.6), (3, math.inf), (4, -0.5), (5, math.nan)]:
        assert check.verdict() == (None if step <= 3 else 3)
        check.note(step, torch.tensor(loss))
    assert check.verdict() == 3
    layer = torch.nn.Linear(2, 2)
    check = FiniteCheck(torch.device("cpu"))
    check.note_weights(7, layer)
    assert check.verdict() is None
    torch.nn.init.constant_(layer.bias, math.nan)
    check.note_weights(2**24 + 1, layer)  # not a float32
    assert check.verdict() == 2**24 + 1


class FakeClock:
    """A fake host clock, and a fake GPU that works later and in order."""

    def __init__(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.busy_until = 0.0
        self._has_gpu = device == "cuda"
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(clock, "_cuda_event", lambda: GpuEvent(self))

    def work(self, seconds: float) -> None:
        """Let the GPU work, or the host without a GPU."""
        self.busy_until = max(self.now, self.busy_until) + seconds
        if not self._has_gpu:
            self.wait_for_work()

    def wait_for_work(self, *, except_last: float = 0.0) -> None:
        """Wait for the launched work, except for the last seconds of it."""
        self.now = max(self.now, self.busy_until - except_last)


class GpuEvent:
    def __init__(self, times: FakeClock) -> None:
        self._times, self.at = times, math.nan

    def record(self) -> None:
        self.at = max(self._times.now, self._times.busy_until)

    def query(self) -> bool:
        return self.at <= self._times.now

    def synchronize(self) -> None:
        self._times.now = max(self._times.now, self.at)

    def elapsed_time(self, later: GpuEvent) -> float:
        assert self.query() and later.query(), "it would have to wait"
        return 1000 * (later.at - self.at)


@pytest.mark.parametrize(
    ("device", "load", "work", "waited"),
    [
        ("cuda", 3.0, 1.0, 3.25 + 5 * (3.0 - 1.0)),  # from the end of a step to the next batch
        ("cuda", 0.5, 2.0, 0.75 + 5 * 0.25),
        ("cpu", 3.0, 1.0, 6 * 3.25),
        ("cpu", 0.5, 2.0, 6 * 0.75),
    ],
)
def test_clock_separates_data_wait_from_work(
    device: str, load: float, work: float, waited: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full GPU queue blocks the host in the loader's launches. That must not count as waiting."""
    times = FakeClock(device, monkeypatch)
    finish = 0.25  # the time to augment the batch, on the device of the model

    def batches() -> Iterator[int]:
        for number in range(6):
            times.wait_for_work(except_last=2 * work)  # a GPU's queue is full
            times.now += load
            times.work(finish)
            yield number

    train_clock = Clock(seconds=100.0, device=torch.device(device))
    train_clock.resume()
    for _ in train_clock.over(batches()):
        times.work(work)
    times.wait_for_work()
    train_clock.pause()
    ran = times.now
    times.now += 50  # a pause does not count as training
    reading = train_clock.read(8)
    assert reading["data_wait"] * ran == pytest.approx(waited)
    assert reading["seconds"] == pytest.approx(100 + ran)
    assert reading["images_per_second"] == pytest.approx(48 / ran)
    train_clock.resume()
    times.now += 1
    train_clock.pause()
    assert train_clock.read(8) == {"images_per_second": 0, "data_wait": 0, "seconds": 101 + ran}


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (0, 2), (1, 2)])
def test_ranks_stop_at_step_known_to_all(
    rank: int, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks agree although their threads end at different times. A single process stops at once."""
    monkeypatch.setattr(metrics, "host_is_idle", lambda device: True)
    monkeypatch.setattr(trainer, "StopSignals", lambda place: None)  # the other ranks do not exist
    config = with_settings(TrainConfig(), on_collapse="stop", tracker="none")
    place = Place(rank, world, torch.device("cpu"))
    step: Any = SimpleNamespace(config=config, place=place, steps_per_epoch=10, total=100, lr=0.1)
    step.method = SimpleNamespace(dim=16)
    loader: Any = SimpleNamespace()
    batch: Any = SimpleNamespace(digest=0)
    run = Trainer(step, loader, folder=RunFolder(tmp_path, console=Console(quiet=True)))
    loss, point = torch.tensor(-0.9), torch.ones(64, 16)
    with contextlib.closing(run), pytest.raises(TrainingError, match="collapsed at step 1:"):
        run.metrics.note(0, batch, point)
        run.metrics.log(1, loss, point)
        assert run.metrics.line is not None
        run.metrics.line[1].result()
        run.metrics.note(1, batch, point)
        assert world == 2
        run.metrics.log(2, loss, point)


def test_log_drops_corrupt_lines_and_those_after_resumed_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = MetricsLog(RunFolder(tmp_path), step=0, steps_per_epoch=2)
    for step in range(1, 6):
        if step % 2:
            log.write("knn", {"epoch": (step - 1) / 2, "top1": 10.0})
        log.write("train", {"step": step, "epoch": step / 2, "loss": -0.1 * step})
    log.close()
    texts = log.path.read_text().splitlines(keepends=True)
    texts.insert(2, texts[2][:9] + texts[2])
    texts.insert(6, '{"kind": "train", "step": "seven"}\n')
    log.path.write_text("".join([*texts, '{"kind": "train", "st']))  # as if killed while writing
    log = MetricsLog(RunFolder(tmp_path), step=4, steps_per_epoch=2)
    log.close()
    assert f"warning: removed 2 invalid lines from {log.path}\n" in capfd.readouterr().err
    assert log.is_evaluated
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert lines == read_metrics(tmp_path)
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3, 4]
    assert [line["epoch"] for line in lines if line["kind"] == "knn"] == [0, 1, 2]
    log = MetricsLog(RunFolder(tmp_path), step=3, steps_per_epoch=2)
    log.close()
    assert not log.is_evaluated
    assert [line["epoch"] for line in read_metrics(tmp_path) if line["kind"] == "knn"] == [0, 1]


def test_unwritable_folder_is_named_in_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(FastSiamError, match=r"cannot write the metrics in .*run: "):
        MetricsLog(RunFolder(blocked / "run"), step=0, steps_per_epoch=3)


@pytest.mark.parametrize("truncates", [True, False])
def test_log_lines_are_written_after_disk_has_space(
    truncates: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """There is one warning and no partial line. All lines are written once there is space again."""
    if not truncates:
        monkeypatch.setattr(os, "ftruncate", Mock(side_effect=OSError))
    with small_disk(tmp_path / "disk", 1) as disk:
        log = MetricsLog(RunFolder(disk), step=0, steps_per_epoch=3)
        log.write("train", {"step": 1})
        filler = fill(disk)
        for step in range(2, 300):  # more than the rest of the file's last block
            log.write("train", {"step": step})
        before = read_metrics(disk)
        assert log.path.read_text().endswith("}\n") == truncates and 1 <= len(before) < 299
        filler.unlink()
        log.write("train", {"step": 300})
        log.close()
        assert [line["step"] for line in read_metrics(disk)] == list(range(1, 301))
    stderr = capfd.readouterr().err
    assert stderr.count("warning") == 1 and "lost" not in stderr
    full = (
        "metrics.jsonl: No space left on device; free some space and try again; training continues"
    )
    assert full in stderr


def test_lines_after_the_file_was_deleted_are_written_at_the_end(tmp_path: Path) -> None:
    log = MetricsLog(RunFolder(tmp_path), step=0, steps_per_epoch=3)
    log.write("train", {"step": 1})
    log.path.unlink()
    log.write("train", {"step": 2})
    log.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [2]


@pytest.mark.parametrize("fails_at", ["open", "write"])
def test_log_lines_are_written_after_network_disk_returns(
    fails_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file handle that was open before a remount stays unusable, so the file is opened again."""
    log = MetricsLog(RunFolder(tmp_path), step=0, steps_per_epoch=3)
    log.write("train", {"step": 1})
    content = log.path.read_bytes()
    log.path.unlink()
    if fails_at == "open":
        log.write("train", {"step": 2})
    log.path.write_bytes(content)
    with monkeypatch.context() as patch:
        if fails_at == "write":
            patch.setattr(os, "pwrite", Mock(side_effect=OSError(errno.ESTALE, "stale")))
        log.write("train", {"step": 3})
    log.write("train", {"step": 4})
    log.close()
    steps = [json.loads(text)["step"] for text in log.path.read_text().splitlines()]
    assert steps == ([1, 2, 3, 4] if fails_at == "open" else [1, 3, 4])
