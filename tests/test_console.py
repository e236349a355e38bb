"""What the lines under a long piece of work say."""

from __future__ import annotations

import time

import pytest

from fastsiam.console import Console, FileProgress


def test_speed_and_time_left_count_from_where_the_work_began(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    shown = FileProgress(Console())
    shown.begin("train.beton", 1000, 100_000_000)
    shown.progress(400, 40_000_000)  # an earlier try did these
    now[0] += 1
    shown.progress(450, 45_000_000)
    assert capsys.readouterr().err == ""  # too early to tell
    now[0] += 19
    shown.progress(600, 60_000_000)
    line = capsys.readouterr().err
    assert line == "train.beton: image 600 of 1,000: 10 images/s, 1 MB/s, 40 s left\n"
    now[0] += 1
    shown.progress(610, 61_000_000)
    assert capsys.readouterr().err == ""  # one line in ten seconds
    now[0] += 1
    shown.progress(1000, 100_000_000)
    assert "image 1,000 of 1,000: 27 images/s, 3 MB/s, 0 s left" in capsys.readouterr().err
    shown.end()
