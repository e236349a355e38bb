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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from fastsiam.bench.measure import clocked, empty_gpu_cache, gpu_memory
from fastsiam.bench.records import Sample, Timing
from fastsiam.errors import FastSiamError

if TYPE_CHECKING:
    from fastsiam.bench.session import Session

_CONTEXT = multiprocessing.get_context("forkserver")
_FRESH = multiprocessing.get_context("spawn")
_PATIENCE = 5.0
"""Seconds that a process has to end after its connection was closed."""
_PATIENCE_ON_GPU = 300.0
"""Seconds that a runner may take for an answer on a GPU: it compiles a ResNet-50 in a minute."""


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


Build = Callable[[], Task | Mapping[str, Task]]
"""Returns a runner's task, or several by name: a function of a module with its settings
(``partial``)."""
Timings = dict[str, Timing]
"""By the names of tasks; a runner's only task has the name of the runner."""


class RunnerError(FastSiamError):
    """A runner's process ended with an error, which is the message."""


class Runner:
    """Processes that build tasks and run them when told.

    Args:
        name: of the runner, and of its task if it has only one.
        build: called in each process.
        ranks: number of processes; they find each other as torchrun's do.
        patience: seconds that an answer may take; None for no limit.
        fresh: start new Python processes, which have imported nothing, instead of forks of one that
            has imported torch.

    Raises:
        RunnerError: an error in one of them, such as a missing package.
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
        self._processes: dict[Connection, Any] = {}
        _CONTEXT.set_forkserver_preload(["fastsiam.bench.cases.train"])  # imports torch once
        before, (port,) = gpu_memory(), free_ports(1)
        for rank in range(ranks):
            context: Any = _FRESH if fresh else _CONTEXT
            pipe, remote = context.Pipe()
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
            place |= {"LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
            own = os.environ | {"MASTER_ADDR": "127.0.0.1"} | {k: str(v) for k, v in place.items()}
            process = context.Process(target=_serve, args=(remote, own, name, build))
            process.start()
            remote.close()
            self._processes[pipe] = process
        try:
            images: dict[str, int] = self._answers()[0]
            self.first = {task: self.run(task) for task in images}
            """The first run of each task."""
        except BaseException:  # Ctrl-C too: the caller does not have the runner yet
            self.close()
            raise
        gpu = max(0, gpu_memory() - before)
        self.timings: Timings = {task: Timing(images=n, gpu=gpu) for task, n in images.items()}
        """The repeats of each task."""
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

    def take_turn(self) -> None:
        """Repeat each task once."""
        for task, timing in self.timings.items():
            timing.samples.append(self.run(task))
            self.rest()

    def add_facts(self) -> None:
        """Add facts and settings to the timings, after the last repeat."""
        for task, timing in self.timings.items():
            timing.facts = self.facts(task)
            timing.settings = timing.facts.pop("settings", {})

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


def compare(
    session: Session,
    runners: Mapping[str, Build],
    *,
    ranks: Mapping[str, int] | None = None,
    apart: bool = False,
) -> Timings:
    """Measure runners that are warmed up and then take turns: A B C A B C ...

    Args:
        session: says how often each task is timed; notes which runners fail, and why.
        runners: by name; each has processes of its own.
        ranks: processes of the runners that have several.
        apart: end each runner before the next one starts (A A B B C C), because their memory would
            not fit side by side.

    Returns:
        Timings, with the facts of their tasks.
    """
    say, repeats = session.console.say, session.config.repeats
    patience = _PATIENCE_ON_GPU if session.gpu else None
    running: dict[str, Runner] = {}
    timings: Timings = {}

    @contextlib.contextmanager
    def failures(name: str) -> Iterator[None]:
        """Note that a runner fails inside, and end it."""
        try:
            yield
        except RunnerError as failure:
            session.failed[name] = str(failure)
            say(f"{name}: not measured: {failure}")
            if name in running:
                running.pop(name).close()  # its other ranks would wait for ever

    for group in [[name] for name in runners] if apart else [list(runners)]:
        try:
            for name in group:
                say(f"{name}: warming up")
                own = (ranks or {}).get(name, 1)
                with failures(name):
                    running[name] = Runner(name, runners[name], ranks=own, patience=patience)
            if tasks := sum(len(runner.timings) for runner in running.values()):
                say(f"measuring: {repeats} rounds of {tasks}")
            for turn in [Runner.take_turn] * repeats + [Runner.add_facts]:
                for name in list(running):
                    with failures(name):
                        turn(running[name])
            for runner in running.values():
                timings |= runner.timings
        finally:
            while running:
                running.popitem()[1].close()
    for timing in timings.values() if apart else ():
        timing.facts["apart"] = True
    return timings


@dataclass(frozen=True)
class _Failure:
    """The answer of a process after an error."""

    reason: str
    trace: str


def _serve(end: Connection, environment: Mapping[str, str], name: str, build: Build) -> None:
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
        built = build()
        tasks = {name: built} if isinstance(built, Task) else built
        end.send({own: task.images for own, task in tasks.items()})

        def run(own: str) -> Sample:
            tasks[own].before()
            return clocked(tasks[own].run)

        answers: dict[str, Callable[[str], Any]] = {
            "run": run,
            "rest": lambda _: empty_gpu_cache(),
            "facts": lambda own: tasks[own].facts(),
        }
        while True:
            try:
                what, own = end.recv()
            except (EOFError, ConnectionResetError):
                return
            end.send(answers[what](own))
    except BaseException as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        with contextlib.suppress(OSError):
            end.send(_Failure(lines[0], traceback.format_exc()))


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens at."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]
