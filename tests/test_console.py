"""Console output: progress of long work, and messages."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time

import pytest
import torch
from rich.console import Console as RichConsole

from fastsiam.console import Console, format_count, pace, tally
from fastsiam.distributed import Place, Signalled, StopSignals
from tests.processes import Forked


class Screen:
    """A terminal of 200 columns that records its output, with a clock that tests set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.text, self.now = io.StringIO(), 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        out = RichConsole(file=self.text, force_terminal=True, width=200)
        monkeypatch.setattr("fastsiam.console._shared", lambda can_draw: out)
        self.console = Console()

    def output(self) -> str:
        """Return the output since the last call."""
        text = self.text.getvalue()
        self.text.seek(0)
        self.text.truncate()
        return text


def test_tally_logs_after_5_s_then_every_10_s(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Console().tally("decoding images", 1200, done=200) as counter:  # 200 by an earlier run
        for _ in range(49):
            now[0] += 0.1
            counter.add(2)
        assert capsys.readouterr().err == ""
        now[0] += 0.1
        counter.add(2)
        assert capsys.readouterr().err == "decoding images 300 of 1,200: 20/s, 45 s left\n"
        now[0] += 9.9
        counter.add(500)
        assert capsys.readouterr().err == ""
        now[0] += 0.1
        counter.add(150)
        assert capsys.readouterr().err == "decoding images 950 of 1,200: 50/s, 5 s left\n"
    assert counter.done == 950 and capsys.readouterr().err == ""


def test_speeds_below_ten_have_two_digits() -> None:
    """For example one image in 11 s, by a detector on a CPU."""
    texts = [pace(speed, 6, unit="") for speed in (0.094, 7.46, 9.97, 1234.5)]
    assert texts == ["0.094/s, 64 s left", "7.5/s, 1 s left", "10/s, 1 s left", "1,234/s, 0 s left"]
    assert pace(7.0) == "7 images/s"


def test_log_lines_state_speed_and_remaining_time(capsys: pytest.CaptureFixture[str]) -> None:
    values = {"step": 3, "epoch": 0.5, "loss": -0.5, "z_std": 0.75, "rank": 9.0, "data_wait": 0.25}
    Console().show(values | {"images_per_second": 2.5}, remaining=10, batch=16)
    expected = "loss -0.500, std 0.75, rank 9, data wait 25%, 2.5 images/s, 64 s left\n"
    assert capsys.readouterr().err.endswith(f" 3 (epoch 0.50): {expected}")


def test_terminal_progress_bar_is_erased_at_end(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch)
    threads = set(threading.enumerate())
    with screen.console.tally("listing /a [b], files", 10) as counter:
        counter.add()
        assert screen.output() == ""
        screen.now += 6
        counter.add()
        assert "listing /a [b], files 2/10" in screen.output()
        counter.add()  # at the same time
        assert screen.output() == "" and set(threading.enumerate()) <= threads
        screen.now += 1
        counter.add()
        assert "files 4/10" in screen.output()
    assert screen.output().endswith("\x1b[1A\x1b[2K")  # erased


def test_nested_tally_shares_progress_display(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch)
    with screen.console.progress(100, 0):
        screen.console.advance(50, "loss -0.5")
        assert "50/100" in screen.output()
        with (
            tally("kNN: images", 10) as elsewhere,
            screen.console.tally("kNN: images", 10) as counter,
        ):
            screen.now += 6
            counter.add(4)
            text = screen.output()
            assert "50/100" in text and "kNN: images 4/10" in text
            assert elsewhere.done == 0
        assert "kNN" not in screen.output().rpartition("50/100")[2]


def test_unwritable_stderr_is_ignored() -> None:
    """On a full disk, and after the reader has closed the pipe."""
    for left in (False, True):
        result = Forked(_log_until_sigint, left).wait(60)
        assert (result.returncode, result.stdout) == (0, "2")


def _log_until_sigint(is_pipe: bool) -> None:
    """Print messages and progress and get a Ctrl-C, while standard error cannot be written."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer if is_pipe else os.open("/dev/full", os.O_WRONLY), 2)
    console = Console()
    with console.progress(2, 0), StopSignals(Place(0, 1, torch.device("cpu"))) as stop:
        console.say("first batch")
        console.warn("the disk is full")
        console.advance(2, "loss")
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Signalled) as caught:
            next(stop.over([1]))
        os.write(1, str(caught.value.number).encode())


def test_progress_falls_back_to_plain_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def progress_output() -> str:
        console = Console()
        with console.progress(4, 0):
            console.advance(1, "loss 0.5")
        return capsys.readouterr().err

    monkeypatch.setenv("FORCE_COLOR", "1")
    assert progress_output() == "step 1: loss 0.5\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    assert progress_output() == "step 1: loss 0.5\n"
    monkeypatch.setenv("TERM", "xterm")
    assert "step 1/4 loss 0.5" in progress_output()


def test_console_prints_names_verbatim(capsys: pytest.CaptureFixture[str]) -> None:
    """Rich would read brackets as markup and words between colons as emoji."""
    Console().say("run folder runs/lr:b:64 [red]x[/red]")
    assert capsys.readouterr().err == "run folder runs/lr:b:64 [red]x[/red]\n"


def test_counted_uses_singular_for_one() -> None:
    texts = [format_count(number, "epoch") for number in (1, 1.0, 0, 1.5, 24)]
    assert texts == ["1 epoch", "1 epoch", "0 epochs", "1.5 epochs", "24 epochs"]
