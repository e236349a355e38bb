"""Warnings about the machine: each problem once, in the log, on the screen and in the report."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastsiam import environment
from fastsiam.config import TrainConfig
from fastsiam.console import Console, size
from fastsiam.report.run import write_report
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.folder import RunFolder
from fastsiam.run.log import MetricsLog, read_metrics
from fastsiam.train import gauges
from fastsiam.train.command import train_here
from fastsiam.train.gauges import Gauges, Gpu, GpuClock
from tests.configs import with_settings

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the host free memory, whatever other tests take of it."""
    monkeypatch.setattr(gauges, "host_memory", lambda: (10 * 10**9, 64 * 10**9))


def warnings_of(run: Path, waits: list[float], clocks: list[GpuClock] | None = None) -> list[str]:
    """Return the warnings at log points with these data waits and GPU clocks."""
    log = MetricsLog(RunFolder(run), step=0, steps_per_epoch=10)
    own = Gauges(log, console=Console(quiet=True), device=CPU)
    if clocks is not None:
        own._gpu = SimpleNamespace(clock=iter(clocks).__next__)  # type: ignore[assignment]
    for step, wait in enumerate(waits, start=1):
        own.check({"step": step, "epoch": step / 10, "data_wait": wait})
    log.close()
    return [f"{line['step']} {line['name']}: {line['text']}" for line in read_metrics(run)]


def test_a_loader_that_becomes_slower(tmp_path: Path) -> None:
    """Not one that was slow from the start, and not for a few slow log points."""
    steady = [0.9, *(60 * [0.3])]
    assert warnings_of(tmp_path / "steady", [*steady, *(18 * [0.9]), *steady]) == []
    (warning,) = warnings_of(tmp_path / "slower", [*steady, *(60 * [0.41])])
    assert warning == (
        "82 data_wait: data wait grew from 30% to 41% (medians of 40 log points): the loader "
        "became slower"
    )


def test_a_gpu_that_is_slowed_down(tmp_path: Path) -> None:
    """Not for a moment: at half of the last log points."""
    hot, cool = GpuClock(("heat (hardware)",), 1200, 1980, 88), GpuClock((), 1980, 1980, 60)
    waits = 100 * [0.02]
    assert warnings_of(tmp_path / "third", waits, 33 * [hot, cool, cool] + [cool]) == []
    (warning,) = warnings_of(tmp_path / "half", waits, 50 * [cool] + 50 * [hot])
    assert warning == (
        "70 gpu: the GPU was throttled (heat (hardware)) at 20 of the last 40 log points: "
        "1,200 of 1,980 MHz at 88 C"
    )


def test_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges, "host_memory", lambda: (3 * 10**9, 64 * 10**9))
    (warning,) = warnings_of(tmp_path, 3 * [0.02])
    assert warning.startswith("1 memory: the host has 3.0 GB of 64 GB memory left; ")


def test_the_hosts_memory_is_read() -> None:
    free, total = environment.host_memory()
    assert 0 < free <= total


def test_a_disk_without_room_for_checkpoints_is_in_the_log_on_the_screen_and_in_the_report(
    small: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """From the first checkpoint on; a resumed run warns again."""
    disk = SimpleNamespace(free=10**5)
    monkeypatch.setattr("shutil.disk_usage", lambda path: disk)
    config = with_settings(small, knn_every=0, save_every=2)
    run = train_here(with_settings(config, max_steps=4), "imagenet")
    takes = size(checkpoints.last(run).stat().st_size)
    text = f"the disk of {run} has 100 kB left; a checkpoint takes {takes}, and the previous one"
    assert capfd.readouterr().err.count(f"warning: {text}") == 1
    train_here(config, "imagenet")
    assert capfd.readouterr().err.count(f"warning: {text}") == 1
    found = [line for line in read_metrics(run) if line["kind"] == "alarm"]
    assert [(line["step"], line["name"]) for line in found] == [(3, "disk"), (5, "disk")]
    page = write_report([run], tmp_path / "page.html").read_text()
    assert "<h2>Alarms</h2>" in page and f"epoch 1: the disk of {run} has 100 kB left" in page


class FakeNvml:
    """NVIDIA's management library with one GPU."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    class NVMLError(Exception):
        """As pynvml raises it."""

    def __init__(self, reasons: int, *, fails: str = "") -> None:
        self._answers = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByUUID": "handle",
            "nvmlDeviceGetCurrentClocksThrottleReasons": reasons,
            "nvmlDeviceGetClockInfo": 1200,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetTemperature": 88,
        }
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        answer = self._answers[name]

        def function(*arguments: object) -> Any:
            if name == self._fails:
                raise self.NVMLError
            if name == "nvmlDeviceGetHandleByUUID":
                assert arguments == ("GPU-1234",)
            return answer

        return function


def clock_of(library: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> GpuClock | None:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    facts = SimpleNamespace(uuid="1234")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    return Gpu(torch.device("cuda:0")).clock()


def test_the_clock_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle GPU, or one at its power limit (bits 1 and 4), is not slowed down."""
    assert clock_of(FakeNvml(0x05), monkeypatch) == GpuClock((), 1200, 1980, 88)
    throttles = ("heat (software)", "heat (hardware)")
    assert clock_of(FakeNvml(0x64), monkeypatch) == GpuClock(throttles, 1200, 1980, 88)
    for function in ("nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetTemperature"):
        assert clock_of(FakeNvml(0x40, fails=function), monkeypatch) is None
