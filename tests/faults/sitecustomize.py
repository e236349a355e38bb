"""Fault injection: Python imports this module from ``PYTHONPATH`` and makes a rank fail in a run.

``$FAULT_RANK`` is the rank, or ``any`` for all ranks. ``$FAULT`` is the kind of failure.
``$FAULT_AT`` is the place: the step of this start at which the ranks agree to continue (3 by
default), or ``save``, ``evaluation`` or ``compiling``. ``$FAULT_ONCE`` is a path that is created
at the failure; while it exists, no start fails. With ``$FAULT_WORLD`` only starts with that number
of ranks fail. ``pause`` lasts until the file ``$FAULT_UNTIL`` exists.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from typing import Any


def _fault(*_: object, **__: object) -> int:
    if (once := os.environ.get("FAULT_ONCE")) is not None:
        with open(once, "w") as file:
            file.write(str(os.getpid()))
    match os.environ["FAULT"]:
        case "error":
            return 1 // 0
        case "hang":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # or it would wait for the next step
            time.sleep(600)
        case "machine":
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        case "pause":
            while not os.path.exists(os.environ["FAULT_UNTIL"]):
                time.sleep(0.02)
            return 0
        case "wait":  # until the launcher or a scheduler sends a signal
            came: list[object] = []
            for number in (signal.SIGTERM, signal.SIGUSR1):
                before: Any = signal.getsignal(number)
                signal.signal(number, lambda *x, obey=before: came.append(obey(*x)))
            while not came:
                time.sleep(0.02)
            return 0
        case name:
            os.kill(os.getpid(), signal.Signals[name])
            time.sleep(600)  # after SIGSTOP
    raise AssertionError("still here")


def install(at: str) -> None:
    """Make this process fail at a place, as ``$FAULT`` says."""
    from fastsiam.distributed import StopSignals
    from fastsiam.train.step import TrainingStep
    from fastsiam.train.trainer import Trainer

    replace: Any = os.replace

    def save(source: Any, target: Any) -> None:
        if str(target).endswith("last.pt"):
            _fault()
        replace(source, target)

    match at:
        case "save":
            os.replace = save  # type: ignore[assignment]
        case "evaluation":
            Trainer._evaluate = _fault  # type: ignore[assignment,method-assign]
        case "compiling":
            TrainingStep._warm_up = _fault  # type: ignore[assignment,method-assign]
        case number:
            votes, agree = itertools.count(), StopSignals._agree

            def failing(self: StopSignals, *arguments: Any) -> tuple[int, bool]:
                if next(votes) == int(number):
                    _fault()
                return agree(self, *arguments)

            StopSignals._agree = failing  # type: ignore[assignment,method-assign]


def _should_fail() -> bool:
    """Return whether this process is the one that should fail."""
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE")
    return (
        (bool(rank) and os.environ.get("FAULT_RANK", "none") in (rank, "any"))
        and os.environ.get("FAULT_WORLD", world) == world
        and not os.path.exists(os.environ.get("FAULT_ONCE", ""))
    )


if _should_fail():
    install(os.environ.get("FAULT_AT", "3"))
