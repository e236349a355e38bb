"""Runners: processes that build tasks once, then take turns repeating them.

Each runner has its own process (one per rank). Runners therefore share no threads or settings, and
a library that fails or is missing affects only its own runner.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from fastsiam.bench.measure import empty_gpu_cache, gpu_memory, time_task
from fastsiam.bench.measurements import Record, Row, Sample, Timing
from fastsiam.errors import FastSiamError
from fastsiam.kernels.cores import limit_torch_threads
from fastsiam.pipelines.workers import server_context, set_up_worker

if TYPE_CHECKING:
    from fastsiam.bench.session import Session
    from fastsiam.config import AugmentConfig, DataConfig

_FRESH = multiprocessing.get_context("spawn")
_PATIENCE = 5.0
"""Seconds that a process has to exit when told to."""
_PATIENCE_ON_GPU = 150.0
"""Seconds that a runner on a GPU has to answer: compiling a ResNet-50 takes a minute."""


@dataclass(frozen=True)
class Task:
    """A repeatable piece of work."""

    run: Callable[[], object]
    """Does the work once. Its GPU work may still be running when it returns."""
    images: int
    """Images processed in each repeat."""
    facts: Callable[[], dict[str, Any]] = dict
    """Returns other facts for the record; called after the last repeat."""
    before: Callable[[], object] = lambda: None
    """Prepares a repeat; this is not timed. Because GPU memory is released after each repeat, it
    should allocate what the repeat needs."""


Build = Callable[[], Task | Mapping[str, Task]]
"""Returns a runner's task, or several by name. It is pickled, so it must be a module's function,
or a ``partial`` of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What a pipeline or another library loads in a measured process."""

    data: DataConfig
    augment: AugmentConfig
    batch: int
    images: int
    """Images per epoch, a multiple of the batch size."""
    device: str

    @property
    def workers(self) -> int:
        """Number of loader processes or threads."""
        return int(self.data.workers)


class RunnerError(FastSiamError):
    """A runner's process failed; the message is its error."""


