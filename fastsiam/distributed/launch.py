"""Start the ranks of this machine with torch's elastic launcher, on one or several machines."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

import psutil
import torch
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fastsiam.child_process import LAUNCHER, add_package_to_path, add_program_to_path, own_program
from fastsiam.config.run import NodesConfig
from fastsiam.console import Console, format_count
from fastsiam.errors import RANK_LOST, SIGNALLED
from fastsiam.signals import STOPS, handle_signals, signal_name

_FORWARDED = (*STOPS, signal.SIGQUIT, signal.SIGUSR1)
"""Signals that the launcher forwards to its ranks, which save and exit; at SIGQUIT they end."""
_LOGGERS = ("agent.server.api", "multiprocessing.api", "rendezvous.dynamic_rendezvous")
_FATAL = 3
"""torch's highest log level. The exceptions contain the messages of the lower levels."""
_KILL_HINTS: dict[int, str] = {
    signal.SIGKILL: ", perhaps because memory ran out",
    signal.SIGABRT: " (a crash, or NCCL after --rank-timeout); see the messages above",
}


def launch(arguments: Sequence[str], config: NodesConfig, *, max_restarts: int = 0) -> int:
    """Run this program with ``arguments`` in one process per rank of this machine, and wait.

    With several machines, each must call this with the same arguments.

    Args:
        arguments: command-line arguments of the ranks.
        config: number of machines, rendezvous, and number of ranks per machine.
        max_restarts: how often this machine restarts its ranks after a failure.

    Returns:
        Exit code: 0; that of the rank that failed first; 128 + the number of the signal that ended
        that rank or this process; or 75 if a machine was lost, did not join or ended the run.
    """
    for name in _LOGGERS:
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    if max_restarts:  # otherwise the failed rank is only reported after the last restart
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.ERROR)
    _silence_torch()
    add_package_to_path()
    add_program_to_path()
    os.environ[LAUNCHER] = str(os.getpid())
    try:
        with handle_signals(_FORWARDED, _raise_signal):  # torch handles them only while ranks run
            # Another command at the same address, such as an evaluation, is no part of the run.
            run_id = "-".join(["fastsiam", *arguments[:1]])
            settings = _settings(config, max_restarts, run_id)
            elastic_launch(settings, sys.executable)(*own_program(), *arguments)
    except ChildFailedError as error:
        return _exit_code(error.failures)
    except SignalException as stop:
        return SIGNALLED + int(stop.sigval)
    except RendezvousClosedError:
        return _fail("another machine ended the run; see its messages", RANK_LOST)
    except RendezvousTimeoutError:
        return _fail(
            f"fewer than {config.min_nodes} machines joined --rendezvous {config.rendezvous} "
            f"within {config.rendezvous_timeout:g} s; run the same command on each machine, or "
            "pass a longer --rendezvous-timeout",
            RANK_LOST,
        )
    except (RendezvousError, DistError) as error:
        return _fail(
            f"no connection to --rendezvous {config.rendezvous} ({error.__cause__ or error}); "
            "check that the same command runs on that machine and that its port is open, then "
            "run the command again",
            RANK_LOST,
        )
    except AttributeError as error:
        if error.name != "is_failed":
            raise
        # torch's agent has no result: the run had enough machines, and ended.
        return _fail(
            f"the run at --rendezvous {config.rendezvous} had "
            f"{format_count(config.max_nodes, 'machine')} without this one, and has ended",
            RANK_LOST,
        )
    return 0


def _settings(config: NodesConfig, max_restarts: int, run_id: str) -> LaunchConfig:
    host, port, address = "localhost", 0, "localhost"
    if config.max_nodes > 1:
        number = str(config.nodes).replace(":", " to ")
        Console().say(
            f"waiting up to {config.rendezvous_timeout:g} s for {number} machines, this one "
            f"included, at --rendezvous {config.rendezvous}"
        )
        host, port = config.meeting
        address = address_towards(host)
        # Otherwise gloo uses the address of the host name, which may be 127.0.1.1.
        if name := interface_of(address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        # Each start of the ranks gets its own store. With the store that torch's agents share, a
        # machine that joins later waits for an address that is published only once.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if is_own(host):
            host = "localhost"  # torch compares names to decide which machine serves the store
        else:
            wait_for_host(host, port, config.rendezvous_timeout)
    # Without this, torch kills ranks that are still saving 30 s after a signal. torch 2.11 always
    # does.
    shutdown_timeout = round(config.rank_timeout) + 60
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(shutdown_timeout))
    timeout = max(1, round(config.rendezvous_timeout))
    # Ignored signals stay ignored: under nohup, torch's agent must not handle SIGHUP.
    signals = [
        number.name
        for number in _FORWARDED
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN
    ]
    return LaunchConfig(
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        nproc_per_node=config.gpus,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # ranks write to the launcher's output
        run_id=run_id,
        role="fastsiam",
        rdzv_endpoint=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        rdzv_backend="c10d",
        rdzv_configs={"join_timeout": timeout, "read_timeout": timeout},
        max_restarts=max_restarts,
        local_addr=address,
        signals_to_handle=",".join(signals),
    )


