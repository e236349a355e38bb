"""Stop a run on all ranks together after a signal, before a step or in an evaluation."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from fastsiam.child_process import is_worker
from fastsiam.distributed.place import Place
from fastsiam.errors import FastSiamError, OtherRankError
from fastsiam.signals import ECHO, STOPS, exit_immediately, handle_stop_signals

T = TypeVar("T")

_STOPS = (*STOPS, signal.SIGUSR1)
"""Signals that make a run save and stop. SIGUSR1 is SLURM's warning before the time limit
(``--signal=USR1@60``)."""

_LONG_ECHO = 3.0
"""Seconds during which further signals count as repeats of the first, because a scheduler and a
launcher may both send it. For Ctrl-C to a process without a launcher, ``ECHO`` is used instead."""
_FAILED = 1000
"""Vote of a rank that cannot continue: this value plus its rank."""


class Signalled(Exception):
    """Raised on all ranks at the same batch after a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopSignals:
    """Stops all ranks at the same batch after any rank receives a signal or fails.

    Before each batch the ranks vote by an all-reduce of two numbers over gloo, on the host. So the
    vote does not wait for devices, and no rank stops while another waits for it in a collective. A
    second signal ends the process and its workers at once.

    Args:
        place: this rank.
    """

    def __init__(self, place: Place) -> None:
        self._signal_number = 0
        self._place = place
        self._failure: FastSiamError | None = None
        self._group: dist.ProcessGroup | None = None
        """All ranks; None if there is only one."""
        if place.world > 1:
            self._group = dist.new_group(backend="gloo", timeout=place.timeout)  # type: ignore[assignment]
        self._handlers = handle_stop_signals(
            self._note,
            again=exit_immediately,
            numbers=_STOPS,
            echo=lambda number: _LONG_ECHO if is_worker() or number != signal.SIGINT else ECHO,
        )

    def __enter__(self) -> StopSignals:
        self._handlers.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._handlers.__exit__(*exc_info)

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items while all ranks can continue; every rank iterates over its own items.

        A rank with fewer items keeps voting until the other ranks are done.

        Raises:
            Signalled: a rank received a signal.
            OtherRankError: another rank's iterator raised an error.
            FastSiamError: this rank's iterator raised it; the other ranks stop, too.
        """
        iterator, sentinel = iter(items), object()
        while True:
            item: T | object = sentinel
            error = None
            if not self._signal_number:
                try:
                    item = next(iterator, sentinel)
                except FastSiamError as failure:
                    if self._group is None:
                        raise
                    error = failure
            verdict, has_item = self._agree(
                _FAILED + self._place.rank if error else self._signal_number, item is not sentinel
            )
            if verdict >= _FAILED:
                other_error = OtherRankError(
                    f"rank {verdict - _FAILED} cannot continue; see its own error message"
                )
                self.raise_on_all(error or other_error)
            if verdict:
                raise Signalled(verdict)
            if not has_item:
                return
            if item is not sentinel:
                yield item  # type: ignore[misc]

    def raise_on_all(self, error: FastSiamError) -> NoReturn:
        """Raise an error of the run; every rank must call this before the same batch."""
        self._failure = error
        raise error

    def is_known_to_all(self, error: FastSiamError) -> bool:
        """Return whether ``raise_on_all`` raised this error, so all ranks end at the same batch."""
        return error is self._failure

    def meet(self) -> None:
        """Wait for the other ranks before exiting; ignore ranks that are already gone."""
        if self._group is not None:
            with contextlib.suppress(RuntimeError):
                dist.barrier(self._group)

    def _agree(self, vote: int, has_item: bool) -> tuple[int, bool]:
        """Return the ranks' most urgent vote, and whether any of them has an item."""
        if self._group is None:
            return vote, has_item
        votes = torch.tensor([vote, has_item])
        dist.all_reduce(votes, dist.ReduceOp.MAX, self._group)
        verdict, any_item = votes.tolist()
        return verdict, bool(any_item)

    def _note(self, number: int) -> None:
        self._signal_number = number
        if self._place.is_leader:
            line = (
                f"{signal.Signals(number).name}: stopping before the next step or batch; a second "
                "signal exits at once, without saving"
            )
            with contextlib.suppress(OSError):  # a full disk, or a pipe whose reader is gone
                os.write(2, f"{chr(10) * os.isatty(2)}{line}\n".encode())