class Runner:
    """Processes that build tasks and run them on request.

    Args:
        name: name of the runner, and of its task if it has only one.
        build: called in each process.
        ranks: number of processes; each gets the environment variables that torchrun sets.
        patience: seconds to wait for an answer; None for no limit.
        fresh: start new Python processes, which have imported nothing, instead of forking a process
            that has imported torch.

    Raises:
        RunnerError: a process failed, for example because a package is missing.
    """

    def __init__(
        self,
        name: str,
        build: Build,
        *,
        ranks: int = 1,
        patience: float | None = None,
        fresh: bool = False,
    ) -> None:
        self._patience = patience
        gpu_before, port = gpu_memory(), _free_port()
        # The server imports torch once for all runners.
        context: Any = _FRESH if fresh else server_context("fastsiam.bench.cases.train")
        # The processes start now. ``bench startup`` counts their time from here.
        self.began = time.monotonic()
        self._pools = [
            ProcessPoolExecutor(1, context, _begin_rank, (dict(os.environ), rank, ranks, port))
            for rank in range(ranks)
        ]
        self._processes: list[psutil.Process] = []
        try:
            self._processes = [psutil.Process(pid) for pid in self._ask(os.getpid)]
            images: dict[str, int] = self._ask(_build, name, build)[0]
            for task in images:  # the warm-up
                self.run(task)
        except BaseException:  # Ctrl-C too: the caller cannot close the runner yet
            self.close()
            raise
        gpu = max(0, gpu_memory() - gpu_before)
        self.timings = {task: Timing(images=n, gpu=gpu) for task, n in images.items()}
        """The repeats of each task."""
        self._ask(empty_gpu_cache)

    def run(self, task: str) -> Sample:
        """Run a task once on all ranks at the same time, until the slowest has finished."""
        samples: list[Sample] = self._ask(_run, task)
        return Sample(
            max(sample.wall for sample in samples),
            sum(sample.cpu for sample in samples),
            sum(sample.host for sample in samples),
        )

    def facts(self, task: str) -> dict[str, Any]:
        """Return a task's facts from rank 0."""
        facts: dict[str, Any] = self._ask(_facts, task)[0]
        return facts

    def take_turn(self) -> None:
        """Repeat each task once, and release the GPU memory that allocators cache."""
        for task, timing in self.timings.items():
            timing.samples.append(self.run(task))
            self._ask(empty_gpu_cache)

    def add_facts(self) -> None:
        """Add facts to the timings, after the last repeat."""
        for task, timing in self.timings.items():
            timing.facts = self.facts(task)

    def close(self) -> None:
        """End the processes."""
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        _, alive = psutil.wait_procs(self._processes, _PATIENCE)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, _PATIENCE)  # the next runner needs their GPU memory

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function in each process; return the results by rank.

        A failure is raised at once, because other ranks may be waiting for the failed one.
        """
        try:
            calls = [pool.submit(_attempt, function, *arguments) for pool in self._pools]
            done, waiting = wait(calls, self._patience, FIRST_EXCEPTION)
            results = {call: call.result() for call in done}
        except BrokenProcessPool:
            raise RunnerError(
                "its process was killed or crashed, perhaps out of memory; FASTSIAM_DEBUG=1 shows "
                "its output"
            ) from None
        if waiting:
            raise RunnerError(f"no answer in {self._patience:.0f} s")
        return [results[call] for call in calls]


def compare(session: Session, rows: Iterable[Row], *, apart: bool = False) -> list[Record]:
    """Measure rows with runners that are warmed up and then take turns: A B C A B C ...

    Args:
        session: has the number of repeats; collects the runners that fail, and why.
        rows: rows that share a runner have the same ``build``.
        apart: end each runner before the next one starts (A A B B C C), because they would not fit
            into memory together.

    Returns:
        The records of the rows that could be measured.
    """
    rows = list(rows)
    runners = {row.runner or row.name: row for row in rows}
    groups = [{name: row} for name, row in runners.items()] if apart else [runners]
    timings: dict[str, Timing] = {}
    for group in groups:
        timings |= _timings(session, group)
    if apart:
        for timing in timings.values():
            timing.facts["apart"] = True
    return [row.record(timings) for row in rows if row.name in timings]


def _timings(session: Session, rows: Mapping[str, Row]) -> dict[str, Timing]:
    """Time the tasks of runners that take turns; runners that fail are left out."""
    say, repeats = session.console.say, session.config.repeats
    patience = _PATIENCE_ON_GPU if session.gpu else None
    running: dict[str, Runner] = {}

    @contextlib.contextmanager
    def failures(name: str) -> Iterator[None]:
        """Record the failure of a runner in this block, and close the runner."""
        try:
            yield
        except RunnerError as failure:
            session.failures[name] = str(failure)
            session.skip(name, failure)
            if name in running:
                running.pop(name).close()  # its other ranks would wait forever

    try:
        for name, row in rows.items():
            say(f"{name}: warming up")
            with failures(name):
                running[name] = Runner(name, row.build, ranks=row.ranks, patience=patience)
        if tasks := sum(len(runner.timings) for runner in running.values()):
            say(f"measuring: {repeats} rounds of {tasks}")
        for turn in [Runner.take_turn] * repeats + [Runner.add_facts]:
            for name in list(running):
                with failures(name):
                    turn(running[name])
        return {task: one for runner in running.values() for task, one in runner.timings.items()}
    finally:
        for runner in running.values():
            runner.close()


_tasks: dict[str, Task] = {}
"""The tasks of this process, if it is a runner's."""


def _attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; reduce an error to its first line, as it might not survive pickling."""
    try:
        return function(*arguments)
    except BaseException as error:
        if os.environ.get("FASTSIAM_DEBUG"):
            traceback.print_exc()
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise RunnerError(lines[0]) from None


def _begin_rank(environment: Mapping[str, str], rank: int, ranks: int, port: int) -> None:
    rank_values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    rank_values |= {"MASTER_PORT": port}
    variables = {name: str(value) for name, value in rank_values.items()}
    set_up_worker({**environment, "MASTER_ADDR": "127.0.0.1", **variables})
    if os.environ.get("FASTSIAM_DEBUG"):
        faulthandler.enable()  # shows where compiled code crashes
    else:  # libraries print a lot
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
    multiprocessing.set_start_method(None, force=True)  # its child processes start as usual


def _build(name: str, build: Build) -> dict[str, int]:
    """Build the tasks; return the number of images of each."""
    if "torch" in sys.modules:  # fresh processes import it later
        limit_torch_threads()
    tasks = build()
    _tasks.update({name: tasks} if isinstance(tasks, Task) else tasks)
    return {task_name: task.images for task_name, task in _tasks.items()}


def _run(task: str) -> Sample:
    _tasks[task].before()
    return time_task(_tasks[task].run)


def _facts(task: str) -> dict[str, Any]:
    return _tasks[task].facts()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
