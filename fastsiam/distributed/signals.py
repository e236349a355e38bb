"""Signals that stop a run on all ranks together, before a step or in an evaluation."""

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
"""Signals that make a run save and stop: Ctrl-C, a scheduler's end, SLURM's warning of one
(``--signal=USR1@60``), and a closed terminal unless ``nohup`` ignores it."""

_TICK = 0.2
"""Seconds between two checks of the grace period."""
_FAILED = 1000
"""Vote of a rank that cannot continue: this value plus its rank."""


class Signalled(Exception):
    """Raised on all ranks at the same batch after a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopSignals:
    """Stops all ranks at the same batch after a signal to, or an error of, any rank.

    Before each batch the ranks vote by an all-reduce of two numbers over gloo, on the host. So the
    vote does not wait for devices, and no rank stops while another waits for it in a collective. A
    second signal ends the process and its workers at once.

    Args:
        place: this rank.
        grace: seconds between the first signal and the end of the process, which then exits
            without saving; 0 means no limit.
    """

    PATIENCE = 3.0
    """Seconds in which further signals count as repetitions of the first one, because a scheduler
    and a launcher may both send it. A second Ctrl-C to a single process is not a repetition."""

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
        if self._grace:  # started now, because a thread started in a signal handler may deadlock
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
        """Yield items while all ranks can continue; every rank iterates over its own items.

        A rank with fewer items keeps voting until the other ranks are done.

        Raises:
            Signalled: a rank received a signal.
            OtherRankError: another rank's iterator raised an error.
            FastSiamError: this rank's iterator raised it; the other ranks know.
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
                other = OtherRankError(
                    f"rank {verdict - _FAILED} cannot continue; see its own error message"
                )
                self._failure = error or other
                raise self._failure
            if verdict:
                raise Signalled(verdict)
            if not more:
                return
            if item is not nothing:
                yield item  # type: ignore[misc]

    def is_known_to_all(self, error: FastSiamError) -> bool:
        """Return whether ``over`` raised this error, on all ranks at the same batch."""
        return error is self._failure

    def meet(self) -> None:
        """Wait for the other ranks before exiting; ranks that are gone already are ignored."""
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
                f"{name}: stopping before the next step or batch; a second signal exits at once, "
                "without saving"
            )
            return
        meant = self._is_alone and number == signal.SIGINT
        if time.monotonic() - self._since > (ECHO if meant else self.PATIENCE):
            leave_at_once(number)

    def _watch(self) -> None:
        """Exit when the grace period is over; in a thread, because the main thread may hang."""
        while not self._left.wait(_TICK):
            if self._got and time.monotonic() - self._since > self._grace:
                self._say(
                    f"{signal.Signals(self._got).name}: not saved within --grace {self._grace:g} "
                    "s: exiting; run the same command to resume from the last checkpoint"
                )
                leave_at_once(self._got)

    def _say(self, line: str) -> None:
        if self._place.is_leader:
            with contextlib.suppress(OSError):  # a full disk, or a pipe whose reader is gone
                os.write(2, f"{chr(10) * os.isatty(2)}{line}\n".encode())
