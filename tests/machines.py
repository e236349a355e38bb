"""Two simulated machines: network namespaces with separate addresses, joined by a veth pair."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Machine:
    """A network namespace with one end of the veth pair."""

    name: str
    address: str

    @property
    def inside(self) -> list[str]:
        """The prefix of a command line that runs it in this namespace."""
        return ["ip", "netns", "exec", self.name]

    def plug(self, state: str) -> None:
        """Disconnect ("down") or connect ("up") the network cable."""
        _ip("-n", self.name, "link", "set", _cable(self.name), state)


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Create two machines; skip the test if that is not permitted. Needs root on Linux."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip: apt-get install iproute2")
    one, other = (Machine(f"fs{os.getpid()}{x}", f"10.177.0.{x}") for x in (1, 2))
    with ExitStack() as stack:
        for machine in (one, other):
            _ip("netns", "add", machine.name, skips=True)
            stack.callback(_ip, "netns", "del", machine.name)
        ends = [word for x in (one, other) for word in ("name", _cable(x.name), "netns", x.name)]
        _ip("link", "add", *ends[:4], "type", "veth", "peer", *ends[4:], skips=True)
        for machine in (one, other):
            _ip("-n", machine.name, "link", "set", "lo", "up")
            device = ("dev", _cable(machine.name))
            _ip("-n", machine.name, "addr", "add", f"{machine.address}/24", *device)
            machine.plug("up")
        yield one, other


def _cable(machine: str) -> str:
    return f"{machine}c"


def _ip(*arguments: str, skips: bool = False) -> None:
    result = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if result.returncode and skips:
        pytest.skip(f"cannot create network namespaces: {result.stderr.strip()}")
    result.check_returncode()
