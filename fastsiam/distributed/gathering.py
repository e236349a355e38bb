"""What the launchers of several machines agree on: who is there, who goes on, when it is over.

The machine of ``--rendezvous`` decides. Each launcher tells it once a second how it is, and is told
what to do. Here is what is decided, without sockets, clocks or processes; ``posts`` brings the
words, ``nodes`` does what is told.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fastsiam.errors import RANK_LOST

WRONG_USAGE = 2
"""Exit code of launchers that do not fit together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What a launcher says of itself."""

    id: str
    """Its own, and nobody else's."""
    host: str
    """Its machine's name, for people."""
    command: tuple[str, ...]
    """What it was started with, which is the same on every machine."""
    gpus: int
    """Ranks that it can start."""
    node_rank: int = -1
    """The number that it was given; -1 for none."""
    is_ready: bool = True
    """Whether it can start ranks now."""
    start: str = ""
    """Name of the start whose ranks it has, or had last; empty before the first."""
    code: int | None = None
    """Exit code of that start here, None as long as its ranks are at work."""
    lost: bool = False
    """Whether a rank was lost, so that starting again may help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a launcher is to do."""

    do: Literal["wait", "start", "stop", "leave"]
    lines: tuple[str, ...] = ()
    """For people; one that was said before is not said again."""
    start: str = ""
    """Name of the start that is meant."""
    rank: int = 0
    """Number of this machine."""
    nodes: int = 0
    """Machines of this start."""
    gpus: int = 0
    """Ranks of each of them."""
    port: int = 0
    """Where the ranks meet, on the machine of ``--rendezvous``."""
    more: tuple[str, ...] = ()
    """Arguments beside those that the launcher was started with."""
    code: int = 0
    """Exit code to leave with."""


@dataclass(slots=True)
class _Machine:
    word: Word
    since: float
    at: float


@dataclass(slots=True)
class _Start:
    name: str
    machines: tuple[str, ...]
    """Their ids, in the order of their ranks."""
    gpus: int
    port: int
    ended: dict[str, tuple[int, bool]] = field(default_factory=dict)
    """Exit code of each that ended, and whether a rank or the machine was lost."""
    stop: str = ""
    """Why the others are to stop; empty as long as they go on."""
    for_another: bool = False
    """Whether they stop because another machine came, which is no loss."""
    failed_at: float | None = None


