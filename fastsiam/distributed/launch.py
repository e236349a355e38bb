"""Starts the ranks of this machine with torch's elastic agent, alone or with other machines."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)

from fastsiam.config.nodes import NodesConfig
from fastsiam.environment import be_found_by_children
from fastsiam.errors import RANK_LOST, SIGNALLED
from fastsiam.launched import LAUNCHER
from fastsiam.signals import handled, signal_name

from .machines import WrongCommandError, open_rendezvous

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals by which somebody asks a rank to end: such a rank is not lost."""
_WRONG_USAGE = 2
_EXIT_CODE = "fastsiam/exit_code"
"""Key of the exit code after an error on any machine, which all machines exit with."""
_INFORMED = "fastsiam/informed"
"""Key of the number of machines that know it."""
_ERROR_SPREADS = 3.0
"""Seconds that a machine whose ranks lost others waits to learn that one of those had an error."""
_STOPPING = 35.0
"""Seconds that a machine takes to stop its ranks: torch's agent kills them after 30."""
_WHY: dict[int, str] = {
    signal.SIGKILL: ": was its memory too small?",
    signal.SIGABRT: ": by NCCL, perhaps, after --rank-timeout; see what is written above",
}


def launch(
    arguments: Sequence[str], config: NodesConfig, *, gpus: int, max_restarts: int = 0
) -> int:
    """Run ``fastsiam ARGUMENTS`` in one process for each rank of this machine until they end.

    With several machines, each of them calls this with the same arguments.

    Args:
        arguments: command line of the ranks.
        config: how many machines there are, and where they meet.
        gpus: ranks of each machine.
        max_restarts: how often this machine restarts its ranks after a rank or machine was lost.
            An error and a signal to stop end the run at once.

    Returns:
        Exit code: 0, the first failed rank's, 128 + the signal that ended it or this process, or 75
        if a machine was lost or never came.
    """
    for name in ("agent.server.api", "multiprocessing.api", "rendezvous.dynamic_rendezvous"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    be_found_by_children()
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in _obeyed())
    if config.max_nodes > 1:
        # Each start of the ranks gets a store of its own. With the one that torch's agents share, a
        # machine that joins them later waits for an address that is published only once.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    try:
        with handled(STOPS, _raise_signal):
            return _run(arguments, config, gpus, max_restarts)
    except SignalException as stop:
        return SIGNALLED + int(stop.sigval)
    except WrongCommandError as error:
        return _fail(str(error), _WRONG_USAGE)
    except RendezvousTimeoutError:
        return _fail(
            f"fewer than {config.min_nodes} machines met at --rendezvous {config.rendezvous} "
            f"within {config.rendezvous_timeout:g} s; start the same command on each machine, or "
            "wait longer (--rendezvous-timeout)"
        )
    except (RendezvousError, dist.DistError) as error:
        return _fail(
            f"no connection to --rendezvous {config.rendezvous} ({error.__cause__ or error}); "
            "check that the same command runs on that machine and that its port is open, then "
            "start the command again"
        )


def _run(arguments: Sequence[str], config: NodesConfig, gpus: int, max_restarts: int) -> int:
    store, rendezvous, address = open_rendezvous(config)
    spec = WorkerSpec(
        role="fastsiam",
        local_world_size=gpus,
        entrypoint=sys.executable,
        args=("-m", "fastsiam", *arguments),
        rdzv_handler=rendezvous,
        max_restarts=max_restarts,
        local_addr=address,
    )
    agent = _Agent(spec, store)
    code = agent.run_to_end()
    if config.max_nodes > 1:
        code = _agreed(store, code, agent.machines)
    rendezvous.shutdown()
    return code


