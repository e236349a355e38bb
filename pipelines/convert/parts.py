"""A conversion in parts, as tasks of dask."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fastsiam.config import ConvertConfig
from fastsiam.environment import add_package_to_path
from fastsiam.errors import DataError, FastSiamError
from fastsiam.files import quoted
from fastsiam.pipelines.convert import Kind, beside, find_source
from fastsiam.pipelines.convert.command import stoppable
from fastsiam.signals import ending_with

_RETRIES = 2
"""Times that dask restarts a part whose process was killed. Of workers that die dask allows
``distributed.scheduler.allowed-failures`` for each part, 3 by default."""


def convert_parts(kind: Kind, config: ConvertConfig, words: Sequence[str]) -> None:
    """Convert a data set in parts, and say how to use them.

    Args:
        kind: which data set, or in which form.
        config: of the whole conversion.
        words: its arguments on the command line, after ``fastsiam``.

    Raises:
        FastSiamError: dask is not installed, or its scheduler does not answer.
        DataError: a part cannot be made; the others are, and the same command resumes.
        Interrupted: Ctrl-C or SIGTERM.
    """
    source = find_source(kind, config.root)
    out = Path(config.out) if config.out else beside(source)
    # Workers may have been started with another FASTSIAM_DATA and in another folder.
    failed = run_by_dask(config, [*words, "--source", str(config.root), "--out", str(out)])
    if failed:
        number = min(failed)
        raise DataError(
            f"part {number} of {config.parts}: {failed[number]}; {len(failed)} of {config.parts} "
            "parts are missing, and the same command makes only these"
        )
    here = quoted(out)
    print(
        f"{config.parts} parts in {here} are one data set: use it with --data {here}; one file of "
        f"them: fastsiam convert folder --source {here} --out FOLDER"
    )


def run_by_dask(config: ConvertConfig, words: Sequence[str]) -> dict[int, str]:
    """Have dask's workers convert the parts; return the errors by part."""
    try:
        distributed = importlib.import_module("distributed")
    except ImportError as error:
        raise FastSiamError("--parts needs dask: pip install 'fastsiam[dask]'") from error
    for name in ("distributed", "distributed.client"):  # as ``silence_logs`` for workers
        logging.getLogger(name).setLevel(logging.CRITICAL)
    add_package_to_path()
    failed: dict[int, str] = {}
    address = config.scheduler or os.environ.get("DASK_SCHEDULER_ADDRESS", "")
    with ExitStack() as stack:
        stack.enter_context(stoppable("the same command makes the parts that are missing"))
        cluster = None
        try:
            if address:
                asyncio.run(_reach(distributed, address))
            else:
                cluster = stack.enter_context(
                    distributed.LocalCluster(
                        threads_per_worker=1, dashboard_address=None, silence_logs=logging.CRITICAL
                    )
                )
            client = distributed.Client(cluster or address, set_as_default=False)
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            what = f"no dask scheduler answers at {address}" if address else "dask cannot start"
            why = "another kind of server does" if isinstance(error, MemoryError) else error
            raise FastSiamError(f"{what} ({why})") from error
        stack.enter_context(client)
        numbers = {}
        for number in range(1, config.parts + 1):
            command = _command(words, number, config.parts)
            future = client.submit(run_part, command, os.getcwd(), retries=_RETRIES, pure=False)
            numbers[future] = number
        stack.callback(client.cancel, list(numbers), force=True)
        for future in distributed.as_completed(numbers, loop=client.loop):
            number = numbers[future]
            if reason := _error_of(future, number):
                failed[number] = reason
            state = f"cannot be made: {reason}" if reason else "is made"
            print(f"part {number} of {config.parts} {state}", file=sys.stderr, flush=True)
    return failed


async def _reach(distributed: Any, address: str) -> None:
    """Connect to a scheduler once: a client that cannot connect ends a minute later.

    Raises:
        OSError: no answer within dask's timeout.
        ValueError: it is no address.
        MemoryError: what answers is no scheduler: dask takes its text for the size of a message.
    """
    distributed.comm.resolve_address(address)
    print(f"connecting to the dask scheduler at {address}", file=sys.stderr, flush=True)
    options = distributed.Security().get_connection_args("client")
    comm = await distributed.comm.connect(address, **options)
    await comm.close()


def _command(words: Sequence[str], number: int, count: int) -> tuple[str, ...]:
    """Return the command line that converts one part."""
    own = ("--scheduler", "", "--parts", "0", "--part", f"{number}/{count}")
    return (sys.executable, "-m", "fastsiam", *words, *own)


def run_part(command: Sequence[str], folder: str) -> str:
    """Convert a part in a process that ends with this worker.

    Args:
        command: its command line.
        folder: where to run it.

    Returns:
        What it wrote to its standard error if it failed, else "".

    Raises:
        RuntimeError: a signal ended the process: dask tries again.
    """
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
        raise RuntimeError(f"its process was killed (exit code {done.returncode})")
    return (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else ""


def _error_of(future: Any, number: int) -> str:
    """Print what a part wrote if it failed, and return the last line; "" if it did not fail."""
    try:
        lines = future.result().splitlines()
    except Exception as error:  # the part's, or dask's own if workers died again and again
        return " ".join(str(error).split())[:300]
    sys.stderr.write("".join(f"part {number}: {line}\n" for line in lines))
    return lines[-1].removeprefix("error: ") if lines else ""
