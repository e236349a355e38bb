"""Runners: processes that build tasks once and repeat them in turns.

Each runner has a process of its own (one for each rank), so that runners share no threads and no
settings, and a library that fails or is missing affects only its own runner.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from fastsiam.bench.measure import clocked, empty_gpu_cache, gpu_memory
from fastsiam.bench.timing import Sample, Timing
from fastsiam.errors import FastSiamError

_CONTEXT = multiprocessing.get_context("forkserver")
_FRESH = multiprocessing.get_context("spawn")
_PATIENCE = 5.0
"""Seconds that a process has to end after its connection was closed."""


@dataclass(frozen=True)
class Task:
    """A repeatable piece of work."""

    run: Callable[[], object]
    """Does it once. GPU work that it started may still be running when it returns."""
    images: int
    """Images that it processes each time."""
    facts: Callable[[], dict[str, Any]] = dict
    """Returns other facts for the record; called after the last repeat."""
    before: Callable[[], object] = lambda: None
    """Prepares a repeat, outside of the clock."""


Build = Callable[..., Mapping[str, Task]]
"""A function of a module. Called with a runner's settings it returns its tasks, by name."""


class RunnerError(FastSiamError):
    """A runner's process ended with an error, which is the message."""


class Runner:
    """Processes that build tasks and run them when told.

    Args:
        build: called in each process.
        settings: arguments of ``build``.
        ranks: number of processes; they find each other as torchrun's do.
        patience: seconds that an answer may take; None for no limit.
        fresh: start new Python processes, which have imported nothing, instead of forks of one that
            has imported torch.

    Raises:
        RunnerError: an error in one of them, such as a missing package.
    """

    def __init__(
        self,
        build: Build,
        settings: Mapping[str, Any],
        *,
        ranks: int = 1,
        patience: float | None = None,
        fresh: bool = False,
    ) -> None:
        self._patience = patience
        self._processes: dict[Connection, Any] = {}
        _CONTEXT.set_forkserver_preload(["fastsiam.bench.cases.train"])  # imports torch once
        before, port = gpu_memory(), _free_port()
        for rank in range(ranks):
            context: Any = _FRESH if fresh else _CONTEXT
            pipe, remote = context.Pipe()
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
            place |= {"LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
            own = os.environ | {"MASTER_ADDR": "127.0.0.1"} | {k: str(v) for k, v in place.items()}
            process = context.Process(target=_serve, args=(remote, own, build, dict(settings)))
            process.start()
            remote.close()
            self._processes[pipe] = process
        try:
            self.images: dict[str, int] = self._answers()[0]
            """Images that each task processes, by the task's name."""
            self.first = {task: self.run(task) for task in self.images}
            """The first run of each task."""
        except BaseException:  # Ctrl-C too: the caller does not have the runner yet
            self.close()
            raise
        self.gpu = max(0, gpu_memory() - before)
        """Bytes of GPU memory that it came to hold, its CUDA contexts included."""
        self.rest()

    def run(self, task: str) -> Sample:
        """Run a task once, on all ranks together, until the slowest has finished."""
        samples: list[Sample] = self._ask("run", task)
        return Sample(
            max(sample.wall for sample in samples),
            sum(sample.cpu for sample in samples),
            sum(sample.host for sample in samples),
        )

    def rest(self) -> None:
        """Give back the GPU memory that its allocators keep for later: it is another's turn."""
        self._ask("rest", "")

    def facts(self, task: str) -> dict[str, Any]:
        """Return a task's facts; the first rank answers."""
        facts: dict[str, Any] = self._ask("facts", task)[0]
        return facts

    def close(self) -> None:
        """End its processes."""
        for pipe in self._processes:
            pipe.close()
        for process in self._processes.values():
            process.join(_PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()

    def _ask(self, what: str, task: str) -> list[Any]:
        for pipe in self._processes:
            with contextlib.suppress(OSError):  # it has died: see _answer
                pipe.send((what, task))
        return self._answers()

    def _answers(self) -> list[Any]:
        """Return all answers; a failure is raised at once because other ranks may wait for it."""
        answers: dict[Any, Any] = {}
        while left := [pipe for pipe in self._processes if pipe not in answers]:
            ready: list[Any] = wait(left, self._patience)
            if not ready:
                raise RunnerError(f"no answer in {self._patience:.0f} s")
            answers |= {pipe: self._answer(pipe) for pipe in ready}
        return [answers[pipe] for pipe in self._processes]

    def _answer(self, pipe: Connection) -> Any:
        try:
            answer = pipe.recv()
        except (EOFError, OSError):
            process = self._processes[pipe]
            process.join(_PATIENCE)
            why = ", perhaps out of memory" if process.exitcode == -signal.SIGKILL else ""
            raise RunnerError(
                f"its process ended with code {process.exitcode}{why}; FASTSIAM_DEBUG=1 shows its "
                "output"
            ) from None
        if isinstance(answer, _Failure):
            if os.environ.get("FASTSIAM_DEBUG"):
                print(answer.trace, file=sys.stderr)
            raise RunnerError(answer.reason)
        return answer


class Comparison:
    """Runners that take turns: A B C A B C ...

    Args:
        say: is told what happens, line by line.
        apart: end each runner before the next one starts (A A B B C C), because their memory would
            not fit side by side.
        patience: seconds that a runner may take for an answer; None for no limit.
    """

    def __init__(
        self, say: Callable[[str], None], *, apart: bool = False, patience: float | None = None
    ) -> None:
        self._say, self._apart, self._patience = say, apart, patience
        self._pending: dict[str, Callable[[], bool]] = {}
        self.runners: dict[str, Runner] = {}
        """Runners that can be measured, by name."""
        self.failed: dict[str, str] = {}
        """Runners that cannot be measured, and the reason."""

    def add(self, name: str, build: Build, /, *, ranks: int = 1, **settings: Any) -> bool:
        """Start a runner, warm it up and return whether it is ready; if apart, do so later.

        Args:
            name: of the runner.
            build: makes its tasks from ``settings``, in its own process.
            ranks: processes that do the tasks together.
            settings: arguments of ``build``.
        """
        start = partial(self._start, name, build, ranks, settings)
        if self._apart:
            self._pending[name] = start
            return True
        return start()

    def run(self, repeats: int) -> dict[tuple[str, str], Timing]:
        """Let the runners take turns, each with all of its tasks.

        Returns:
            Timings, with the facts of their tasks, by the names of runner and task.
        """
        if not self._apart:
            timings = self._measure(list(self.runners), repeats)
        else:
            timings = {}
            for name, start in self._pending.items():
                if start():
                    timings |= self._measure([name], repeats)
                    self.runners[name].close()
        return {turn: timing for turn, timing in timings.items() if turn[0] not in self.failed}

    def _start(self, name: str, build: Build, ranks: int, settings: Mapping[str, Any]) -> bool:
        self._say(f"{name}: warming up")
        with self._failures(name):
            self.runners[name] = Runner(build, settings, ranks=ranks, patience=self._patience)
        return name in self.runners

    def _measure(self, names: Sequence[str], repeats: int) -> dict[tuple[str, str], Timing]:
        turns = [(name, task) for name in names for task in self.runners[name].images]
        self._say(f"measuring: {repeats} rounds of {len(turns)}")
        timings = {turn: Timing() for turn in turns}
        for _ in range(repeats):
            for (name, task), timing in timings.items():
                if name not in self.failed:
                    with self._failures(name):
                        timing.samples.append(self.runners[name].run(task))
                        self.runners[name].rest()
        for (name, task), timing in timings.items():
            if name in self.failed:
                continue
            runner = self.runners[name]
            timing.images, timing.gpu = runner.images[task], runner.gpu
            with self._failures(name):
                timing.facts = runner.facts(task)
                timing.settings = timing.facts.pop("settings", {})
                timing.facts |= {"apart": True} if self._apart else {}
        return timings

    @contextlib.contextmanager
    def _failures(self, name: str) -> Iterator[None]:
        """Note that a runner fails inside, and end it."""
        try:
            yield
        except RunnerError as failure:
            self.failed[name] = str(failure)
            self._say(f"{name}: not measured: {failure}")
            if name in self.runners:
                self.runners[name].close()  # its other ranks would wait for ever

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *_: object) -> None:
        for runner in self.runners.values():
            runner.close()


@dataclass(frozen=True)
class _Failure:
    """The answer of a process after an error."""

    reason: str
    trace: str


def _serve(
    end: Connection, environment: Mapping[str, str], build: Build, settings: Mapping[str, Any]
) -> None:
    """Build tasks and run them as told through a connection, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent closes the connection then
    os.environ.clear()
    os.environ.update(environment)
    if not os.environ.get("FASTSIAM_DEBUG"):  # libraries print much
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
    multiprocessing.set_start_method(None, force=True)  # its processes start as in any program
    try:
        tasks = build(**settings)
        end.send({name: task.images for name, task in tasks.items()})
        while True:
            try:
                what, name = end.recv()
            except (EOFError, ConnectionResetError):
                return
            if what == "facts":
                end.send(tasks[name].facts())
                continue
            if what == "rest":
                empty_gpu_cache()
                end.send(None)
                continue
            tasks[name].before()
            end.send(clocked(tasks[name].run))
    except BaseException as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        with contextlib.suppress(OSError):
            end.send(_Failure(lines[0], traceback.format_exc()))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
