"""A process's way to object storage: requests go to the process of ``server``, bytes come back.

Each process that reads starts one of its own, at its first request; a forked process forgets its
parent's.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from multiprocessing import Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from fastsiam.errors import DataError, FastSiamError, FileLostError, WorkerError
from fastsiam.urls import Url

from .server import PARALLEL, PATIENCE_SECONDS

MOST_AHEAD = 2**29
"""Bytes that a process has asked for ahead, at most: beyond it, the oldest are let go of."""

Range = tuple[int, int]
"""Where bytes begin and end."""


class Facts(NamedTuple):
    """What a server says of an object; if it changes, so does one of these."""

    size: int
    """In bytes."""
    modified: int
    """When it was written, in seconds since 1970."""
    etag: str
    """The server's mark of its content, "" if it gives none."""


class Block(NamedTuple):
    """Bytes that were asked for ahead."""

    start: int
    future: Future[bytes]


def head(url: Url) -> Facts | None:
    """Return the facts of an object, None if there is none.

    Raises:
        DataError: the server refuses, or cannot be reached.
    """
    found = _process().ask("head", url).result()
    return None if found is None else Facts(*found)


def heads(urls: Sequence[Url]) -> list[Facts | None]:
    """Return the facts of several objects, as ``head`` does, asked for at once."""
    asked = [_process().ask("head", url) for url in urls]
    return [None if (found := one.result()) is None else Facts(*found) for one in asked]


def level(url: Url) -> tuple[dict[str, Facts], list[str]]:
    """Return what lies directly below a prefix: objects by their names, and names of prefixes.

    Raises:
        DataError: the server refuses, or cannot be reached.
    """
    files, folders = _process().ask("level", url).result()
    return {name: Facts(*facts) for name, facts in files.items()}, folders


def fetch(url: Url, facts: Facts, ranges: Sequence[Range]) -> list[bytes]:
    """Fetch ranges of an object, all at once.

    Raises:
        DataError: the server refuses, or cannot be reached.
        FileLostError: the object has not the facts any more.
    """
    process = _process()
    asked = [process.ask("get", url, tuple(facts), *own) for own in ranges]
    return [one.result() for one in asked]