def _silence_torch() -> None:
    """Hide the C++ stack traces that this process's torch prints when a connection fails.

    torch reads ``TORCH_CPP_LOG_LEVEL`` on import, and ranks would inherit it.
    """
    if "TORCH_CPP_LOG_LEVEL" not in os.environ:
        with contextlib.suppress(OSError, ValueError):  # a torch that was built with glog
            library = ctypes.CDLL(torch._C.__file__)
            ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = _FATAL


def wait_for_host(host: str, port: int, timeout: float) -> None:
    """Wait until a host accepts connections on a port.

    torch would wait for up to twice the timeout.

    Raises:
        RendezvousConnectionError: no connection within ``timeout`` seconds.
    """
    end = time.monotonic() + timeout
    while True:
        left = max(0.1, end - time.monotonic())
        try:
            # TCP would retry at ever longer intervals.
            socket.create_connection((host, port), min(5.0, left)).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise RendezvousConnectionError from error
        time.sleep(min(1.0, left))


def _raise_signal(number: int, _: object) -> NoReturn:
    """Raise the exception that torch's agent raises for signals while its ranks run."""
    raise SignalException(signal.Signals(number).name, signal.Signals(number))


def _exit_code(failures: Mapping[int, ProcessFailure]) -> int:
    """Return the exit code of the rank that failed first; print a message if a signal ended it.

    Among ranks that failed within a second, one that a signal ended comes first, then one with its
    own error: the others exited because that one was gone. The agent ends the rest with SIGTERM.
    """
    first_time = min(failure.timestamp for failure in failures.values())

    def order(rank: int) -> tuple[bool, bool]:
        code, is_early = failures[rank].exitcode, failures[rank].timestamp <= first_time + 1
        if code not in (RANK_LOST, -signal.SIGTERM) and (is_early or code > 0):
            return False, code >= 0
        return True, code != RANK_LOST

    rank = min(failures, key=order)
    code = failures[rank].exitcode
    if code >= 0:
        return code
    hint = _KILL_HINTS.get(-code, "")
    return _fail(f"rank {rank} was killed by {signal_name(-code)}{hint}", SIGNALLED - code)


def _fail(message: str, code: int) -> int:
    with contextlib.suppress(OSError):  # a full disk must not change the exit code
        print(f"error: {message}", file=sys.stderr)
    return code


def is_own(host: str) -> bool:
    """Return whether a host name or address belongs to this machine."""
    if host in (socket.gethostname(), socket.getfqdn()):
        return True  # the name may resolve to the outer address of a translating router
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.create_server(address, family=family):
                return True
    return False


def address_towards(host: str) -> str:
    """Return this machine's address on the route to a host, by which others can reach it.

    Debian maps a machine's own name to 127.0.1.1; then the address of the default route is used.
    """
    address = _own_address(host)
    if address and (
        host in ("localhost", address) or not ipaddress.ip_address(address).is_loopback
    ):
        return address
    return _own_address("192.0.2.1") or host  # a reserved address (RFC 5737); nothing is sent


def _own_address(host: str) -> str:
    """Return this machine's source address for packets to a host; "" if there is no route."""
    with contextlib.suppress(OSError):
        family, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]).partition("%")[0]
    return ""


def interface_of(address: str) -> str:
    """Return the name of this machine's network interface with an address, or ""."""
    interfaces = psutil.net_if_addrs().items()
    return next(
        (name for name, addresses in interfaces if address in (x.address for x in addresses)), ""
    )
