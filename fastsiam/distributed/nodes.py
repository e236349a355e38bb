"""A launcher of several: it says how it is, and does as the machine of ``--rendezvous`` orders."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed import DistError

import fastsiam
from fastsiam.config.nodes import NodesConfig
from fastsiam.errors import RANK_LOST, SIGNALLED, DeviceError
from fastsiam.signals import handled

from .gathering import Gathering, Order, Word
from .launch import STOPS, Attempt, Ending, attempt, launch, launching
from .posts import WrongPeerError, answering, ask, free_port, interface_of, is_here

_BEAT = 1.0
"""Seconds between two words, at most."""
_GLOO = "GLOO_SOCKET_IFNAME"
_GLOO_WAITS = 60
"""Seconds that torch's launchers wait for each other, who all have been told to begin."""
_LONGEST_BEAT = 0.25
"""Share of the shorter timeout that lies between two words at most."""

Ask = Callable[[Word], Order]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the launcher of each machine starts."""

    arguments: Sequence[str]
    """Of the command line."""
    gpus: int
    """Ranks of each machine."""
    shares: Callable[[int], None] = lambda ranks: None
    """Raises ``ValueError`` for a number of ranks that cannot share the batch."""
    restarts: int = 0
    """How often to start again after a loss."""
    more: Callable[[], Sequence[str]] = tuple
    """Returns arguments for all ranks; is called on the machine of ``--rendezvous`` alone."""
    again: Callable[[int], tuple[int, Sequence[str]]] | None = None
    """Is asked before a restart how many ranks there can be here; 0 if none can. May wait."""


def launch_ranks(work: Work, config: NodesConfig) -> int:
    """Run ``fastsiam ARGUMENTS`` in ranks of as many machines as there are to be.

    With several, this is called on each of them.

    Returns:
        Exit code: 0, that of the first failed rank, 128 + the signal that ended it or a launcher,
        or 75 if a machine is lost or does not come.

    Raises:
        DeviceError: this is the machine of ``--rendezvous``, and its port is taken.
    """
    if config.nodes == 1:
        arguments = [*work.arguments, *work.more()]
        return launch(work.gpus, arguments, restarts=work.restarts, again=work.again)
    from torch.distributed.elastic.multiprocessing.api import SignalException

    own = Word(
        id=uuid.uuid4().hex,
        host=socket.gethostname(),
        command=(fastsiam.__version__, *_without_rank(sys.argv[1:])),
        gpus=work.gpus,
        node_rank=config.node_rank,
    )
    try:
        with launching(), _raised_signals(), _rendezvous(own, work, config) as say:
            return _Launcher(own, work, config, say).run()
    except SignalException as stop:
        return SIGNALLED + int(stop.sigval)


@contextlib.contextmanager
def _raised_signals() -> Iterator[None]:
    """Raise torch's exception for signals while no ranks are at work, as its launcher does else."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    def raise_it(number: int, frame: object) -> None:
        raise SignalException(signal.Signals(number).name, signal.Signals(number))

    with handled(STOPS, raise_it):
        yield


@contextlib.contextmanager
def _rendezvous(own: Word, work: Work, config: NodesConfig) -> Iterator[Ask]:
    """Yield how this launcher speaks to the rendezvous, which is here if the machine is this one.

    Of several launchers of one machine the first has it. The others that are there are told to
    leave before it ends.
    """
    host, port = config.meeting
    lock, now = threading.Lock(), time.monotonic
    gathering: Gathering | None = None

    def hear(word: Word, address: str = "") -> Order:
        if address:
            _gloo_by(address)
        with lock:
            assert gathering is not None
            return gathering.hear(word, now())

    def say(word: Word) -> Order:
        order, address = ask((host, port), word)
        _gloo_by(address)
        return order

    with contextlib.ExitStack() as stack:
        if config.node_rank <= 0 and is_here(host):
            lock.acquire()
            try:
                stack.enter_context(answering(port, hear))
            except OSError as error:
                lock.release()
                if config.node_rank == 0:
                    raise DeviceError(
                        f"--rendezvous: port {port} is taken here ({error})"
                    ) from error
            else:
                gathering = Gathering(
                    own,
                    nodes=config.nodes,
                    restarts=work.restarts,
                    timeout=config.rendezvous_timeout,
                    silence=config.node_timeout,
                    shares=work.shares,
                    more=work.more(),
                    port=free_port,
                    now=now(),
                )
                lock.release()
        yield hear if gathering else say
        until = now() + config.node_timeout
        while gathering and not gathering.is_over(now()) and now() < until:
            time.sleep(_BEAT / 4)


