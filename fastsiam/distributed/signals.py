"""Signals that stop a run before a step or in an evaluation, on all ranks together."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist

from fastsiam.distributed.place import Place
from fastsiam.errors import FastSiamError, OtherRankError
from fastsiam.signals import ECHO, first_is_handled, leave_at_once

T = TypeVar("T")

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What a run saves and stops for: Ctrl-C, a scheduler's end, SLURM's warning of one
(``--signal=USR1@60``), and a terminal that is closed, unless ``nohup`` has it ignored."""

_TICK = 0.2
"""Seconds between two looks at the grace period."""
_FAILED = 1000
"""Votes from here on are of ranks that cannot continue: this and the rank's number."""


class Signalled(Exception):
    """A signal asks to stop; all ranks raise it at the same batch."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopSignals:
    """Turns a signal to any rank, or its error, into a decision that all take at the same batch.

    Before each batch is used the ranks tell each other by an all-reduce of two numbers over gloo
    how they are. It concerns their hosts alone: no device is waited for, and no rank stops while
    another waits for it in a collective. A second signal ends the process at once, and its workers.

    Args:
        place: this rank.
        grace: seconds after the first signal in which the process has to be gone; it leaves
            without saving when they are over. 0 is no limit.
    """

    PATIENCE = 3.0
    """Seconds in which further signals are taken for the first one: a scheduler and a launcher may
    both send it. A person's second Ctrl-C to a process alone is meant."""

    def __init__(self, place: Place, *, grace: float = 0.0) -> None:
        self._got, self._since = 0, 0.0
        self._place, self._grace = place, grace
        self._left = threading.Event()
        self._failure: FastSiamError | None = None
        self._group: dist.ProcessGroup | None = None
        if not self._is_alone:
            self._group = dist.new_group(backend="gloo", timeout=place.timeout)  # type: ignore[assignment]
        self._previous: dict[int, object] = {}

    @property
    def _is_alone(self) -> bool:
        return self._place.world == 1

    def __enter__(self) -> StopSignals:
        for number in STOPPING:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._note)
        if self._grace:  # now: a thread that a handler starts may wait for the one it interrupts
            threading.Thread(target=self._watch, name="fastsiam-grace", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._left.set()

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items as long as all ranks can continue; every rank iterates over its own.

        A rank that has fewer of them goes on to take part until the others are done.

        Raises:
            Signalled: a rank got a signal.
            OtherRankError: another rank's items ended in an error.
            FastSiamError: this rank's did; the others know it.
        """
        iterator, nothing = iter(items), object()
        while True:
            item: T | object = nothing
            error = None
            if not self._got:
                try:
                    item = next(iterator, nothing)
                except FastSiamError as failure:
                    if self._is_alone:
                        raise
                    error = failure
            verdict, more = self._agree(
                _FAILED + self._place.rank if error else self._got, item is not nothing
            )
            if verdict >= _FAILED:
                other = OtherRankError(f"rank {verdict - _FAILED} cannot continue, and says why")
                self._failure = error or other
                raise self._failure
            if verdict:
                raise Signalled(verdict)
            if not more:
                return
            if item is not nothing:
                yield item  # type: ignore[misc]

    def is_known_to_all(self, error: FastSiamError) -> bool:
        """Tell whether an error was raised by ``over``, on all ranks at the same batch."""
        return error is self._failure

    def meet(self) -> None:
        """Wait for the other ranks, which leave together; one that is gone already is no error."""
        if not self._is_alone:
            with contextlib.suppress(RuntimeError):
                dist.barrier(self._group)

    def _agree(self, own: int, more: bool) -> tuple[int, bool]:
        """Return the ranks' most urgent vote, and whether any of them has an item."""
        if self._is_alone:
            return own, more
        votes = torch.tensor([own, more])
        dist.all_reduce(votes, dist.ReduceOp.MAX, self._group)
        verdict, some = votes.tolist()
        return verdict, bool(some)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._got:
            self._got, self._since = number, time.monotonic()
            first_is_handled()
            name = signal.Signals(number).name
            self._say(
                f"{name}: stopping before the next step or batch; again leaves at once, unsaved"
            )
            return
        meant = self._is_alone and number == signal.SIGINT
        if time.monotonic() - self._since > (ECHO if meant else self.PATIENCE):
            leave_at_once(number)

    def _watch(self) -> None:
        """Leave when the grace period is over; in a thread, for this one may hang."""
        while not self._left.wait(_TICK):
            if self._got and time.monotonic() - self._since > self._grace:
                self._say(
                    f"{signal.Signals(self._got).name}: not saved within --grace {self._grace:g} "
                    "s: leaving; the same command resumes from the last checkpoint"
                )
                leave_at_once(self._got)

    def _say(self, line: str) -> None:
        if self._place.leads:
            with contextlib.suppress(OSError):  # a full disk; a pipe's reader that left too
                os.write(2, f"{chr(10) * os.isatty(2)}{line}\n".encode())
