"""Doing the runs of a study: each in processes of its own, several side by side if so asked."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from fastsiam.config.study import StudyRunConfig
from fastsiam.console import Console, duration
from fastsiam.errors import NOT_FINITE, FastSiamError, Interrupted
from fastsiam.files import explained, written_for_user
from fastsiam.kernels import cores
from fastsiam.signals import ending_with, signal_name, stops_handled
from fastsiam.study.record import Result, read_result
from fastsiam.study.runs import Run

_TICK = 0.1
"""Seconds between two looks at the processes."""
_RANKS_LINES = 20
"""Last lines of a log among which a run's error is: with several ranks others may follow it."""


def do_runs(runs: Sequence[Run], config: StudyRunConfig, *, gpus: Sequence[str] = ()) -> None:
    """Do what is left of the runs.

    Args:
        runs: all of them; those that are done are skipped, those that were begun continue.
        config: how many side by side, and with how many GPUs each.
        gpus: what ``CUDA_VISIBLE_DEVICES`` calls the machine's GPUs; none on a CPU.

    Raises:
        Interrupted: SIGINT, SIGTERM or SIGHUP; what was at work is saved.
        FastSiamError: a run failed, its folder is of other settings, or another process does it.
    """
    for run in runs:
        run.check_settings()
    left = [run for run in runs if not run.is_done]
    for run in left:
        run.check_free()
    Console().say(f"{len(runs):,} runs, {len(runs) - len(left):,} of them done")
    # Of all the runs, not of those that are left: a resumed run keeps its number of cores.
    config = replace(config, parallel=min(config.parallel, len(runs)))
    work = _Work(left, slots(config, gpus))
    with stops_handled(work.stop, again=work.kill):
        work.finish()


def slots(config: StudyRunConfig, gpus: Sequence[str]) -> list[dict[str, str]]:
    """Return what the environment of each of the runs side by side has of its own.

    Args:
        config: how many side by side, and with how many GPUs each.
        gpus: as of ``do_runs``.
    """
    found = []
    for number in range(config.parallel):
        own: dict[str, str] = {}
        if gpus:
            first = number * config.gpus
            chosen = dict.fromkeys(gpus[(first + i) % len(gpus)] for i in range(config.gpus))
            own["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
        if config.parallel > 1:
            own[cores.SHARE] = str(cores.share(config.parallel * config.gpus))
            if "OMP_NUM_THREADS" not in os.environ:
                own["OMP_NUM_THREADS"] = own[cores.SHARE]
        found.append(own)
    return found


@dataclass(slots=True)
class _Task:
    """A run at work: the process of its stage, and the environment of its cores or GPUs."""

    run: Run
    slot: dict[str, str]
    process: subprocess.Popen[bytes]
    began: float


class _Work:
    """Runs at work side by side, until all are done, one fails, or a signal comes."""

    def __init__(self, runs: Sequence[Run], slots: list[dict[str, str]]) -> None:
        self._console = Console()
        self._waiting, self._slots, self._left = deque(runs), slots, len(runs)
        self._tasks: list[_Task] = []
        self._failures: list[FastSiamError] = []
        self._signal = 0

    def finish(self) -> None:
        """Do the runs; after a failure or a signal no further one begins."""
        try:
            while True:
                while self._waiting and self._slots and not self._failures and not self._signal:
                    self._begin(self._waiting.popleft(), self._slots.pop(0))
                if not self._tasks:
                    break
                time.sleep(_TICK)
                for task in [task for task in self._tasks if task.process.poll() is not None]:
                    self._tasks.remove(task)
                    if not self._continues(task):
                        self._slots.append(task.slot)
        finally:
            self.kill()
        if self._signal and self._left:
            raise Interrupted(
                f"{signal_name(self._signal)}: stopped, runs left: {self._left:,}; "
                "the same command continues from there",
                exit_code=128 + self._signal,
            )
        if self._failures:
            raise self._failures[0]

    def stop(self, number: int) -> None:
        """Have the runs save and end."""
        self._signal = number
        self._console.say(
            f"{signal_name(number)}: the runs save and stop; again kills them, unsaved"
        )
        for task in self._tasks:
            task.process.terminate()

    def kill(self, _: int = signal.SIGKILL) -> None:
        """Kill the runs, unsaved."""
        for task in self._tasks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(task.process.pid, signal.SIGKILL)

    def _begin(self, run: Run, slot: dict[str, str]) -> None:
        run.prepare()
        again = "continues" if (run.folder / "checkpoints").exists() else "begins"
        self._console.say(f"{run.name} {again}; its output is in {run.log_file}")
        self._start(run, slot, time.monotonic())

    def _start(self, run: Run, slot: dict[str, str], began: float) -> None:
        """Start a run's next stage; a signal that comes meanwhile is passed on."""
        task = _Task(run, slot, _started(run, slot), began)
        self._tasks.append(task)
        if self._signal:
            task.process.terminate()

    def _continues(self, task: _Task) -> bool:
        """See how a stage of a run ended; start the next one if there is one."""
        run, code = task.run, task.process.returncode
        if self._signal and not run.is_done:
            return False
        last = _last_lines(run.log_file, _RANKS_LINES) if code > 0 else []
        if lost := [line for line in last if NOT_FINITE in line]:
            with written_for_user(run.diverged_file) as temporary:
                temporary.write_text(f"{lost[0]}\n")
        result = read_result(run)
        if result is None and (code or not run.is_trained):
            self._failures.append(_failed(run, code))
            return False
        if result is None:
            self._start(run, task.slot, task.began)
            return True
        self._left -= 1
        took = duration(time.monotonic() - task.began)
        self._console.say(f"{run.name}: {_figures(result, run)} in {took}; {self._left:,} left")
        return False


def _figures(result: Result, run: Run) -> str:
    if result.diverged:
        return "diverged: its loss was not finite"
    return (
        f"{run.scale.measure} {result.top1:.1f}%, std {result.z_std:.2f}, "
        f"rank {result.rank:.0f}, loss {result.loss:.3f}"
    )


def _command(run: Run) -> list[str]:
    """Return the command of a run's next stage: training, then its linear evaluation if due."""
    fastsiam = [sys.executable, "-m", "fastsiam"]
    if not run.is_trained:
        return [*fastsiam, "train", "--config", str(run.settings_file), "--out", str(run.folder)]
    gpus, device = str(run.config.run.gpus), run.config.run.device
    own = ["--cached"] if run.scale.cached else []
    return [*fastsiam, "eval", "linear", str(run.folder), *own, "--gpus", gpus, "--device", device]


def _started(run: Run, slot: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a run's next stage, in a process group of its own: the terminal's Ctrl-C is not its.

    It saves and stops if this process is killed: nobody would continue with its next stage.
    """
    with explained(FastSiamError, f"cannot write {run.log_file}"):
        log: IO[Any] = run.log_file.open("ab")
    with log:
        return subprocess.Popen(
            _command(run),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **slot},
            process_group=0,
            preexec_fn=ending_with(os.getpid()),
        )


def _failed(run: Run, code: int) -> FastSiamError:
    if code < 0:
        why = f"killed by {signal_name(-code)}"
    elif code:
        why = (_last_lines(run.log_file, 1) or [f"exit code {code}"])[0].removeprefix("error: ")
    else:
        why = "it left no kNN figure after its last epoch"
    return FastSiamError(f"{run.name} failed ({why}); see {run.log_file}")


def _last_lines(path: Path, count: int) -> list[str]:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return [line.strip() for line in lines if line.strip()][-count:]