class _Launcher:
    """What one launcher does from its start to its end."""

    def __init__(self, own: Word, work: Work, config: NodesConfig, say: Ask) -> None:
        self._work, self._config = work, config
        self._said = _Saying(own, say, config)

    def run(self) -> int:
        """Start ranks as often as it is ordered; return the exit code."""
        with self._said as said:
            ending: Ending | None = None
            more: tuple[str, ...] = ()
            while True:
                order = self._next_order(ending)
                said.tell(*order.lines)
                if order.do == "leave":
                    return order.code
                said.is_now(start=order.start, is_ready=False, code=None, lost=False)
                ending = self._start(order, more)
                said.is_now(code=ending.code, lost=ending.lost)
                if ending.lost and self._work.restarts and self._work.again:
                    gpus, more_now = self._work.again(self._work.gpus)
                    more = tuple(more_now)
                    if not gpus:
                        return ending.code
                    said.is_now(gpus=gpus)
                said.is_now(is_ready=True)

    def _next_order(self, ending: Ending | None) -> Order:
        """Wait until there is something to do; if nobody says so any more, it is to leave."""
        may_go_on = ending is None or (ending.lost and bool(self._work.restarts))
        config = self._config
        patience = config.rendezvous_timeout if may_go_on else config.node_timeout
        since = time.monotonic()
        while True:
            order = self._said.order()
            if order.do in ("start", "leave"):
                return order
            silent = time.monotonic() - max(since, self._said.heard_at)
            if self._said.trouble and silent > patience:
                code = ending.code if ending else RANK_LOST
                return Order(do="leave", code=code or RANK_LOST, lines=(self._nobody(silent),))

    def _nobody(self, silent: float) -> str:
        return (
            f"error: --rendezvous {self._config.rendezvous} did not answer for {silent:.0f} s"
            f" ({self._said.trouble}): is the same command running on that machine, and its port "
            "open to this one?"
        )

    def _start(self, order: Order, more: Sequence[str]) -> Ending:
        """Run the ranks of a start, until they end or are to stop."""
        from torch.distributed.elastic.multiprocessing.api import SignalException

        host, _ = self._config.meeting
        counts = ("--gpus", str(order.gpus), "--nodes", str(order.nodes), "--node-rank", "-1")
        how = Attempt(
            processes=order.gpus,
            arguments=[*self._work.arguments, *order.more, *more, *counts],
            nodes=order.nodes,
            backend="static",
            endpoint=f"{f'[{host}]' if ':' in host else host}:{order.port}",
            name=order.start,
            settings={"rank": order.rank, "timeout": _GLOO_WAITS},
        )
        self._said.begin_watch()
        try:
            ending = _met(how)
            stopped = self._said.end_watch()
        except SignalException as stop:
            ending, stopped = Ending(SIGNALLED + int(stop.sigval)), self._said.end_watch()
        if stopped:
            with contextlib.suppress(SignalException):  # which may be on its way
                time.sleep(_BEAT / 4)
        return Ending(RANK_LOST, lost=True) if stopped and ending.code else ending


def _met(how: Attempt) -> Ending:
    """Start ranks once; machines of which one did not come to the others lost it."""
    try:
        return attempt(how)
    except DistError as error:
        print(f"error: the machines did not meet: {error}", file=sys.stderr)
        return Ending(RANK_LOST, lost=True)


