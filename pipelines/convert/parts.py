"""Conversion of a data set in parts, as dask tasks."""

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

from fastsiam.child_process import FASTSIAM, add_package_to_path, die_with_parent
from fastsiam.config import ConvertConfig
from fastsiam.errors import DataError, FastSiamError
from fastsiam.files import quote
from fastsiam.pipelines.convert import Kind, default_output, find_source
from fastsiam.pipelines.convert.command import stoppable

_RETRIES = 2
"""How often dask retries a part whose process was killed. If workers die, another limit applies:
``distributed.scheduler.allowed-failures`` per part, 3 by default."""


def convert_parts(kind: Kind, config: ConvertConfig, words: Sequence[str]) -> None:
    """Convert a data set in parts on dask workers, and print how to use the parts.

    ``config`` describes the complete conversion, and ``words`` are the command-line arguments after
    ``fastsiam``.

    Raises:
        FastSiamError: dask is not installed, or its scheduler does not answer.
        DataError: a part failed. The finished parts are kept; the same command converts the rest.
        Interrupted: Ctrl-C, SIGTERM or SIGHUP.
    """
    source = find_source(kind, config.root)
    out = Path(config.out) if config.out else default_output(source)
    # Workers may have a different FASTSIAM_DATA and a different current folder.
    errors = run_by_dask(config, [*words, "--source", str(config.root), "--out", str(out)])
    if errors:
        number = min(errors)
        raise DataError(
            f"part {number} of {config.parts}: {errors[number]}; {len(errors)} of {config.parts} "
            "parts are missing; run the same command again to convert only these"
        )
    folder = quote(out)
    print(
        f"{config.parts} parts in {folder} are one data set: use it with --data {folder}; to merge "
        f"them into one file: fastsiam convert folder --source {folder} --out FOLDER"
    )


def run_by_dask(config: ConvertConfig, words: Sequence[str]) -> dict[int, str]:
    """Convert the parts on dask workers; return the errors by part number."""
    try:
        distributed = importlib.import_module("distributed")
    except ImportError as error:
        raise FastSiamError("--parts needs dask: pip install 'fastsiam[dask]'") from error
    for name in ("distributed", "distributed.client"):  # like ``silence_logs`` for workers
        logging.getLogger(name).setLevel(logging.CRITICAL)
    add_package_to_path()
    errors: dict[int, str] = {}
    address = config.scheduler or os.environ.get("DASK_SCHEDULER_ADDRESS", "")
    with ExitStack() as stack:
        stack.enter_context(stoppable("run the same command again to convert the missing parts"))
        cluster = None
        try:
            if address:
                asyncio.run(_check_scheduler(distributed, address))
            else:
                cluster = stack.enter_context(
                    distributed.LocalCluster(
                        threads_per_worker=1,
                        dashboard_address="127.0.0.1:0",
                        silence_logs=logging.CRITICAL,
                    )
                )
            client = distributed.Client(cluster or address, set_as_default=False)
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            problem = f"no dask scheduler answers at {address}" if address else "dask cannot start"
            cause = "another kind of server does" if isinstance(error, MemoryError) else error
            raise FastSiamError(f"{problem} ({cause})") from error
        stack.enter_context(client)
        commands = [_command(words, i + 1, config.parts) for i in range(config.parts)]
        futures = client.map(run_part, commands, folder=os.getcwd(), retries=_RETRIES, pure=False)
        numbers = {future: number for number, future in enumerate(futures, 1)}
        stack.callback(client.cancel, futures, force=True)
        for future in distributed.as_completed(futures, loop=client.loop):
            number = numbers[future]
            if reason := _error_of(future, number):
                errors[number] = reason
            state = f"failed: {reason}" if reason else "is done"
            print(f"part {number} of {config.parts} {state}", file=sys.stderr, flush=True)
    return errors


async def _check_scheduler(distributed: Any, address: str) -> None:
    """Check that a scheduler answers, because a client would wait longer, or forever.

    Raises:
        OSError: no answer within ``distributed.comm.timeouts.connect``.
        ValueError: the address is invalid.
        MemoryError: another kind of server answers; dask misreads its reply as a message size.
    """
    distributed.comm.resolve_address(address)
    from dask import config, utils

    limit = config.get("distributed.comm.timeouts.connect")
    print(f"connecting to the dask scheduler at {address} (limit {limit})", file=sys.stderr)
    options = distributed.Security().get_connection_args("client")
    try:  # dask's own timeout does not cover the server's first message
        async with asyncio.timeout(utils.parse_timedelta(limit)):
            comm = await distributed.comm.connect(address, **options)
    except TimeoutError as error:
        raise OSError(f"no answer within {limit}") from error
    await comm.close()


def _command(words: Sequence[str], number: int, count: int) -> tuple[str, ...]:
    part_options = ("--scheduler", "", "--parts", "0", "--part", f"{number}/{count}")
    return (*FASTSIAM, *words, *part_options)


def run_part(command: Sequence[str], folder: str) -> str:
    """Run a part's command in a folder; return its standard error output if it failed, else "".

    Raises:
        RuntimeError: a signal ended the subprocess; dask retries the part.
    """
    # Not a ``Child``: Ctrl-C to a local cluster must reach the process, and dask gets its output.
    process = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # If this worker dies, the process must end at once: another worker restarts the part.
        preexec_fn=die_with_parent(os.getpid(), signal.SIGKILL),
    )
    if process.returncode < 0 or process.returncode > 128:
        raise RuntimeError(f"its process was killed (exit code {process.returncode})")
    return (
        (process.stderr.strip() or f"exit code {process.returncode}") if process.returncode else ""
    )


def _error_of(future: Any, number: int) -> str:
    """Print the error output of a part and return its last line; "" if the part succeeded."""
    try:
        lines = future.result().splitlines()
    except Exception as error:  # from ``run_part``, or from dask if workers died repeatedly
        return " ".join(str(error).split())[:300]
    sys.stderr.write("".join(f"part {number}: {line}\n" for line in lines))
    return lines[-1].removeprefix("error: ") if lines else ""
