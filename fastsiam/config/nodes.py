"""Settings of several machines, which train and the evaluations share."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .setting import Config, require, setting

DEFAULT_PORT = 29500
"""Port of ``--rendezvous`` if it names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesConfig(Config):
    """Machines: where several of them meet."""

    nodes: int | str = setting(
        1,
        "Number of machines, or MIN:MAX to continue with fewer when some are lost and with more "
        "when some join. The same command runs on each.",
    )
    rendezvous: str = setting(
        "", "Several machines: HOST:PORT where they meet, one of them and a free port there."
    )
    rendezvous_timeout: float = setting(
        600.0, "Several machines: seconds to wait for the others at a start or restart.", above=0
    )

    def check(self) -> None:
        """Check number and address of the machines."""
        require(
            bool(re.fullmatch(r"\d+(:\d+)?", str(self.nodes)))
            and 1 <= self.min_nodes <= self.max_nodes,
            f"nodes must be a number of machines, or MIN:MAX, not {self.nodes!r}",
        )
        require(
            self.max_nodes == 1 or bool(self.rendezvous),
            f"nodes {self.nodes} needs rendezvous: HOST:PORT of one of the machines",
        )
        if self.rendezvous:
            _ = self.meeting

    @property
    def min_nodes(self) -> int:
        """The fewest machines that the ranks start on."""
        return int(str(self.nodes).partition(":")[0])

    @property
    def max_nodes(self) -> int:
        """The most machines that the ranks start on."""
        return int(str(self.nodes).rpartition(":")[2])

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