class _Agent(LocalElasticAgent):
    """torch's elastic agent, except that errors are not restarted and end the run everywhere.

    Args:
        spec: what to run.
        store: shared with the agents of all machines.
    """

    def __init__(self, spec: WorkerSpec, store: Store) -> None:
        # Without a folder for logs: ranks write to the launcher's own output.
        super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull))
        self._shared = store
        self._exit_code = RANK_LOST

    @property
    def machines(self) -> int:
        """How many machines run ranks."""
        return int(self._worker_group.group_world_size or 1)

    def run_to_end(self) -> int:
        """Run the ranks, again after a loss, and return the exit code of this machine."""
        try:
            result: RunResult | None = self.run()
        except RendezvousClosedError:  # another machine ended the run
            return self._exit_code
        return 0 if result is None else self._exit_code  # None: a spare that was never needed

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        rendezvous = worker_group.spec.rdzv_handler
        if result.state is WorkerState.SUCCEEDED:
            self._exit_code = 0
            return result
        rank, code = _first_failure(result.failures) if result.is_failed() else (0, 0)
        # If another machine's agent stops its ranks first, those here leave on their own.
        left_on_request = code in (RANK_LOST, SIGNALLED + signal.SIGTERM)
        if (code == 0 and rendezvous.num_nodes_waiting()) or (
            left_on_request and self._is_resized()
        ):
            print("restarting from the checkpoint, with machines that wait", file=sys.stderr)
            return RunResult(state=WorkerState.HEALTHY)  # the agent restarts, at no cost
        if code:
            self._note_failure(rank, code)
        elif rendezvous.is_closed():
            raise RendezvousClosedError
        return result

    def _note_failure(self, rank: int, code: int) -> None:
        """Decide whether the ranks may restart, and print what a killed rank could not."""
        self._exit_code = code if code >= 0 else SIGNALLED - code
        if code < 0:
            why = _WHY.get(-code, "")
            print(f"error: rank {rank} was ended by {signal_name(-code)}{why}", file=sys.stderr)
        if code != RANK_LOST and (code >= 0 or -code in STOPS):
            self._remaining_restarts = 0
            with contextlib.suppress(dist.DistError, RendezvousError):  # its launcher has left
                self._shared.compare_set(_EXIT_CODE, "", str(self._exit_code))
                self._worker_group.spec.rdzv_handler.set_closed()
        elif self._error_elsewhere():
            raise RendezvousClosedError
        elif left := self._remaining_restarts:
            of = self._worker_group.spec.max_restarts
            print(f"restart {of - left + 1} of {of}, from the last checkpoint", file=sys.stderr)

    def _error_elsewhere(self) -> bool:
        """Tell whether ranks are lost because one of another machine had an error."""
        until = time.monotonic() + (_ERROR_SPREADS if self.machines > 1 else 0)
        with contextlib.suppress(dist.DistError):
            while time.monotonic() < until:
                if self._shared.check([_EXIT_CODE]):
                    return True
                time.sleep(0.1)
        return False

    def _is_resized(self) -> bool:
        """Tell whether machines wait to join, as far as the rendezvous still answers."""
        with contextlib.suppress(RendezvousError):
            return bool(self._worker_group.spec.rdzv_handler.num_nodes_waiting())
        return False


def _agreed(store: Store, code: int, machines: int) -> int:
    """Return the exit code of all machines: that of the first error on any of them, or its own.

    A scheduler that starts jobs again by their exit code must not mistake an error for a loss. So
    the launcher that serves the store does not leave before the others have read the error.
    """
    with contextlib.suppress(dist.DistError):  # the store is gone
        if code == 0 or not store.check([_EXIT_CODE]):
            return code
        code = int(store.get(_EXIT_CODE))
        store.add(_INFORMED, 1)
        until = time.monotonic() + _STOPPING
        while store.add(_INFORMED, 0) < machines and time.monotonic() < until:
            time.sleep(0.1)
    return code


def _first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, int]:
    """Return which rank failed first, and its exit code; below 0 it is minus a signal's number.

    Of ranks that failed in the same moment it is the one that a signal ended, else one that has an
    error of its own: the others left because it was gone. The agent ends the rest by SIGTERM.
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


def _obeyed() -> list[signal.Signals]:
    """Return the signals that the agent handles: under nohup it must not handle SIGHUP."""
    return [
        number
        for number in STOPS
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN
    ]


def _raise_signal(number: int, _: object) -> NoReturn:
    """Raise what torch's agent raises for signals as long as its ranks run."""
    raise SignalException(signal.Signals(number).name, signal.Signals(number))


def _fail(message: str, code: int = RANK_LOST) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code
