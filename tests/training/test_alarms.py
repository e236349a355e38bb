"""Alarms: what drifts or runs out is said once, with its figures; noise is not."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.signal import lfilter

from fastsiam.config import TrainConfig
from fastsiam.jobs.train import train_here
from fastsiam.report.run import write_report
from fastsiam.training import drift as drifts
from fastsiam.training import watch
from fastsiam.training.alarms import _SLOWER, Alarm, Alarms
from fastsiam.training.drift import Series, is_drift
from fastsiam.training.log import read_metrics
from fastsiam.training.nvml import GpuClock, Nvml
from fastsiam.training.vitals import Vitals, VitalSigns
from tests.configs import with_settings
from tests.tiers import rest_slow

CPU = torch.device("cpu")
WEEK = 7 * 24 * 12
"""Windows of five minutes."""
HEALTHY = Vitals(
    memory=10 * 2**30,
    files=64,
    memory_limit=64 * 10**9,
    files_limit=1024,
    disk_free=10**12,
    checkpoint=10**8,
    shared_free=9 * 10**9,
    shared=10**10,
)


def noise(
    weeks: int, *, deviation: float, correlation: float, seed: int = 0
) -> NDArray[np.float64]:
    """Return windows of stationary noise about 1: (weeks, WEEK), normal, first-order correlated."""
    drawn = np.random.default_rng(seed).normal(size=(weeks, WEEK))
    drawn[:, 1:] *= np.sqrt(1 - correlation**2)
    found: NDArray[np.float64] = 1 + deviation * lfilter([1], [1, -correlation], drawn, axis=1)
    return found


def share_of_falls(windows: NDArray[np.float64]) -> float:
    """Return the share of runs of whose speed an alarm says that it fell, sooner or later.

    All runs are followed at once as ``Series`` follows one, window by window.
    """
    said = np.zeros(len(windows), bool)
    seen: list[NDArray[np.float64]] = []
    parts: list[NDArray[np.float64]] = []
    each = 1
    for window in windows.T:
        parts.append(window)
        if len(parts) < each:
            continue
        seen.append(np.median(parts, axis=0))
        parts = []
        if len(seen) == drifts._MOST:
            seen = [np.median(pair, axis=0) for pair in zip(seen[::2], seen[1::2], strict=True)]
            each *= 2
        if len(seen) < drifts._FEWEST:
            continue
        values = np.array(seen).T
        quarter = values.shape[1] // 4
        then, now = (np.median(part, 1) for part in (values[:, :quarter], values[:, -quarter:]))
        said |= (now <= _SLOWER * then) & is_drift(-values)
    return float(said.mean())


NOISE = [(0.03, 0.0, 0.01), (0.03, 0.97, 0.02), (0.05, 0.97, 0.2), (0.05, 0.5, 0.02)]
NOISE += [(0.03, 0.9, 0.02), (0.03, 0.99, 0.02), (0.05, 0.9, 0.2), (0.05, 0.99, 0.2)]


@pytest.mark.parametrize(("deviation", "correlation", "most"), rest_slow(NOISE, fast=3))
def test_noise_of_a_week_is_no_alarm(deviation: float, correlation: float, most: float) -> None:
    """Not in a large majority of weeks, though each is looked at some hundred times."""
    weeks = noise(300, deviation=deviation, correlation=correlation)
    assert abs(weeks.std() / deviation - 1) < 0.1
    assert share_of_falls(weeks) <= most


TIME = np.linspace(0, 1, WEEK)
FALLS = {
    "a third in a week": 1 - TIME / 3,
    "a fifth at once": np.where(TIME < 0.3, 1.0, 0.8),
    "a third in the last days": np.where(TIME < 0.6, 1.0, 1 - (TIME - 0.6) / 1.2),
    "a third in the first day": np.clip(1 - 7 * TIME / 3, 2 / 3, 1),
}


@pytest.mark.parametrize("fall", rest_slow(list(FALLS), fast=2))
def test_falls_of_speed_are_found_in_noise(fall: str) -> None:
    weeks = noise(100, deviation=0.03, correlation=0.9) * FALLS[fall]
    assert share_of_falls(weeks) >= 0.95


def test_a_peak_that_is_over_is_no_drift() -> None:
    hour = np.concatenate([np.full(20, 1.0), np.full(20, 0.5), np.full(20, 1.0)])
    assert not is_drift(hour) and not is_drift(-hour)
    assert is_drift(np.arange(24.0)) and not is_drift(-np.arange(24.0))


def points(
    count: int, *, each: float = 60, begin: int = 0, **figures: Any
) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield log points, one in ``each`` seconds: values and vitals, functions of the share done."""
    for i in range(begin, begin + count):
        at = {name: figure((i - begin) / count) for name, figure in figures.items()}
        values = {"step": 50 * (i + 1), "epoch": i / 100, "seconds": each * (i + 1)}
        speed = {"images_per_second": at.pop("speed", 1000.0), "data_wait": at.pop("wait", 0.02)}
        yield values | speed, at