class _Saying(threading.Thread):
    """Says again and again how this launcher is, and keeps the last order.

    While ranks are at work, an order to stop them, or silence, is a SIGTERM to this process, which
    torch's launcher passes on: they save if they can.
    """

    def __init__(self, own: Word, say: Ask, config: NodesConfig) -> None:
        super().__init__(name="fastsiam-node", daemon=True)
        self._word, self._say, self._config = own, say, config
        self._beat = min(_BEAT, _LONGEST_BEAT * min(config.node_timeout, config.rendezvous_timeout))
        self._changed, self._order = threading.Condition(), Order(do="wait")
        self._version, self._answered = 0, -1
        self._over = threading.Event()
        self._watches, self._stopped = False, False
        self._told: set[str] = set()
        self.heard_at = time.monotonic()
        """When the rendezvous answered last."""
        self.trouble = ""
        """What went wrong since."""

    def __enter__(self) -> _Saying:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    def is_now(self, **changes: Any) -> None:
        """Note how this launcher is now; an order that was given before counts no more."""
        with self._changed:
            self._word = replace(self._word, **changes)
            self._version += 1
            self._changed.notify_all()

    def order(self) -> Order:
        """Return what there is to do, after a moment's wait at most."""

        def is_there() -> bool:
            return self._answered == self._version and self._order.do != "wait"

        with self._changed:
            self._changed.wait_for(is_there, self._beat)
            return self._order if self._answered == self._version else Order(do="wait")

    def tell(self, *lines: str) -> None:
        """Print lines for people; each once."""
        for line in lines:
            if line not in self._told:
                print(line, file=sys.stderr, flush=True)
            self._told.add(line)

    def begin_watch(self) -> None:
        """Ranks are at work from now on."""
        with self._changed:
            self._watches, self._stopped = True, False

    def end_watch(self) -> bool:
        """They are no more; tell whether they were stopped."""
        with self._changed:
            self._watches = False
            return self._stopped

    def run(self) -> None:
        """Say it until it is over."""
        while not self._over.is_set():
            with self._changed:
                word, version = self._word, self._version
            try:
                order = self._say(word)
            except OSError as error:
                self._note_silence(error)
            else:
                self._note(order, version)
            with self._changed:
                self._changed.wait_for(lambda seen=version: self._version != seen, self._beat)  # type: ignore[misc]

    def _note(self, order: Order, version: int) -> None:
        with self._changed:
            self._order, self._answered = order, version
            self.heard_at, self.trouble = time.monotonic(), ""
            self._changed.notify_all()
            if order.do in ("stop", "leave") and version == self._version:
                self._stop(*order.lines)

    def _note_silence(self, error: OSError) -> None:
        with self._changed:
            self.trouble = str(error)
            silent = time.monotonic() - self.heard_at
            if silent > self._config.node_timeout or isinstance(error, WrongPeerError):
                where = self._config.rendezvous
                self._stop(
                    f"error: --rendezvous {where} did not answer for {silent:.0f} s ({error})"
                )

    def _stop(self, *lines: str) -> None:
        """End the ranks of this machine, once."""
        if self._watches and not self._stopped:
            self._stopped = True
            self.tell(*lines)
            os.kill(os.getpid(), signal.SIGTERM)


def _gloo_by(address: str) -> None:
    """Have gloo's ranks meet on the interface by which the launchers do, unless told otherwise.

    By itself gloo takes the address of the machine's name, which on many is one of its own alone.
    """
    if _GLOO not in os.environ and (name := interface_of(address)):
        os.environ[_GLOO] = name


def _without_rank(arguments: Sequence[str]) -> list[str]:
    """Return a command line without ``--node-rank``, which is each machine's own."""
    rest, left = [], iter(arguments)
    for word in left:
        if word == "--node-rank":
            next(left, None)
        elif not word.startswith("--node-rank="):
            rest.append(word)
    return rest
