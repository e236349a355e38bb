"""Where the launchers of several machines meet: torch's c10d rendezvous, opened robustly."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import sys
import time
from typing import Any

from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

import fastsiam
from fastsiam.config.nodes import NodesConfig

_COMMAND = "fastsiam/command"
_GLOO = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
"""netdevice(7): the IPv4 address of an interface."""


class WrongCommandError(Exception):
    """The launchers of two machines were started with different commands."""


def open_rendezvous(config: NodesConfig) -> tuple[Store, RendezvousHandler, str]:
    """Open the rendezvous of all launchers of a run, and wait until its machine is there.

    One launcher serves the store: that of the machine that ``--rendezvous`` names, or the only one.

    Returns:
        The store, the handler that an elastic agent needs, and the address of this machine as the
        others reach it.

    Raises:
        RendezvousConnectionError: nothing listened there within ``--rendezvous-timeout``.
        WrongCommandError: the other launchers were started with another command.
    """
    several = config.max_nodes > 1
    host, port = config.meeting if several else ("localhost", 0)
    address = address_towards(host) if several else "localhost"
    while True:
        serves = not several or _is_to_serve(host, port, timeout=config.rendezvous_timeout)
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=f"{host}:{port}",
            run_id="fastsiam",
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=address,
            is_host=serves,
            join_timeout=max(1, round(config.rendezvous_timeout)),
        )
        try:
            backend, store = create_backend(parameters)
            break
        except RendezvousConnectionError:
            if not serves:
                raise
            # Another launcher of this machine serves the store since the check.
    if several:
        _check_command(store)
        # Otherwise gloo takes the address of the host's name, which may be 127.0.1.1.
        if name := interface_of(address):
            os.environ.setdefault(_GLOO, name)
    return store, create_handler(store, backend, parameters), address


def _is_to_serve(host: str, port: int, *, timeout: float) -> bool:
    """Tell whether to serve the store here; if not, wait until another launcher does.

    Raises:
        RendezvousConnectionError: nobody did within ``timeout`` seconds.
    """
    until = time.monotonic() + timeout
    while True:
        if _can_listen(host, port):
            return True
        try:
            socket.create_connection((host, port), timeout=5).close()
            return False
        except OSError as error:
            if time.monotonic() > until:
                raise RendezvousConnectionError(str(error)) from error
        time.sleep(0.5)


def _can_listen(host: str, port: int) -> bool:
    """Tell whether an address is this machine's, and its port free."""
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.create_server(address, family=family):
                return True
    return False


def _check_command(store: Store) -> None:
    """Refuse to join launchers that were started with another command or version."""
    own = " ".join((fastsiam.__version__, *sys.argv[1:]))
    first = store.compare_set(_COMMAND, "", own).decode()
    if first != own:
        raise WrongCommandError(
            f"the machines were started with different commands or versions of fastsiam: {own!r} "
            f"here, {first!r} elsewhere; start the same command on each"
        )


def address_towards(host: str) -> str:
    """Return the address from which this machine reaches a host, by which others reach it.

    Debian gives a machine's own name the address 127.0.1.1. Then it is that of the default route.
    """
    found = _own_address(host)
    if found and (host == "localhost" or host == found or not _is_loopback(found)):
        return found
    return _own_address("192.0.2.1") or host  # RFC 5737: an address of nobody; nothing is sent


def _own_address(host: str) -> str:
    """Return this machine's address for packets to a host; "" if there is no way to it."""
    with contextlib.suppress(OSError):
        family, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return ""


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str:
    """Return the name of this machine's interface with an IPv4 address; "" if none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                asked: Any = fcntl.ioctl(
                    any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode())
                )
                if socket.inet_ntoa(asked[20:24]) == address:
                    return name
    return ""
