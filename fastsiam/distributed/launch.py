"""Starting several ranks on this machine, and starting again when one of them is lost."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastsiam.environment import be_found_by_children
from fastsiam.errors import RANK_LOST, SIGNALLED
from fastsiam.launched import LAUNCHER
from fastsiam.signals import signal_name

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_WHY: dict[int, str] = {
    signal.SIGKILL: ": was its memory too small?",
    signal.SIGABRT: ": by NCCL, perhaps, after --rank-timeout; see what is written above",
}
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals by which somebody wants a rank to end: it is not lost."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended."""

    code: int
    """Exit code: 0, the first failed rank's, or 128 + the signal that ended it or the launcher."""
    lost: bool = False
    """Whether a rank was lost, so that starting again may help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of ranks, as torch's launcher is told of it; of this machine alone by default."""

    processes: int
    """Of this machine."""
    arguments: Sequence[str]
    """Of the command line."""
    nodes: int = 1
    """Machines."""
    backend: str = "c10d"
    """How torch's launchers of several machines meet."""
    endpoint: str = "localhost:0"
    """Where they do."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of that backend."""
    name: str = ""
    """The same for all of them, and for no other start; empty makes one up."""


def launch(
    processes: int,
    arguments: Sequence[str],
    *,
    restarts: int = 0,
    again: Callable[[int], tuple[int, Sequence[str]]] | None = None,
) -> int:
    """Run ``fastsiam ARGUMENTS`` in several processes of this machine, by torch's elastic launcher.

    Args:
        processes: how many.
        arguments: of the command line.
        restarts: how often to start again after a rank was lost: ended by a signal that nobody
            sent to end it, or gone without a word. An error ends it all, it would come again.
        again: is asked before each of these, with the number of processes so far; returns how many
            to start now and what to add to the arguments. May wait; none to start ends it all.

    Returns:
        Exit code: 0, the first failed process's, or 128 + the signal that ended this one.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    try:
        with launching():
            ending = attempt(Attempt(processes=processes, arguments=arguments))
            for restart in range(1, restarts + 1):
                if not ending.lost:
                    break
                more: Sequence[str]
                processes, more = again(processes) if again else (processes, ())
                if not processes:
                    return ending.code
                said = f"restart {restart} of {restarts}, from the last checkpoint, on {processes}"
                print(f"{said} rank{'' if processes == 1 else 's'}", file=sys.stderr)
                ending = attempt(Attempt(processes=processes, arguments=[*arguments, *more]))
    except SignalException as error:
        return SIGNALLED + int(error.sigval)
    return ending.code


@contextlib.contextmanager
def launching() -> Iterator[None]:
    """Have this process be a launcher, whose ranks find the package and know whom they end with."""

    import torch.distributed.launcher.api  # noqa: F401  # sets the levels of its loggers itself

    for name in ("agent.server.api", "multiprocessing.api"):  # the ranks speak for themselves
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    be_found_by_children()
    os.environ[LAUNCHER] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[LAUNCHER]


def attempt(how: Attempt) -> Ending:
    """Start the ranks once, and wait for the end."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=how.nodes,
        max_nodes=how.nodes,
        nproc_per_node=how.processes,
        run_id=how.name or uuid.uuid4().hex,
        rdzv_backend=how.backend,
        rdzv_endpoint=how.endpoint,
        rdzv_configs=dict(how.settings),
        max_restarts=0,
        signals_to_handle=",".join(number.name for number in _heard()),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "fastsiam", *how.arguments)
    except ChildFailedError as error:
        return _ending(*_first_failure(error.failures))
    return Ending(0)


def _heard() -> list[signal.Signals]:
    """Return what the launcher obeys: not what it is deaf to (nohup), which torch would undo."""
    return [
        number
        for number in STOPS
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN
    ]


def _ending(rank: int, code: int) -> Ending:
    """Return what the first failure of an attempt means, and say it where the rank could not.

    Args:
        rank: which.
        code: its exit code; below 0, minus the number of the signal that ended it.
    """
    if code >= 0:
        return Ending(code, lost=code == RANK_LOST)
    number = -code
    why = _WHY.get(number, "")
    print(f"error: rank {rank} was ended by {signal_name(number)}{why}", file=sys.stderr)
    return Ending(SIGNALLED + number, lost=number not in STOPS)


def _first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, int]:
    """Return which rank failed first, and its exit code; it is below 0 if a signal ended it.

    Of several in the same moment it is the one that a signal ended, else one that has an error of
    its own: the others left because it was gone. SIGTERM is what the launcher ends the rest with.
    """
    since = min(failure.timestamp for failure in failures.values())
    consequences = (RANK_LOST, -signal.SIGTERM)
    own = sorted(
        (
            (rank, x.exitcode)
            for rank, x in failures.items()
            if x.exitcode not in consequences and (x.timestamp <= since + 1 or x.exitcode > 0)
        ),
        key=lambda found: found[1] >= 0,
    )
    rest = sorted(failures, key=lambda rank: failures[rank].exitcode != RANK_LOST)
    return own[0] if own else (rest[0], failures[rest[0]].exitcode)
