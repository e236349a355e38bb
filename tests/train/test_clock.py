"""The forecast: how long a run will take, said after the first steps, and once."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fastsiam.config import TrainConfig
from fastsiam.config.recipes import RECIPES
from fastsiam.train import clock as module
from fastsiam.train.clock import Clock, Forecast
from fastsiam.train.loop import _outlook
from fastsiam.views.batch import Batch
from tests.configs import with_settings
from tests.train.runs import run_once


class Time:
    """Steps that take as long as they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, last: int = 10**6) -> None:
        self.now, self.step = 1000.0, 0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        self.clock = Clock()
        self.clock.resume()
        self.forecast = Forecast(self.clock, last=last)

    def steps(self, *seconds: float) -> list[float | None]:
        found = []
        for each in seconds:
            self.now += each
            self.step += 1
            found.append(self.forecast.note(self.step))
        return found


def test_the_first_step_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Time(monkeypatch)
    assert own.steps(60.0) == [None]  # compiles
    assert own.steps(*[2.0] * 4) == [None] * 4
    assert own.steps(2.5) == [pytest.approx(2.1)]
    assert own.steps(2.0, 2.0) == [None] * 2  # it is said once


def test_it_is_told_before_the_first_epoch_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Time(monkeypatch, last=2).steps(9, 1) == [None, 1]


def test_evaluations_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Time(monkeypatch)
    own.steps(1, 6)
    own.clock.pause()
    own.now += 500
    own.clock.resume()
    assert own.steps(6) == [6]


def test_what_is_said() -> None:
    config = with_settings(RECIPES["imagenet"](), batch=512)
    assert _outlook(100.0, config, 2502, 250_199) == (
        "at 5.1 images/s an epoch takes about 2 d 22 h, "
        "the remaining 250,199 steps 289 d 14 h, without evaluations"
    )
    config = replace(config, monitor=replace(config.monitor, knn_every=0))
    assert _outlook(0.25, config, 100, 999) == (
        "at 2,048 images/s an epoch takes about 25 s, the remaining 999 steps 4 min"
    )


def test_a_run_says_it_once(
    small: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Before the first epoch is over."""
    monkeypatch.setattr(module, "_TIMED_SECONDS", 0.0)
    said: list[str] = []

    def look(step: int, batch: Batch) -> None:
        if step == 3:
            said.append(capfd.readouterr().err)

    run_once(with_settings(small, log_every=100, knn_every=0), tmp_path / "run", before=look)
    assert len(re.findall(r"an epoch takes about \d+ s, the remaining 10 steps", said[0])) == 1
    assert "an epoch takes" not in capfd.readouterr().err
