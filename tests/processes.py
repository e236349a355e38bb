"""Run commands and ranks in processes forked from one that has imported everything.

Starting Python with torch takes four seconds. Forking a process that has imported torch takes a few
hundredths of a second. A forked process has its own signals, exit code, environment and output, but
differs in two ways. Variables that libraries read on import have the values of when the first
process started, and ``atexit`` handlers do not run. Tests that depend on either start Python.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.imports"])


class Forked:
    """A module-level function that runs in a separate process; killed if not waited for.

    Args:
        function: The function to run.
        arguments: Its positional arguments.
        environment: Environment variables, in addition to the current ones.
        folder: Working directory.
        session: Whether the process starts its own session, like a terminal job.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        folder: Path = ROOT,
        session: bool = False,
    ) -> None:
        self._output = tempfile.TemporaryDirectory(prefix="output-")
        variables = {**os.environ, **(environment or {})}
        begin = (self._output.name, variables, str(folder), session)
        self._process = _CONTEXT.Process(target=_begin, args=(*begin, function, arguments))
        here = Path.cwd()
        os.chdir(ROOT)  # the first start launches the fork server, which has to import tests
        try:
            self._process.start()
        finally:
            os.chdir(here)
        # A failed test may leave the process running: multiprocessing would wait for it forever.
        weakref.finalize(self, self._process.kill)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, a negative signal number, or None while the process runs."""
        return self._process.exitcode

    def messages(self) -> str:
        """Return the process's stderr so far."""
        path = Path(self._output.name, "err")
        return path.read_text() if path.exists() else ""

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        """Wait for the process to end; return its exit code and output.

        Also waits for child processes that share its output, unless a signal ended the process.

        Raises:
            AssertionError: The process or a child still ran after ``timeout`` seconds. The process
                is killed.
        """
        deadline = time.monotonic() + timeout
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            self.send(signal.SIGKILL)
            self._process.join()
        while not (ended := code is not None and (code < 0 or self._outputs_are_unlocked())):
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        out, err = (Path(self._output.name, name).read_text() for name in ("out", "err"))
        self._output.cleanup()
        assert ended, f"the process or a child still runs after {timeout} s\n{out}\n{err}"
        assert code is not None
        return subprocess.CompletedProcess((), code, out, err)

    def _outputs_are_unlocked(self) -> bool:
        """Return whether the output files are unlocked: all processes that write share a lock."""
        for name in ("out", "err"):
            with Path(self._output.name, name).open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
        return True


def _begin(
    output: str,
    environment: dict[str, str],
    folder: str,
    session: bool,
    function: Callable[..., object],
    arguments: tuple[Any, ...],
) -> None:
    """Set up the new process's output, signals, environment and folder, then call the function."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(output, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        fcntl.flock(number, fcntl.LOCK_SH)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # even if pytest inherited SIG_IGN
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    multiprocessing.set_start_method(None, force=True)  # children use the default method
    function(*arguments)


@contextlib.contextmanager
def signals_handled(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals inside the context, even those that pytest inherited as ignored."""
    old_handlers = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in old_handlers.items():
            signal.signal(number, old)


def wait_until(process: Forked | subprocess.Popen[bytes], condition: Callable[[], object]) -> None:
    """Wait until a condition is true; fail if the process ends first."""
    while not condition():
        assert process.poll() is None, process.wait()
        time.sleep(0.02)


def python(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script with a new Python interpreter in the checkout, for at most 10 minutes."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def fault_environment(**faults: str) -> dict[str, str]:
    """Return environment variables that make a rank fail (see ``tests/faults``)."""
    path = os.pathsep.join([str(ROOT / "tests" / "faults"), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, **faults}


def free_port() -> int:
    """Return an unused port of this machine, below those that it gives to clients."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise AssertionError("no port is free")


def listens(port: int) -> bool:
    """Return whether a server listens on a port of this machine."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def command(*arguments: str, **options: Any) -> Forked:
    """Start ``fastsiam ARGUMENTS``; ``options``: environment, folder and session of ``Forked``."""
    options["environment"] = {"COLUMNS": "200", **options.get("environment", {})}
    return Forked(run_program, *arguments, **options)


def run_program(*arguments: str) -> None:
    """Run ``fastsiam ARGUMENTS`` in this process, whose children are forked too, and exit."""
    sys.argv = ["fastsiam", *arguments]
    from fastsiam.cli import main

    fork_programs()
    main()


def fork_programs() -> None:
    """Make this process fork instead of starting ``python -m fastsiam``, e.g. a launcher's ranks.

    Does nothing on a machine with a GPU: CUDA does not work after a fork once devices are counted.
    """
    if torch.cuda.is_available():
        return
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from tests.forked_programs import ForkedProgram

    subprocess.Popen = subprocess_handler.Popen = ForkedProgram  # type: ignore[misc, attr-defined]


def fastsiam(
    *arguments: str, code: int = 0, timeout: float = 900, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command line and check its exit code."""
    result = command(*arguments, **options).wait(timeout)
    assert result.returncode == code, f"exit {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result
