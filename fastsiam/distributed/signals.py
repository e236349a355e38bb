"""Signals that stop a run after a step, on all ranks together."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from types import FrameType, TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from fastsiam.distributed.place import Place
from fastsiam.leaving import ECHO, first_is_handled, leave_at_once


class StopSignals:
    """Turns SIGINT and SIGTERM into a decision that all ranks take after the same step.

    A rank that got a signal says so in a one-number gloo all-reduce, which runs beside the next
    step: the host never waits for the device, and no rank stops while another waits for it in a
    collective. A second signal ends the process at once, and its workers.
    """

    PATIENCE = 3.0
    """Seconds in which further signals are taken for the first one: a scheduler and a launcher may
    both send it. A person's second Ctrl-C to a process alone is meant."""

    def __init__(self, place: Place) -> None:
        self._got, self._since = 0, 0.0
        self._alone, self._leads = place.world == 1, place.leads
        self._group = None
        if not self._alone:
            self._group = dist.new_group(backend="gloo", timeout=place.timeout)
        self._vote: tuple[Tensor, dist.Work] | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if kind is None and self._vote:
            self._vote[1].wait()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._got:
            self._got, self._since = number, time.monotonic()
            first_is_handled()
            if self._leads:
                name = signal.Signals(number).name
                line = f"{name}: stopping after this step or evaluation; again leaves at once"
                with contextlib.suppress(OSError):  # a full disk; a pipe's reader that left too
                    os.write(2, f"{chr(10) * os.isatty(2)}{line}, unsaved\n".encode())
            return
        meant = self._alone and number == signal.SIGINT
        if time.monotonic() - self._since > (ECHO if meant else self.PATIENCE):
            leave_at_once(number)

    def after_step(self) -> int:
        """The signal that all ranks shall stop for now, or 0. Each rank calls it once a step."""
        if self._alone:
            return self._got
        agreed = 0
        if self._vote:
            self._vote[1].wait()
            agreed = int(self._vote[0])  # a CPU tensor: no wait for the device
        vote = torch.tensor(self._got)
        work = dist.all_reduce(vote, dist.ReduceOp.MAX, self._group, async_op=True)  # type: ignore[arg-type]
        assert work is not None
        self._vote = vote, work
        return agreed
