"""Replacement for ``subprocess.Popen`` that forks this process for ``python -m fastsiam``.

A new interpreter takes four seconds of CPU time, almost all of it for imports that the launcher,
study or dask worker has already done. The fork is a direct child with its own session, environment,
signals and exit code. Only the interpreter's startup is skipped: ``tests/train/test_signals.py``
covers it with torchrun.
"""

from __future__ import annotations

import atexit
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_PROGRAM = (sys.executable, "-m", "fastsiam")


class ForkedProgram(subprocess.Popen[Any]):
    """``subprocess.Popen`` that forks for ``python -m fastsiam``; other programs start as usual."""

    def _execute_child(
        self,
        args: Sequence[str],
        executable: Any,
        preexec_fn: Callable[[], object] | None,
        close_fds: bool,
        pass_fds: Any,
        cwd: Any,
        env: Mapping[str, str] | None,
        startupinfo: Any,
        creationflags: Any,
        shell: bool,
        *rest: Any,
    ) -> None:
        pipes, (session, group) = rest[:6], rest[-2:]
        if tuple(args[:3]) != _PROGRAM:
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env,
                startupinfo, creationflags, shell, *rest,
            )  # fmt: skip
            return
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings(action="ignore"):  # the launcher has threads
            self.pid = os.fork()
        if self.pid:
            self._child_created = True
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
            return
        try:
            _redirect(pipes[0], pipes[3], pipes[5])
            _forget_parent()
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            os.chdir(cwd or ".")
            if session:
                os.setsid()
            if group >= 0:
                os.setpgid(0, group)
            if preexec_fn is not None:
                preexec_fn()
        except BaseException:
            traceback.print_exc()
            os._exit(70)
        _run(args[3:])


def _redirect(*standard: int) -> None:
    """Set stdin, stdout and stderr (-1: inherited) and close all other file descriptors."""
    for number, file in enumerate(standard):
        if file != -1:
            os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115


def _forget_parent() -> None:
    """Drop inherited state that a new interpreter would not have, such as signal handlers."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    process: Any = multiprocessing.process
    process._current_process._config["daemon"] = False  # dask workers are daemons: no children
    process._children = set()
    tracker: Any = multiprocessing.resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None


def _run(words: Sequence[str]) -> NoReturn:
    """Run fastsiam's ``main`` and exit with its exit code."""
    sys.argv = ["fastsiam", *words]
    code: Any = 0
    try:
        for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
            if (Path(folder) / "sitecustomize.py").exists():
                runpy.run_path(str(Path(folder) / "sitecustomize.py"))
        from fastsiam.cli import main

        main()
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
