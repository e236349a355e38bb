"""Starts the ranks of this machine by torch's elastic launcher, alone or with other machines."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

import psutil
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fastsiam.config.nodes import NodesConfig
from fastsiam.environment import be_found_by_children
from fastsiam.errors import ERROR, RANK_LOST, SIGNALLED
from fastsiam.launched import LAUNCHER
from fastsiam.signals import handled, signal_name

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals that the launcher passes on to its ranks, which save and leave."""
_LOGGERS = ("agent.server.api", "multiprocessing.api", "rendezvous.dynamic_rendezvous")
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
        max_restarts: how often this machine restarts its ranks after one of them failed.

    Returns:
        Exit code: 0, the first failed rank's, 128 + the signal that ended it or this process, or 75
        if a machine was lost or never came.
    """
    for name in _LOGGERS:
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    if max_restarts:  # which rank failed is not said otherwise before the last restart
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.ERROR)
    be_found_by_children()
    os.environ[LAUNCHER] = str(os.getpid())
    try:
        with handled(_STOPS, _raise_signal):  # torch handles them only as long as ranks run
            settings = _settings(config, gpus, max_restarts)
            elastic_launch(settings, sys.executable)("-m", "fastsiam", *arguments)
    except ChildFailedError as error:
        return _exit_code(error.failures)
    except SignalException as stop:
        return SIGNALLED + int(stop.sigval)
    except RendezvousClosedError:
        return _fail("another machine ended the run; look at what it wrote", ERROR)
    except RendezvousTimeoutError:
        return _fail(
            f"fewer than {config.min_nodes} machines met at --rendezvous {config.rendezvous} "
            f"within {config.rendezvous_timeout:g} s; start the same command on each machine, or "
            "wait longer (--rendezvous-timeout)",
            RANK_LOST,
        )
    except (RendezvousError, DistError) as error:
        return _fail(
            f"no connection to --rendezvous {config.rendezvous} ({error.__cause__ or error}); "
            "check that the same command runs on that machine and that its port is open, then "
            "start the command again",
            RANK_LOST,
        )
    return 0


def _settings(config: NodesConfig, gpus: int, max_restarts: int) -> LaunchConfig:
    host, port, address = "localhost", 0, "localhost"
    if config.max_nodes > 1:
        host, port = config.meeting
        address = address_towards(host)
        # Otherwise gloo takes the address of the host's name, which may be 127.0.1.1.
        if name := interface_of(address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        # Each start of the ranks gets a store of its own. With the one that torch's agents share, a
        # machine that joins them later waits for an address that is published only once.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if is_own(host):
            host = "localhost"  # torch compares names to tell which machine serves the store
    return LaunchConfig(
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        nproc_per_node=gpus,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # ranks write to the launcher's output
        run_id="fastsiam",
        role="fastsiam",
        rdzv_endpoint=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        rdzv_backend="c10d",
        rdzv_configs={
            "join_timeout": max(1, round(config.rendezvous_timeout)),
            "read_timeout": max(1, round(config.rendezvous_timeout)),
        },
        max_restarts=max_restarts,
        local_addr=address,
        signals_to_handle=",".join(number.name for number in _obeyed()),
    )


def _obeyed() -> list[signal.Signals]:
    """Return the signals that torch's agent handles: under nohup it must not handle SIGHUP."""
    return [
        number
        for number in _STOPS
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN
    ]


def _raise_signal(number: int, _: object) -> NoReturn:
    """Raise what torch's agent raises for signals as long as its ranks run."""
    raise SignalException(signal.Signals(number).name, signal.Signals(number))


def _exit_code(failures: Mapping[int, ProcessFailure]) -> int:
    """Return the exit code of the rank that failed first; say so if a signal ended it.

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
    rank, code = own[0] if own else (rest[0], failures[rest[0]].exitcode)
    if code >= 0:
        return code
    why = _WHY.get(-code, "")
    return _fail(f"rank {rank} was ended by {signal_name(-code)}{why}", SIGNALLED - code)


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


def is_own(host: str) -> bool:
    """Tell whether a name or address is this machine's."""
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.create_server(address, family=family):
                return True
    return False


def address_towards(host: str) -> str:
    """Return the address from which this machine reaches a host, by which others reach it.

    Debian gives a machine's own name the address 127.0.1.1. Then it is that of the default route.
    """
    found = _own_address(host)
    if found and (host in ("localhost", found) or not ipaddress.ip_address(found).is_loopback):
        return found
    return _own_address("192.0.2.1") or host  # RFC 5737: an address of nobody; nothing is sent


def _own_address(host: str) -> str:
    """Return this machine's address for packets to a host; "" if there is no way to it."""
    with contextlib.suppress(OSError):
        family, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]).partition("%")[0]
    return ""


def interface_of(address: str) -> str:
    """Return the name of this machine's interface with an address; "" if none has it."""
    found = psutil.net_if_addrs().items()
    return next((name for name, own in found if address in (x.address for x in own)), "")
