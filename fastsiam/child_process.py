"""Child processes: start and end them, and set up those of a launcher, the ranks."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastsiam.errors import NOT_FINITE, SIGNALLED, FastSiamError
from fastsiam.files import os_errors_as
from fastsiam.signals import signal_name

_FASTSIAM = ["-m", "fastsiam"]
FASTSIAM = sys.executable, *_FASTSIAM
LAUNCHER = "FASTSIAM_LAUNCHER"
"""Environment variable with the process ID of fastsiam's launcher, for its ranks."""
_RANKS_LINES = 20
"""Number of last log lines to search for an error; output of other ranks may follow it."""
_PR_SET_PDEATHSIG = 1
"""Option of prctl(2) that signals this process when the thread that started it ends."""


def add_package_to_path() -> None:
    """Add the package to PYTHONPATH, so that child processes find it from any folder.

    Nor do they import from the current folder, which may have another copy of fastsiam, or a file
    that is named like a module.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    _add_to_path(str(Path(__file__).parents[1]))


def add_program_to_path() -> None:
    """Add the folder from which a user's own program imports, which PYTHONSAFEPATH leaves out."""
    first, *_ = program = own_program()
    if program != _FASTSIAM:
        _add_to_path(os.getcwd() if first == "-m" else os.path.dirname(os.path.realpath(first)))


def _add_to_path(folder: str) -> None:
    python_path = os.environ.get("PYTHONPATH")
    if folder not in (python_path or "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, python_path]))


def own_program() -> list[str]:
    """Return the arguments with which Python starts this program again.

    That is ``fastsiam``, or the script or module of a user who registers a method and runs the
    command line.
    """
    script, spec = Path(sys.argv[0]), sys.modules["__main__"].__spec__
    if script.suffix != ".py" or script.name == "__main__.py":
        return _FASTSIAM
    if spec and spec.origin == str(script):  # python -m
        return ["-m", spec.name]
    return [str(script.absolute())]


class Child:
    """A subprocess whose output is appended to the file ``log``; the file's folder is created.

    It has its own process group, so the terminal's Ctrl-C does not reach it. If this process is
    killed, it gets SIGTERM, which makes a run save and stop. It starts in ``folder``, with
    ``environment`` in addition to this process's variables.

    Raises:
        FastSiamError: the log cannot be written.
    """

    def __init__(
        self, command: Sequence[str], log: Path, folder: Path | None = None, /, **environment: str
    ) -> None:
        self._log = log
        add_package_to_path()
        with os_errors_as(FastSiamError, f"cannot write {log}"):
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                self._begin = output.tell()
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                    env={**os.environ, **environment},
                    process_group=0,
                    preexec_fn=die_with_parent(os.getpid()),
                )

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for its end; return the exit code (128 + a signal), or None after a timeout."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return SIGNALLED - code if code < 0 else code

    def end(self, grace: float) -> None:
        """Terminate the process, which may save its state, and kill its group after ``grace`` s."""
        self.process.terminate()
        self.wait(grace)
        self.kill()
        self.process.wait()

    def kill(self) -> None:
        """Kill its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _last_lines(self) -> list[str]:
        with os_errors_as(FastSiamError, f"cannot read {self._log}"), self._log.open("rb") as log:
            log.seek(self._begin)
            lines = log.read().decode(errors="replace").splitlines()
        return [line.strip() for line in lines if line.strip()][-_RANKS_LINES:]

    def divergence(self) -> str:
        """Return the error message if a loss that is not finite ended the process; else ""."""
        errors = [x for x in self._last_lines() if NOT_FINITE in x]
        return errors[0] if self.process.returncode > 0 and errors else ""

    def failure(self, what: str, missing: str) -> FastSiamError:
        """Return an error for the process ``what``, which failed or ended without ``missing``."""
        code, lines = self.process.returncode, self._last_lines()
        if code < 0:
            reason = f"killed by {signal_name(-code)}"
        elif code:  # other processes of the same run may have logged lines after the error
            errors = [line for line in lines if line.startswith("error: ")]
            reason = [f"exit code {code}", *lines, *errors][-1].removeprefix("error: ")
        else:
            reason = f"it has no {missing}"
        return FastSiamError(f"{what} failed ({reason}); see {self._log}")


def die_with_parent(parent: int, number: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """Return a function that makes its process receive a signal when its parent thread ends.

    It is safe to call between fork and exec, because it imports and loads nothing. If the process
    with the ID ``parent`` has already ended, the signal is sent immediately.
    """
    prctl = ctypes.CDLL(None).prctl

    def request_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os.kill(os.getpid(), number)

    return request_signal


def is_worker() -> bool:
    """Return whether a launcher (fastsiam's or torchrun) started this process."""
    return "LOCAL_RANK" in os.environ


def begin() -> None:
    """Set up this process; call this first.

    A crash in compiled code, such as SIGSEGV or SIGABRT, prints the Python stack of each thread. If
    the launcher is killed, a rank gets SIGTERM, saves its state and exits. All ranks except rank 0
    prefix the lines of stderr with their rank.
    """
    faulthandler.enable(2)
    if not is_worker():
        return
    die_with_parent(int(os.environ.get(LAUNCHER) or os.getppid()))()
    if (rank := os.environ.get("RANK", "0")) != "0":
        sys.stderr = _PrefixedStream(sys.stderr, f"[rank {rank}] ")


class _PrefixedStream(io.TextIOBase):
    """A stream that prefixes each line and writes only complete lines."""

    def __init__(self, to: Any, name: str) -> None:
        self._to, self._name, self._partial = to, name, ""

    def write(self, text: str) -> int:
        """Write the complete lines; buffer the rest until its line ends."""
        *lines, self._partial = (self._partial + text).split("\n")
        if lines:
            self._to.write("".join(f"{self._name}{line}\n" for line in lines))
            self._to.flush()
        return len(text)

    def flush(self) -> None:
        """Write the incomplete last line too, because a process flushes when it exits."""
        with contextlib.suppress(ValueError):  # closed during interpreter shutdown
            if self._partial:
                self._to.write(f"{self._name}{self._partial}\n")
                self._partial = ""
            self._to.flush()

    def fileno(self) -> int:
        return int(self._to.fileno())

    def writable(self) -> bool:
        return True