def followed(
    alarms: Alarms, line: Iterable[tuple[Mapping[str, Any], dict[str, Any]]]
) -> list[Alarm]:
    healthy = {name: getattr(HEALTHY, name) for name in Vitals.__slots__}
    return [alarm for values, at in line for alarm in alarms.note(values, Vitals(**(healthy | at)))]


def test_a_run_that_is_well_has_no_alarm() -> None:
    assert not followed(Alarms(), points(3000))


def test_a_fall_of_speed_says_from_where_to_where() -> None:
    found = followed(Alarms(), points(2000, speed=lambda t: 1840 - 600 * t))
    assert [alarm.name for alarm in found] == ["images_per_second"]
    (alarm,) = found
    assert alarm.text.startswith("images/s fell from 1,") and ", by 12%" in alarm.text
    assert "(median of epochs 0.16 to " in alarm.text
    assert alarm.record()["text"] == alarm.text and json.dumps(alarm.record())


def test_a_wait_for_data_that_grows() -> None:
    (alarm,) = followed(Alarms(), points(2000, wait=lambda t: 0.02 + 0.3 * t))
    assert alarm.name == "data_wait" and alarm.text.startswith("data wait grew from ")
    assert alarm.text.endswith("the loader became slower")


def test_memory_that_climbs_says_when_it_is_full() -> None:
    """A thousand log points, a minute each: 2 GB an hour."""
    found = followed(Alarms(), points(1000, memory=lambda t: 10e9 + t * 1000 / 60 * 2e9))
    (alarm,) = found
    assert alarm.name == "memory" and ", 2.0 GB an hour; so all 64 GB are full after " in alarm.text


def test_memory_that_is_taken_once_is_no_alarm() -> None:
    """Caches fill in the first hours; what stays then is no leak."""
    filled = points(3000, memory=lambda t: 10e9 + 20e9 * min(1, 20 * t))
    assert not followed(Alarms(), filled)


def test_open_files_that_climb() -> None:
    (alarm,) = followed(Alarms(), points(1500, files=lambda t: 64 + int(300 * t)))
    assert alarm.name == "files" and alarm.text.startswith("open files climb: from ")
    assert "; so all 1,024 are full after " in alarm.text


SCARCE = {
    "files_limit": ({"files": 950}, "950 files are open, of 1,024 that may be (ulimit -n)"),
    "disk": (
        {"disk_free": 15 * 10**7},
        "the run's disk has 150 MB left; a checkpoint takes 100 MB, and the one before stays until "
        "it is written",
    ),
    "shared_memory": (
        {"shared_free": 10**8},
        "/dev/shm has 100 MB of 10 GB left; when it is full, loader processes are killed by SIGBUS",
    ),
}


@pytest.mark.parametrize("name", list(SCARCE))
def test_what_is_nearly_used_up(name: str) -> None:
    """Said at the first log point, and once."""
    vitals, text = SCARCE[name]
    figures: dict[str, Any] = {name: lambda t, own=own: own for name, own in vitals.items()}
    (alarm,) = followed(Alarms(), points(30, **figures))
    assert (alarm.name, alarm.step, alarm.text) == (name, 50, text)


def test_a_gpu_that_is_slowed_down() -> None:
    """Not at a moment: at half of the last log points."""
    hot, cool = GpuClock(("heat (hardware)",), 1200, 1980, 88), GpuClock((), 1980, 1980, 60)
    assert not followed(Alarms(), points(200, gpu=lambda t: hot if int(200 * t) % 3 == 0 else cool))
    (alarm,) = followed(Alarms(), points(200, gpu=lambda t: hot if t > 0.5 else cool))
    assert alarm.text == (
        "the GPU is slowed down (heat (hardware)) at 20 of the last 40 log points: "
        "1,200 of 1,980 MHz at 88 C"
    )


