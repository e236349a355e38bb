"""Records that were not measured, and the command in the test's process."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

from typer.testing import CliRunner, Result

from fastsiam import cli
from fastsiam.bench.records import Record, Sample, Timing, record


def sample(wall: float, cpu: float = 0.0) -> Sample:
    return Sample(wall, cpu)


def made(name: str = "a", case: str = "loader", wall: float = 2.0, **more: Any) -> Record:
    timing = Timing([sample(wall, 3.0)], 8)
    return record(case, name, timing, config={"batch": 8}, **more)


def bench(*arguments: str, code: int = 0) -> Result:
    """Run ``fastsiam bench ARGUMENTS`` and expect an exit code."""
    argv = ["fastsiam", "bench", *arguments]  # records give it as their command
    with mock.patch.object(sys, "argv", argv):
        done = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["bench", *arguments])
    assert done.exit_code == code, f"exit {done.exit_code}\n{done.output}\n{done.exc_info}"
    return done
