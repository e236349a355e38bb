"""Processes of the tests: commands and ranks, forked from one that has imported everything.

A start of Python with torch takes four seconds; a fork of a process that has it takes a few
hundredths. What is forked is a process like any other: its signals, its exit code, its environment
and its output are its own. But what is read from the environment at an import, before any of our
code, is as it was when the first of them began, and what is registered with ``atexit`` does not
run: a test about either starts Python.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.imports"])


class Forked:
    """A function of a module at work in a process of its own, killed if nobody waits for it.

    Args:
        function: What it does.
        arguments: What the function is called with.
        environment: Variables of the process beside this one's.
        folder: Where it runs.
        session: Whether it leads a process group, as a terminal's job does.
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
        whole = {**os.environ, **(environment or {})}
        begin = (self._output.name, whole, str(folder), session)
        self._process = _CONTEXT.Process(target=_begin, args=(*begin, function, arguments))
        here = Path.cwd()
        os.chdir(ROOT)  # the first one starts what all are forked from, which imports the tests
        try:
            self._process.start()
        finally:
            os.chdir(here)
        # A test that failed may leave it, and multiprocessing would wait for it for ever.
        weakref.finalize(self, self._process.kill)

    @property
    def pid(self) -> int:
        """The process's number."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, minus the number of the signal that ended it, or None as yet."""
        return self._process.exitcode

    def messages(self) -> str:
        """Return what it has written to stderr so far."""
        path = Path(self._output.name, "err")
        return path.read_text() if path.exists() else ""

    def send(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def wait(self, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        """Wait for the end; return exit code and output. After ``timeout`` s: kill it and fail.

        Unless a signal ended it, the processes that it began and that share its output end too.
        """
        deadline = time.monotonic() + timeout
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            self.send(signal.SIGKILL)
            self._process.join()
        while not (ended := code is not None and (code < 0 or self._nobody_writes())):
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        out, err = (Path(self._output.name, name).read_text() for name in ("out", "err"))
        self._output.cleanup()
        assert ended, f"it, or what it began, is still at work after {timeout} s\n{out}\n{err}"
        assert code is not None
        return subprocess.CompletedProcess((), code, out, err)

    def _nobody_writes(self) -> bool:
        """Look whether the locks of the output are gone, which all that have it open share."""
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
    """Be the process: with its own output, environment and folder before anything else."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(output, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        fcntl.flock(number, fcntl.LOCK_SH)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever began the tests ignores
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    multiprocessing.set_start_method(None, force=True)  # what it starts, it starts as any program
    function(*arguments)


def until(process: Forked | subprocess.Popen[bytes], seen: Callable[[], object]) -> None:
    """Wait for something, as long as a process runs."""
    while not seen():
        assert process.poll() is None, process.wait()
        time.sleep(0.02)


def python(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script by a Python that has imported nothing, in the checkout; 10 minutes at most."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def faulty(**faults: str) -> dict[str, str]:
    """Return an environment in which a rank fails (see ``tests/faults``)."""
    path = os.pathsep.join([str(ROOT / "tests" / "faults"), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, **faults}


def free_port() -> int:
    """Return a port of this machine on which nobody listens."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def command(*arguments: str, **how: Any) -> Forked:
    """Begin ``fastsiam ARGUMENTS``; how: ``Forked``'s environment, folder and session."""
    how["environment"] = {"COLUMNS": "200", **how.get("environment", {})}
    return Forked(_fastsiam, arguments, **how)


def _fastsiam(arguments: tuple[str, ...]) -> None:
    sys.argv = ["fastsiam", *arguments]
    from fastsiam.cli import main

    fork_programs()
    main()


def fork_programs() -> None:
    """Have this process fork the ``python -m fastsiam`` that it starts, as a launcher its ranks.

    Not beside a GPU: CUDA does not work in a fork of a process that has counted the devices.
    """
    if torch.cuda.is_available():
        return
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from tests.forked_programs import ForkedProgram

    subprocess.Popen = subprocess_handler.Popen = ForkedProgram  # type: ignore[misc, attr-defined]


def fastsiam(
    *arguments: str, code: int = 0, timeout: float = 900, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command line and expect an exit code."""
    done = command(*arguments, **how).wait(timeout)
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
