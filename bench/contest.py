"""Contenders: processes that set up a piece of work once and run it in turns.

Each has a process of its own (several, if it has ranks), so that none meets another's threads,
memory or switches, and one that fails or is not installed takes nothing with it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NamedTuple

from fastsiam.bench.measure import GpuWatch, clocked, give_back_gpu_memory, gpu_memory
from fastsiam.bench.timing import Sample, Timing
from fastsiam.errors import FastSiamError

_SPAWN = multiprocessing.get_context("spawn")
_PATIENCE = 5.0
"""Seconds that a process has to end when it is told to."""


@dataclass(frozen=True)
class Work:
    """A repeatable piece of work."""

    run: Callable[[], object]
    """Does it once. What it began on a GPU need not be over when it returns."""
    images: int
    """How many images it goes through each time."""
    facts: Callable[[], dict[str, Any]] = dict
    """Is asked at the end for what else is to be told of it."""
    before: Callable[[], object] = lambda: None
    """Prepares each time, outside of the clock."""


Build = Callable[..., Mapping[str, Work]]
"""A function of a module. Called with a contender's settings it returns its work, by name."""


class ContenderFailed(FastSiamError):
    """A contender's process ended with an error, which is the message."""


class _Process(NamedTuple):
    """A new process, which imports what most work needs and waits to be told what to build."""

    process: Any
    pipe: Connection
    """Where it is told what to do, and answers."""

    @classmethod
    def start(cls) -> _Process:
        pipe, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_serve, args=(theirs,))
        process.start()
        theirs.close()
        return cls(process, pipe)

    def tell(self, message: Any) -> None:
        """Send a message; if the process has died, that is heard next."""
        with contextlib.suppress(OSError):
            self.pipe.send(message)

    def hear(self) -> Any:
        """Wait for its answer.

        Raises:
            ContenderFailed: it is an error, or the process died.
        """
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(_PATIENCE)
            code = self.process.exitcode
            why = " (killed, perhaps because memory ran out)" if code == -signal.SIGKILL else ""
            raise ContenderFailed(
                f"its process ended with code {code}{why}; FASTSIAM_DEBUG=1 shows its output"
            ) from None
        if isinstance(answer, _Failure):
            if os.environ.get("FASTSIAM_DEBUG"):
                print(answer.trace, file=sys.stderr)
            raise ContenderFailed(answer.reason)
        return answer

    def end(self) -> None:
        """Wait until it has ended, which it does when its pipe is closed."""
        self.pipe.close()
        self.process.join(_PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Contender:
    """Processes that do some work when told.

    Args:
        build: is called in each of them.
        settings: what it is called with.
        ranks: how many there are; they find each other as torchrun's do.
        spare: processes that have started already.
        patience: seconds that an answer may take; None is any time.

    Raises:
        ContenderFailed: an error in one of them, a missing package for instance.
    """

    def __init__(
        self,
        build: Build,
        settings: Mapping[str, Any],
        *,
        ranks: int = 1,
        spare: Sequence[_Process] = (),
        patience: float | None = None,
    ) -> None:
        self._patience = patience
        before, port = gpu_memory(), _free_port()
        self._processes = [*spare, *(_Process.start() for _ in range(ranks - len(spare)))]
        for rank, process in enumerate(self._processes):
            place: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
            place |= {"LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            process.tell((build, dict(settings), place))  # alone too: our own may have others
        try:
            self.images: dict[str, int] = self._answers()[0]
            """How many images each piece of its work goes through, by name."""
            self.first = {work: self.run(work) for work in self.images}
            """Each piece of its work, done for the first time."""
        except BaseException:  # Ctrl-C too: nobody else knows of its processes yet
            self.close()
            raise
        self.gpu = max(0, gpu_memory() - before)
        """Bytes of GPU memory that it came to hold, its CUDA contexts included."""
        self.rest()

    def run(self, work: str) -> Sample:
        """Have it do a piece of its work: all ranks together, to the end of the slowest."""
        samples: list[Sample] = self._ask("run", work)
        return Sample(
            max(sample.wall for sample in samples),
            sum(sample.cpu for sample in samples),
            sum(sample.host for sample in samples),
        )

    def rest(self) -> None:
        """Have it give back the GPU memory that it only keeps for later: it is others' turn."""
        self._ask("rest", "")

    def facts(self, work: str) -> dict[str, Any]:
        """Ask what else is to be told of a piece of its work; the first rank answers."""
        facts: dict[str, Any] = self._ask("facts", work)[0]
        return facts

    def close(self) -> None:
        """End its processes."""
        for process in self._processes:
            process.pipe.close()
        for process in self._processes:
            process.end()

    def _ask(self, what: str, work: str) -> list[Any]:
        for process in self._processes:
            process.tell((what, work))
        return self._answers()

    def _answers(self) -> list[Any]:
        """Return all answers; a failure comes out at once, for the others may wait for it."""
        answers: dict[Any, Any] = {}
        waiting: dict[Any, _Process] = {one.pipe: one for one in self._processes}
        while left := [pipe for pipe in waiting if pipe not in answers]:
            ready = wait(left, self._patience)
            if not ready:
                raise ContenderFailed(f"no answer came in {self._patience:.0f} s")
            answers |= {pipe: waiting[pipe].hear() for pipe in ready}
        return [answers[pipe] for pipe in waiting]


class Contest:
    """Contenders that take turns: A B C A B C ...

    Args:
        say: is told what happens, line by line.
        apart: whether each contender ends before the next one starts (A A B B C C): what they hold
            would not fit beside each other.
        patience: seconds that a contender may take for an answer; None is any time.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        apart: bool = False,
        patience: float | None = None,
    ) -> None:
        self._say, self._apart, self._patience = say, apart, patience
        self._spare: list[_Process] = []
        self._waiting: dict[str, Callable[[], bool]] = {}
        self._watch = GpuWatch()
        self._windows: dict[tuple[str, str], list[tuple[float, float]]] = {}
        self.contenders: dict[str, Contender] = {}
        """Those that can be measured, by name."""
        self.failed: dict[str, str] = {}
        """Those that cannot, and why."""

    def enter(self, name: str, build: Build, /, *, ranks: int = 1, **settings: Any) -> bool:
        """Start a contender and warm it up; return whether it is ready.

        One that shall be alone starts when it is its turn.

        Args:
            name: of the contender.
            build: makes its work from ``settings``, in its own process.
            ranks: processes that do the work together.
            settings: what ``build`` is called with.
        """
        start = partial(self._start, name, build, ranks, settings)
        if self._apart:
            self._waiting[name] = start
            return True
        return start()

    def run(self, repeats: int) -> dict[tuple[str, str], Timing]:
        """Let the contenders take turns, each with all of its work.

        Returns:
            Timings by the names of contender and work, with what else is known of it.
        """
        timings: dict[tuple[str, str], Timing] = {}
        with self._watch:
            for name, start in self._waiting.items():
                if start():
                    timings |= self._measure([name], repeats)
                    self.contenders[name].close()
            self._end_spare()
            if not self._apart:
                timings = self._measure(list(self.contenders), repeats)
        for turn, timing in timings.items():
            timing.facts |= self._watch.shares(self._windows.get(turn, ()))
        return {turn: timing for turn, timing in timings.items() if turn[0] not in self.failed}

    def _start(self, name: str, build: Build, ranks: int, settings: Mapping[str, Any]) -> bool:
        self._say(f"{name}: warming up")
        spare = self._spare
        self._spare = [_Process.start()]  # the next one's, which imports meanwhile
        try:
            self.contenders[name] = Contender(
                build, settings, ranks=ranks, spare=spare, patience=self._patience
            )
        except ContenderFailed as failure:
            self._fail(name, failure)
        return name in self.contenders

    def _measure(self, names: Sequence[str], repeats: int) -> dict[tuple[str, str], Timing]:
        turns = [(name, work) for name in names for work in self.contenders[name].images]
        self._say(f"measuring: {repeats} rounds of {len(turns)}")
        timings = {turn: Timing() for turn in turns}
        for _ in range(repeats):
            for turn in list(timings):
                sample = self._turn(*turn)
                if sample is None:
                    del timings[turn]
                else:
                    timings[turn].samples.append(sample)
        for (name, piece), timing in timings.items():
            contender = self.contenders[name]
            timing.images, timing.gpu = contender.images[piece], contender.gpu
            if name in self.failed:
                continue
            try:
                timing.facts = contender.facts(piece)
            except ContenderFailed as failure:
                self._fail(name, failure)
                continue
            timing.settings = timing.facts.pop("settings", {})
            timing.facts |= {"apart": True} if self._apart else {}
        return timings

    def _turn(self, name: str, work: str) -> Sample | None:
        if name in self.failed:
            return None
        try:
            sample = self.contenders[name].run(work)
            ended = time.time()
            self._windows.setdefault((name, work), []).append((ended - sample.wall, ended))
            self.contenders[name].rest()
            return sample
        except ContenderFailed as failure:
            self._fail(name, failure)
            return None

    def _end_spare(self) -> None:
        for process in self._spare:
            process.end()
        self._spare = []

    def _fail(self, name: str, failure: ContenderFailed) -> None:
        self.failed[name] = str(failure)
        self._say(f"{name}: not measured: {failure}")
        if name in self.contenders:
            self.contenders[name].close()  # ranks that are left would wait for ever

    def __enter__(self) -> Contest:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end_spare()
        for contender in self.contenders.values():
            contender.close()


@dataclass(frozen=True)
class _Failure:
    """The answer of a process after an error."""

    reason: str
    trace: str


def _serve(end: Connection) -> None:
    """Work as told through a connection, in a process of its own, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent closes the connection then
    if not os.environ.get("FASTSIAM_DEBUG"):  # libraries have much to say
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
    # What it starts in its turn shall start as in any program, not as this process was.
    multiprocessing.set_start_method(None, force=True)
    try:
        import_module("fastsiam.bench.cases.train")
        told = _told(end)
        first = next(told, None)
        if first is None:
            return
        build, settings, place = first
        os.environ |= {name: str(value) for name, value in place.items()}
        work = build(**settings)
        end.send({name: piece.images for name, piece in work.items()})
        for what, name in told:
            if what == "run":
                work[name].before()
                end.send(clocked(work[name].run))
            elif what == "rest":
                give_back_gpu_memory()
                end.send(None)
            else:
                end.send(work[name].facts())
    except BaseException as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        with contextlib.suppress(OSError):
            end.send(_Failure(lines[0], traceback.format_exc()))


def _told(end: Connection) -> Iterator[Any]:
    """Yield what comes through a connection until it is closed."""
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            yield end.recv()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
