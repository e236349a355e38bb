"""Settings of several machines, which train and the evaluations have alike."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import require, require_at_least_one, require_positive

DEFAULT_PORT = 29500
"""Port of ``--rendezvous`` if it names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesConfig:
    """Machines: where several of them meet."""

    nodes: int = 1
    """Machines; the same command runs on each, and --gpus counts those of one machine."""
    rendezvous: str = ""
    (
        "Several machines: HOST:PORT where they meet, the name or address of one of them and a "
        "port that is free there. The command on that machine has rank 0."
    )
    node_rank: int = -1
    (
        "Several machines: number of this one, 0 on the machine of --rendezvous; -1 lets them "
        "number themselves."
    )
    rendezvous_timeout: float = 600.0
    """Several machines: seconds in which all have to be there, at the start and at a restart."""
    node_timeout: float = 30.0
    """Several machines: seconds without a word from one after which it is lost."""

    def check_nodes(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            ValueError: says what.
        """
        require_at_least_one(self, "nodes")
        require_positive(self, "rendezvous_timeout", "node_timeout")
        require(
            self.nodes == 1 or bool(self.rendezvous),
            f"nodes {self.nodes} needs rendezvous: HOST:PORT of one of the machines",
        )
        require(
            -1 <= self.node_rank < self.nodes,
            f"node-rank must lie between 0 and nodes - 1 ({self.nodes - 1}), not {self.node_rank}",
        )
        if self.rendezvous:
            _ = self.meeting

    @property
    def meeting(self) -> tuple[str, int]:
        """Host and port of ``--rendezvous``.

        Raises:
            ValueError: it is not HOST or HOST:PORT.
        """
        text = self.rendezvous
        host, colon, port = text.rpartition(":") if text.count(":") != 1 else text.partition(":")
        if not colon or text.endswith("]"):  # an IPv6 address in brackets, without a port
            host, port = text, str(DEFAULT_PORT)
        good = host and port.isdigit() and 0 < int(port) < 2**16
        require(bool(good), f"rendezvous is HOST:PORT, such as node1:29500, not {text!r}")
        return host.strip("[]"), int(port)
