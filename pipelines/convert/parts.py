"""A conversion in parts: one after the other here, or as tasks of dask."""

from __future__ import annotations

import importlib
import logging
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastsiam.config import ConvertConfig
from fastsiam.console import duration
from fastsiam.environment import add_package_to_path
from fastsiam.errors import DataError, FastSiamError
from fastsiam.files import quoted
from fastsiam.pipelines.convert import Kind, beside, read_manifests
from fastsiam.pipelines.convert.command import convert_data, lossy_line, stoppable
from fastsiam.pipelines.remote.path import opened
from fastsiam.signals import ending_with

_RETRIES = 2
"""Times that dask restarts a part whose process was killed. Of workers that die dask allows
``distributed.scheduler.allowed-failures`` for each part, 3 by default."""


@dataclass(frozen=True, slots=True)
class PartResult:
    """How the conversion of a part ended."""

    error: str
    """What it wrote to its standard error if it failed, else ""."""
    seconds: float
    host: str


class PartKilledError(Exception):
    """The process that made a part was killed."""


def convert_parts(kind: Kind, config: ConvertConfig, words: Sequence[str]) -> None:
    """Convert a data set in parts, and say how to use them.

    Args:
        kind: of the source.
        config: of the whole conversion.
        words: its arguments on the command line, after ``fastsiam``.

    Raises:
        FastSiamError: dask is not installed, or its scheduler does not answer.
        DataError: a part cannot be made; the others are, and the same command resumes.
        Interrupted: Ctrl-C or SIGTERM.
    """
    out = Path(config.out) if config.out else beside(opened(config.root))
    if config.engine == "dask":
        # Workers may have been started with another FASTSIAM_DATA and in another folder.
        failed = _by_dask(config, [*words, "--source", str(config.root), "--out", str(out)])
    else:
        failed = _here(kind, config)
    if failed:
        number = min(failed)
        raise DataError(
            f"part {number} of {config.parts}: {failed[number]}; {len(failed)} of {config.parts} "
            "parts are missing, and the same command makes only these"
        )
    abouts = (read_manifests(out) or {}).values()
    if lossy := lossy_line([*abouts], config):
        print(lossy)
    here = quoted(out)
    print(
        f"{config.parts} parts in {here} are one data set: use it with --data {here}; one file of "
        f"them: fastsiam convert folder --source {here} --out FOLDER"
    )


def _here(kind: Kind, config: ConvertConfig) -> dict[int, str]:
    """Convert one part after the other, each with all workers; return the errors by part."""
    failed = {}
    for number in range(1, config.parts + 1):
        _say(f"part {number} of {config.parts}")
        try:
            convert_data(kind, replace(config, parts=0, part=f"{number}/{config.parts}"))
        except DataError as error:
            failed[number] = str(error)
    return failed


def _by_dask(config: ConvertConfig, words: Sequence[str]) -> dict[int, str]:
    """Have dask's workers convert the parts; return the errors by part."""
    try:
        distributed = importlib.import_module("distributed")
    except ImportError as error:
        raise FastSiamError("--engine dask needs dask: pip install 'fastsiam[dask]'") from error
    add_package_to_path()
    failed: dict[int, str] = {}
    address = config.scheduler or os.environ.get("DASK_SCHEDULER_ADDRESS", "")
    with ExitStack() as stack:
        stack.enter_context(stoppable("the same command makes the parts that are missing"))
        cluster = None
        if not address:
            cluster = stack.enter_context(
                distributed.LocalCluster(
                    threads_per_worker=1, dashboard_address=None, silence_logs=logging.CRITICAL
                )
            )
        try:
            client = distributed.Client(cluster or address, set_as_default=False)
        except (OSError, ValueError) as error:
            raise FastSiamError(f"no dask scheduler answers at {address} ({error})") from error
        stack.enter_context(client)
        numbers = {}
        for number in range(1, config.parts + 1):
            command = _command(words, number, config.parts)
            future = client.submit(run_part, command, os.getcwd(), retries=_RETRIES, pure=False)
            numbers[future] = number
        stack.callback(client.cancel, list(numbers), force=True)
        for future in distributed.as_completed(numbers, loop=client.loop):
            _note(future, numbers[future], config.parts, failed)
    return failed


def _command(words: Sequence[str], number: int, count: int) -> tuple[str, ...]:
    """Return the command line that converts one part."""
    own = ("--engine", "local", "--scheduler", "", "--parts", "0", "--part", f"{number}/{count}")
    return (sys.executable, "-m", "fastsiam", *words, *own)


def run_part(command: Sequence[str], folder: str) -> PartResult:
    """Convert a part in a process that ends with this worker.

    Args:
        command: its command line.
        folder: where to run it.

    Raises:
        PartKilledError: a signal ended the process: dask tries again.
    """
    host, started = platform.node(), time.monotonic()
    if not Path(folder).is_dir():
        return PartResult(f"{host} does not see {folder}: workers need the same files", 0.0, host)
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # At once, because another worker starts this part again.
        preexec_fn=ending_with(os.getpid(), signal.SIGKILL),
    )
    if done.returncode < 0 or done.returncode > 128:
        raise PartKilledError(f"its process on {host} was killed (exit code {done.returncode})")
    failed = f"exit code {done.returncode}" if done.returncode else ""
    return PartResult(failed and (done.stderr.strip() or failed), time.monotonic() - started, host)


def _note(future: Any, number: int, count: int, failed: dict[int, str]) -> None:
    """Say how a part ended; keep the last line of its error."""
    part = f"part {number} of {count}"
    try:
        result: PartResult = future.result()
    except PartKilledError as error:
        failed[number] = str(error)
    except Exception as error:  # dask's own, where workers died again and again
        failed[number] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    else:
        if not result.error:
            _say(f"{part} is made on {result.host} in {duration(result.seconds)}")
            return
        lines = result.error.splitlines()
        sys.stderr.write("".join(f"part {number}: {line}\n" for line in lines))
        failed[number] = lines[-1].removeprefix("error: ")
    _say(f"{part} cannot be made: {failed[number]}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