class Gathering:
    """The machines of a run, as the one of ``--rendezvous`` sees them.

    Args:
        own: what the launcher of that machine says of itself.
        nodes: machines to wait for.
        restarts: how often to start again after a loss.
        timeout: seconds in which all have to be there.
        silence: seconds without a word after which a machine is lost.
        shares: raises ``ValueError`` for a number of ranks that cannot share the batch.
        more: arguments for all ranks beside those that the launchers were started with.
        port: returns a free one of that machine.
        now: the time, in seconds.
    """

    def __init__(
        self,
        own: Word,
        *,
        nodes: int,
        restarts: int,
        timeout: float,
        silence: float,
        shares: Callable[[int], None],
        more: Sequence[str],
        port: Callable[[], int],
        now: float,
    ) -> None:
        self._own, self._nodes, self._restarts = own, nodes, restarts
        self._timeout, self._silence = timeout, silence
        self._shares, self._more, self._port = shares, tuple(more), port
        self._machines: dict[str, _Machine] = {}
        self._start: _Start | None = None
        self._used, self._since, self._cause = 0, now, ""
        self._leave: Order | None = None
        self._told: set[str] = set()

    def hear(self, word: Word, now: float) -> Order:
        """Take in a launcher's word, and return what it is to do."""
        if refusal := self._refusal(word):
            return _leave(WRONG_USAGE, refusal)
        machine = self._machines.setdefault(word.id, _Machine(word, now, now))
        machine.word, machine.at = word, now
        start = self._start
        if start and word.id in start.machines and word.start == start.name:
            self._note_ending(start, word, now)
        self._look(now)
        start = self._start
        if start and start.stop and word.id in start.machines and word.start != start.name:
            start.ended.setdefault(word.id, (RANK_LOST, True))  # it need not begin
        order = self._order(word)
        if order.do == "leave":
            self._told.add(word.id)
        return order

    def is_over(self, now: float) -> bool:
        """Tell whether every machine that still speaks was told to leave."""
        speaking = {x for x, m in self._machines.items() if now - m.at <= self._silence}
        return self._leave is not None and speaking <= self._told

    @property
    def _is_left(self) -> bool:
        """Whether there are restarts left."""
        return self._used < self._restarts

    def _refusal(self, word: Word) -> str:
        """Say why a launcher is none of this run, empty if it is."""
        if word.command != self._own.command:
            return (
                f"the command on {word.host} is another one than on {self._own.host}, the machine "
                "of --rendezvous: the same runs on each, with the same version"
            )
        if (word.node_rank == 0) == (word.id != self._own.id) and word.node_rank >= 0:
            return (
                f"--node-rank {word.node_rank} on {word.host}: number 0 is {self._own.host}, the "
                "machine of --rendezvous"
            )
        for other in self._machines.values():
            if word.node_rank >= 0 and other.word.node_rank == word.node_rank:
                if other.word.id == word.id:
                    continue
                return f"--node-rank {word.node_rank} is {other.word.host}'s already"
        return ""

    def _note_ending(self, start: _Start, word: Word, now: float) -> None:
        if word.code is None or word.id in start.ended:
            return
        # Ranks that were stopped leave with a signal's code, on other machines too.
        stopped = bool(start.stop) and word.code > WRONG_USAGE
        start.ended[word.id] = word.code, word.lost or stopped
        if word.code and start.failed_at is None:
            start.failed_at = now

    def _look(self, now: float) -> None:
        """Decide what there is to decide."""
        for machine in [m for m in self._machines.values() if now - m.at > self._silence]:
            self._lose(machine)
        if self._leave is not None:
            return
        start = self._start
        if start is None:
            self._gather(now)
        elif len(start.ended) == len(start.machines):
            self._conclude(start, now)
        elif not start.stop:
            start.stop = self._reason_to_stop(start, now)

    def _lose(self, machine: _Machine) -> None:
        """Count a machine out that says nothing any more."""
        del self._machines[machine.word.id]
        start = self._start
        if start and machine.word.id in start.machines and machine.word.id not in start.ended:
            start.ended[machine.word.id] = RANK_LOST, True
            start.stop = start.stop or (
                f"{machine.word.host} is lost: nothing was heard of it for {self._silence:g} s"
                + "; the same command goes on from the last checkpoint" * (not self._is_left)
            )

    def _reason_to_stop(self, start: _Start, now: float) -> str:
        """Say why machines that are at work are to stop, empty if they are not."""
        late = start.failed_at is not None and now - start.failed_at > self._silence
        if late:  # the others' ranks notice by themselves, unless they hang
            return "ranks of another machine failed"
        came = [m for m in self._ready() if m.word.id not in start.machines]
        if came and self._would_be_more(start):
            start.for_another = True
            return f"{came[0].word.host} came: all save and start together"
        return ""

    def _would_be_more(self, start: _Start) -> bool:
        """Tell whether more ranks could be at work with the machines that are there by now."""
        there = [m for x, m in self._machines.items() if m.word.is_ready or x in start.machines]
        gpus = min(m.word.gpus for m in there)
        nodes, gpus = self._largest(min(len(there), self._nodes), gpus)
        return nodes * gpus > len(start.machines) * start.gpus

    def _conclude(self, start: _Start, now: float) -> None:
        """Decide what follows a start that ended on all its machines."""
        self._start = None
        self._since = now
        codes = list(start.ended.values())
        final = [code for code, lost in codes if code and not lost]
        if final or not any(code for code, _ in codes):
            self._leave = _leave(final[0] if final else 0)
        elif start.for_another:
            return
        elif not self._is_left:
            own = [code for code, _ in codes if code not in (0, RANK_LOST)]
            code = own[0] if own and not start.stop else RANK_LOST
            self._leave = _leave(code, start.stop)
        else:
            self._used += 1
            self._cause = start.stop

    def _gather(self, now: float) -> None:
        """Start if all are there, or if it is time to do without the others."""
        there, waited = self._ready()[: self._nodes], now - self._since
        gpus = min((m.word.gpus for m in there), default=0)
        all_share = self._used and waited > self._silence and self._can_share(len(there), gpus)
        if len(there) == self._nodes or all_share:  # others may join later
            self._begin(there, gpus)
        elif waited > self._timeout:
            if self._used and any(self._largest(len(there), gpus)):
                self._begin(there, gpus)
            else:
                self._give_up(there)

    def _give_up(self, there: Sequence[_Machine]) -> None:
        names = ", ".join(m.word.host for m in there)
        self._leave = _leave(
            RANK_LOST,
            f"{len(there)} of {self._nodes} machines came within {self._timeout:g} s ({names}): "
            "start the same command on the others, or wait longer (--rendezvous-timeout)",
        )

    def _begin(self, there: Sequence[_Machine], gpus: int) -> None:
        nodes, gpus = self._largest(len(there), gpus)
        if not gpus:
            self._leave = _leave(RANK_LOST, "no number of the GPUs that answer shares the batch")
            return
        machines = tuple(m.word.id for m in sorted(there[:nodes], key=self._place))
        self._start = _Start(uuid.uuid4().hex, machines, gpus, self._port())

    def _place(self, machine: _Machine) -> tuple[bool, int, str, float]:
        """Return what machines are sorted by: the one of ``--rendezvous`` is the first."""
        word = machine.word
        return word.id != self._own.id, word.node_rank, word.host, machine.since

    def _ready(self) -> list[_Machine]:
        """Return the machines that can start ranks, in the order in which they came."""
        ready = [m for m in self._machines.values() if m.word.is_ready]
        return sorted(ready, key=lambda m: (m.word.id != self._own.id, m.since))

    def _can_share(self, nodes: int, gpus: int) -> bool:
        try:
            self._shares(nodes * gpus)
        except ValueError:
            return False
        return nodes * gpus > 0

    def _largest(self, nodes: int, gpus: int) -> tuple[int, int]:
        """Return of how many machines how many ranks each can share the batch; the most, or none.

        Args:
            nodes: machines, at most.
            gpus: ranks of each, at most.
        """
        ways = [(n, g) for n in range(1, nodes + 1) for g in range(1, gpus + 1)]
        sharing = [way for way in ways if self._can_share(*way)]
        return max(sharing, key=lambda way: (way[0] * way[1], way[0]), default=(0, 0))

    def _order(self, word: Word) -> Order:
        start = self._start
        at_work = bool(word.start) and word.code is None
        if at_work and (start is None or word.start != start.name):
            why = f"error: the other machines gave {word.host} up as lost"
            return Order(do="stop", start=word.start, lines=(why,))
        if self._leave is not None and not at_work:
            return self._leave
        if start is None or word.id not in start.machines:
            return Order(do="wait")
        if word.start != start.name:
            return self._start_order(start, word)
        if start.stop and at_work:
            error = "" if start.for_another else "error: "
            return Order(do="stop", start=start.name, lines=(error + start.stop,))
        return Order(do="wait")

    def _start_order(self, start: _Start, word: Word) -> Order:
        lines = [f"error: {self._cause}"] if self._cause else []
        if self._used:
            lines.append(
                f"restart {self._used} of {self._restarts}, from the last checkpoint, on "
                f"{_some(start.gpus * len(start.machines), 'rank')} of "
                f"{_some(len(start.machines), 'machine')}"
            )
        return Order(
            do="start",
            lines=tuple(lines),
            start=start.name,
            rank=start.machines.index(word.id),
            nodes=len(start.machines),
            gpus=start.gpus,
            port=start.port,
            more=self._more,
        )


def _some(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _leave(code: int, why: str = "") -> Order:
    """Return the order to leave, and say why if there is something to say."""
    return Order(do="leave", code=code, lines=(f"error: {why}",) if why else ())
