"""Words between the launchers of several machines: one line there, one back, on a new connection.

So there is nothing to connect again after a cable was out for a while, and nothing waits for ever.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fastsiam.config.plain import from_plain, to_plain

from .gathering import Order, Word

_PATIENCE = 5.0
"""Seconds that a connection may take."""
_LONGEST = 2**20
"""Bytes of a line; a command line's arguments are in it."""
_NO_WORD = ValueError, TypeError, RecursionError
"""What is raised for lines that are none of a launcher's."""
_SIOCGIFADDR = 0x8915
"""netdevice(7): the IPv4 address of an interface."""


class WrongPeerError(OSError):
    """What answers is no launcher of ours."""


def is_here(host: str) -> bool:
    """Tell whether a name or address is of this machine: a socket can be bound to it."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
    return False


def free_port() -> int:
    """Return a port of this machine on which nobody listens."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def ask(address: tuple[str, int], word: Word) -> tuple[Order, str]:
    """Say a word to the machine of ``--rendezvous``; return its order, and this machine's address.

    Raises:
        OSError: it cannot be reached, or says nothing in time.
        WrongPeerError: something else answers there.
    """
    with socket.create_connection(address, timeout=_PATIENCE) as line:
        line.sendall(_line(word))
        with line.makefile("rb") as answer:
            text = answer.readline(_LONGEST)
        if not text:
            raise ConnectionResetError("nothing was answered")
        try:
            order = from_plain(Order, json.loads(text))
        except _NO_WORD as error:
            raise WrongPeerError("what answers there is no fastsiam") from error
        return order, str(line.getsockname()[0])


@contextlib.contextmanager
def answering(port: int, answer: Callable[[Word, str], Order]) -> Iterator[None]:
    """Answer launchers on a port of all this machine's addresses, in threads.

    Args:
        port: which.
        answer: is given a word, with the address that it came from beside the machine's name, and
            the address of this machine to which it came.

    Raises:
        OSError: the port is taken.
    """
    with _listening(port) as server:
        server.settimeout(None)

        def one(line: socket.socket) -> None:
            with line, contextlib.suppress(OSError, *_NO_WORD):
                line.settimeout(_PATIENCE)
                with line.makefile("rb") as words:
                    word = from_plain(Word, json.loads(words.readline(_LONGEST)))
                ends = line.getsockname(), line.getpeername()
                here, there = (str(end[0]).removeprefix("::ffff:") for end in ends)
                order = answer(replace(word, host=f"{word.host} ({there})"), here)
                line.sendall(_line(order))

        def listen() -> None:
            with contextlib.suppress(OSError):  # it is closed at the end
                while True:
                    line, _ = server.accept()
                    threading.Thread(target=one, args=(line,), daemon=True).start()

        threading.Thread(target=listen, name="fastsiam-rendezvous", daemon=True).start()
        yield
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # or the thread would wait on


def _line(said: Word | Order) -> bytes:
    return json.dumps(to_plain(said)).encode() + b"\n"


def _listening(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def interface_of(address: str) -> str:
    """Return the name of this machine's interface with an IPv4 address; empty if none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                asked: Any = fcntl.ioctl(
                    any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode())
                )
                if socket.inet_ntoa(asked[20:24]) == address:
                    return name
    return ""
