"""Synthetic benchmark records, and a helper that runs ``fastsiam bench`` in the test's process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

from typer.testing import CliRunner, Result

from fastsiam import cli
from fastsiam.bench.measurements import Record, Row, Sample, Timing
from tests.processes import Forked, wait_until


def build_record(
    name: str = "a",
    case: str = "loader",
    *walls: float,
    images: int = 8,
    cpu: float = 3.0,
    torchvision: int = 0,
    baseline: tuple[str, int] = ("", 0),
    ceiling: tuple[str, int] = ("", 0),
    **more: Any,
) -> Record:
    """Build a record; ``walls`` are seconds per repeat, compared speeds are in images/s."""
    speeds = {"today's": torchvision, "base": baseline[1], "limit": ceiling[1]}
    timings = {key: Timing([Sample(1.0, 1.0)], speed) for key, speed in speeds.items() if speed}
    timings[name] = Timing([Sample(wall, cpu) for wall in walls or (2.0,)], images)
    row = Row(
        case=case, name=name, torchvision="today's", baseline=(baseline[0], "base"),
        ceiling=(ceiling[0], ["limit"]), in_the_clock="", **{"config": {"batch": 8}, **more},
    )  # fmt: skip
    return row.record(timings)


def bench(*arguments: str, code: int = 0) -> Result:
    """Run ``fastsiam bench ARGUMENTS`` and expect an exit code."""
    argv = ["fastsiam", "bench", *arguments]  # recorded as the command
    with mock.patch.object(sys, "argv", argv):
        result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["bench", *arguments])
    assert result.exit_code == code, f"exit {result.exit_code}\n{result.output}\n{result.exc_info}"
    return result


def wait_for_text(path: Path, process: Forked, text: str = "") -> str:
    """Wait until a process has written ``text`` to a file; return the file's content."""
    wait_until(process, lambda: path.exists() and (content := path.read_text()) and text in content)
    return path.read_text()