def test_after_a_resume_only_what_got_worse() -> None:
    first = followed(Alarms(), points(2000, speed=lambda t: 1840 - 600 * t))
    earlier = [json.loads(json.dumps(alarm.record())) for alarm in first]
    said = -first[0].now
    same = points(2000, begin=2000, speed=lambda t: said * (1.2 - 0.2 * t))
    assert not followed(Alarms(earlier), same)
    worse = points(2000, begin=2000, speed=lambda t: said * (1 - 0.5 * t))
    (alarm,) = followed(Alarms(earlier), worse)
    assert alarm.name == "images_per_second" and -alarm.now <= _SLOWER * said


def test_a_run_of_years_keeps_few_windows() -> None:
    series = Series()
    for i in range(100_000):
        series.note(epoch=i / 100, seconds=60.0 * i, value=float(i))
    assert drifts._MOST // 2 <= len(series.windows) < drifts._MOST
    found = series.drift(rises=True)
    assert found is not None and found.goes_on and found.per_second == pytest.approx(1 / 60)


class FakeVitals:
    def __init__(self, *_: object) -> None:
        pass

    def read(self) -> Vitals:
        return Vitals(disk_free=5 * 10**6, checkpoint=10**7)


def test_an_alarm_is_in_the_log_on_the_screen_and_on_the_page(
    small: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """And is said again by no resumed run that finds the same."""
    monkeypatch.setattr(watch, "VitalSigns", FakeVitals)
    run = train_here(with_settings(small, knn_every=0, max_steps=4), "imagenet")
    text = "the run's disk has 5.0 MB left; a checkpoint takes 10 MB, and the one before stays"
    assert capfd.readouterr().err.count(f"warning: {text}") == 1
    train_here(with_settings(small, knn_every=0), "imagenet")
    assert text not in capfd.readouterr().err
    (line,) = [line for line in read_metrics(run) if line["kind"] == "alarm"]
    assert (line["step"], line["name"], line["now"]) == (1, "disk", -5e6)
    page = write_report([run], tmp_path / "page.html").read_text()
    assert "<h2>Alarms</h2>" in page and "epoch 0.33: the run&#x27;s disk has 5.0 MB left" in page


def test_vitals_are_those_of_this_process_and_its_workers(tmp_path: Path) -> None:
    signs = VitalSigns(tmp_path, CPU)
    before = signs.read()
    assert before.memory and before.files and before.memory_limit and before.disk_free
    assert before.checkpoint == 0 and before.gpu is None
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        held = bytearray(64 * 2**20)
        held[::4096] = b"x" * len(held[::4096])
        os.write(writer, b"x")
        os.read(os.pipe()[0], 1)  # until it is killed
    os.read(reader, 1)
    after = signs.read()
    os.kill(child, 9)
    os.waitpid(child, 0)
    for number in (*opened, reader, writer):
        os.close(number)
    assert after.files is not None and after.files == before.files + 22
    assert after.memory is not None and after.memory >= before.memory + 64 * 2**20


class FakeLibrary:
    """NVIDIA's library with one GPU."""

    def __init__(self, reasons: int, refused: int = 0) -> None:
        self._reasons, self._refused = reasons, refused

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, gpu: Any) -> int:
        return 0 if name == b"GPU-1234" else 6

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: Any, out: Any) -> int:
        ctypes.cast(out, ctypes.POINTER(ctypes.c_ulonglong))[0] = self._reasons
        return self._refused

    def nvmlDeviceGetClockInfo(self, gpu: Any, kind: int, out: Any) -> int:
        return self._put(out, 1200)

    def nvmlDeviceGetMaxClockInfo(self, gpu: Any, kind: int, out: Any) -> int:
        return self._put(out, 1980)

    def nvmlDeviceGetTemperature(self, gpu: Any, kind: int, out: Any) -> int:
        return self._put(out, 88)

    def _put(self, out: Any, value: int) -> int:
        ctypes.cast(out, ctypes.POINTER(ctypes.c_uint))[0] = value
        return 0


def clock_of(library: object, monkeypatch: pytest.MonkeyPatch, uuid: str = "1234") -> Any:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    facts = SimpleNamespace(uuid=uuid)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    return Nvml(torch.device("cuda:0")).read()


def test_what_the_driver_says_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle, or at the power that it may take (1, 4), it is not slowed down."""
    assert clock_of(FakeLibrary(0x05), monkeypatch) == GpuClock((), 1200, 1980, 88)
    throttles = ("heat (software)", "heat (hardware)")
    assert clock_of(FakeLibrary(0x64), monkeypatch) == GpuClock(throttles, 1200, 1980, 88)
    assert clock_of(FakeLibrary(0x40, refused=3), monkeypatch) is None
    assert clock_of(FakeLibrary(0x40), monkeypatch, uuid="of another") is None
    assert clock_of(SimpleNamespace(), monkeypatch) is None
