"""Records that were not measured, and the command in the test's process."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from typer.testing import CliRunner, Result

from fastsiam import cli
from fastsiam.bench.records import Record, Row, Sample, Timing
from tests.processes import Forked


def sample(wall: float, cpu: float = 0.0) -> Sample:
    return Sample(wall, cpu)


def record(
    case: str,
    name: str,
    timing: Timing,
    *,
    torchvision: Timing | None = None,
    baseline: tuple[str, Timing | None] = ("", None),
    ceiling: tuple[str, Timing | None] = ("", None),
    **more: Any,
) -> Record:
    """Make a record of a timing, compared with others."""
    others = {"today's": torchvision, "base": baseline[1], "limit": ceiling[1]}
    row = Row(
        case=case, name=name, torchvision="today's", baseline=(baseline[0], "base"),
        ceiling=(ceiling[0], ["limit"]), in_the_clock="", **more,
    )  # fmt: skip
    return row.record({name: timing} | {key: one for key, one in others.items() if one})


def made(
    name: str = "a",
    case: str = "loader",
    wall: float = 2.0,
    *,
    spread: float = 0.0,
    images: int = 8,
    **more: Any,
) -> Record:
    walls = [wall * (1 - spread), wall, wall * (1 + spread)] if spread else [wall]
    timing = Timing([sample(one, 3.0) for one in walls], images)
    return record(case, name, timing, config={"batch": 8}, **more)


def bench(*arguments: str, code: int = 0) -> Result:
    """Run ``fastsiam bench ARGUMENTS`` and expect an exit code."""
    argv = ["fastsiam", "bench", *arguments]  # records give it as their command
    with mock.patch.object(sys, "argv", argv):
        done = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["bench", *arguments])
    assert done.exit_code == code, f"exit {done.exit_code}\n{done.output}\n{done.exc_info}"
    return done


def wait_for_text(path: Path, process: Forked, text: str = "") -> str:
    """Wait until a process has written a text into a file; return all that is there."""
    deadline = time.monotonic() + 120
    while not (found := path.read_text() if path.exists() else "") or text not in found:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    return found