def in_background(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Begin work that waits for answers, in one of this process's threads."""
    return _process().pool.submit(work, *arguments)


def keep_ahead(url: Url, blocks: Sequence[tuple[Block, Sequence[Range]]]) -> None:
    """Keep blocks that are under way, for the ranges that lie in each; let go of the oldest."""
    _process().ahead.add(url, blocks)


def not_ahead(url: Url, ranges: Sequence[Range]) -> list[Range]:
    """Return those ranges of an object that were not asked for ahead."""
    return _process().ahead.lacking(url, ranges)


def taken(url: Url, own: Range) -> Block | None:
    """Take the block that holds a range of an object, if that was asked for ahead."""
    return _process().ahead.take(url, own)


class _Ahead:
    """Ranges that were asked for ahead, until they are taken."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[Url, Range], Block] = OrderedDict()
        self._lock, self._bytes = threading.Lock(), 0

    def add(self, url: Url, blocks: Sequence[tuple[Block, Sequence[Range]]]) -> None:
        with self._lock:
            for block, ranges in blocks:
                for own in ranges:
                    self._drop((url, own))
                    self._blocks[url, own] = block
                    self._bytes += own[1] - own[0]
            while self._bytes > MOST_AHEAD and len(self._blocks) > 1:
                if (oldest := self._drop(next(iter(self._blocks)))) is not None:
                    oldest.future.cancel()

    def lacking(self, url: Url, ranges: Sequence[Range]) -> list[Range]:
        with self._lock:
            return [own for own in ranges if (url, own) not in self._blocks]

    def take(self, url: Url, own: Range) -> Block | None:
        with self._lock:
            return self._drop((url, own))

    def _drop(self, key: tuple[Url, Range]) -> Block | None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self._bytes -= key[1][1] - key[1][0]
        return block


class _Threads:
    """Threads that wait for answers; a program that ends does not wait for them."""

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]]
        self._work, self._count = SimpleQueue(), 0

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Begin work in a thread that is free, or as soon as one is."""
        future: Future[Any] = Future()
        self._work.put((future, work, arguments))
        if self._count < PARALLEL:
            self._count += 1
            threading.Thread(target=self._run, name="fastsiam-cloud", daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            future, work, arguments = self._work.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(*arguments))
                except BaseException as error:
                    future.set_exception(error)
            del future  # or its bytes stay until there is work again


class _Process:
    """The process that makes requests for this one."""

    def __init__(self) -> None:
        if find_spec("obstore") is None:
            raise DataError(
                "reading from object storage takes obstore: pip install 'fastsiam[cloud]'"
            )
        self.ahead, self.pool = _Ahead(), _Threads()
        self._pipe, theirs = Pipe()
        server = Path(__file__).with_name("server.py")
        number = theirs.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(server), str(number)],
            stdin=subprocess.DEVNULL,
            pass_fds=[number],
        )
        theirs.close()
        self._sending, self._numbers = threading.Lock(), itertools.count()
        self._asked: dict[int, tuple[Url, Future[Any]]] = {}
        threading.Thread(target=self._receive, name="fastsiam-cloud", daemon=True).start()

    def ask(self, name: str, url: Url, *arguments: Any) -> Future[Any]:
        """Send a request; its result comes into what is returned."""
        future: Future[Any] = Future()
        with self._sending:
            number = next(self._numbers)
            self._asked[number] = url, future
            try:
                self._pipe.send((number, name, ((url.scheme, url.host, url.key), *arguments)))
            except OSError:
                self._asked.pop(number)
                raise _gone() from None
        return future

    def end(self) -> None:
        """Have the process end, and wait for it."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.wait()

    def forget(self) -> None:
        """Let go of the pipe, in a process that was forked: the parent's would never end."""
        with contextlib.suppress(OSError):
            self._pipe.close()
        self._process.returncode = 0  # it is the parent's, who waits for it

    def _receive(self) -> None:
        """Pass the answers on, until there are no more."""
        try:
            while True:
                number, kind, value = self._pipe.recv()
                data = self._pipe.recv_bytes() if kind == "bytes" else value
                url, future = self._asked.pop(number)
                if kind in ("bytes", "value"):
                    future.set_result(data)
                else:
                    future.set_exception(_refusal(url, kind, value))
        except (EOFError, OSError):
            self._process.poll()
            with self._sending:
                left = list(self._asked.values())
                self._asked.clear()
            for _, future in left:
                future.set_exception(_gone())


_own: _Process | None = None
_starting = threading.Lock()


def _process() -> _Process:
    """Return this process's, started at the first call."""
    global _own
    with _starting:
        if _own is None:
            _own = _Process()
        return _own


def restart() -> None:
    """End the process that makes requests: the next has what the environment says by then."""
    global _own
    with _starting:
        if _own is not None:
            _own.end()
        _own = None


def _forget() -> None:
    global _own, _starting
    if _own is not None:
        _own.forget()
    _own, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def _gone() -> WorkerError:
    return WorkerError(
        "the process that reads from object storage was killed, perhaps for want of memory; the "
        "same command goes on"
    )


def _refusal(url: Url, kind: str, reason: str) -> FastSiamError:
    """Say what became of a request, and what to do."""
    match kind:
        case "absent":
            return DataError(
                f"{url} is not there: check the address, and whether it has that bucket"
            )
        case "missing":
            return FileLostError(
                f"{url} is not there any more; restore it, and the same command goes on"
            )
        case "changed":
            return FileLostError(
                f"{url} was overwritten while it was read; begin the command again, which looks at "
                "what is there now"
            )
        case "refused":
            return DataError(
                f"{url} may not be read{f' ({reason})' if reason else ''}: check the address, the "
                f"rights there, and {_CREDENTIALS[url.scheme]}"
            )
        case "no-ranges":
            return DataError(
                f"the server of {url} sends whole files alone, and reading in place takes parts of "
                "one: copy it to a disk and name that"
            )
    return DataError(
        f"{url} cannot be read ({reason}), though it was tried for a while: check the network and "
        f"the address; the same command goes on (${PATIENCE_SECONDS} says for how many seconds)"
    )


_CREDENTIALS = {
    "s3": "the credentials in AWS_ACCESS_KEY_ID or AWS_PROFILE (AWS_SKIP_SIGNATURE=true for none)",
    "gs": "the credentials in GOOGLE_APPLICATION_CREDENTIALS",
    "az": "the credentials in AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "https": "whether all may read it: web servers are asked without credentials",
    "http": "whether all may read it: web servers are asked without credentials",
}
