"""Contenders that are forked from the process that has imported everything.

Started as bench/contest.py does, by a new Python each, they would take seconds.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

from typer.testing import CliRunner, Result

from fastsiam import cli, trace
from fastsiam.bench import contest
from tests.conftest import ROOT


class _Forking(ForkServerContext):
    """What starts processes that have the environment of the one that starts them."""

    def Process(  # type: ignore[override]  # multiprocessing's name
        self, *, target: Callable[..., object], args: tuple[Any, ...]
    ) -> multiprocessing.context.ForkServerProcess:
        begin = (dict(os.environ), target, args)
        return multiprocessing.context.ForkServerProcess(target=_begin, args=begin)


def _begin(
    environment: dict[str, str], target: Callable[..., object], args: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    importlib.reload(trace)  # it reads its variable when it is imported
    target(*args)


@contextmanager
def forked() -> Iterator[None]:
    """Have this process's contenders forked."""
    here, before = Path.cwd(), contest._SPAWN
    os.chdir(ROOT)  # what they are forked from finds the tests here
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(here)
    contest._SPAWN = _Forking()  # type: ignore[assignment]
    try:
        yield
    finally:
        contest._SPAWN = before


def bench(*arguments: str) -> Result:
    """Run ``fastsiam bench ARGUMENTS`` with such contenders, and expect that it ends well."""
    argv = ["fastsiam", "bench", *arguments]  # what records give as their command
    with forked(), mock.patch.object(sys, "argv", argv):
        done = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["bench", *arguments])
    assert done.exit_code == 0, f"exit {done.exit_code}\n{done.output}\n{done.exc_info}"
    return done
