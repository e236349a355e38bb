"""The folder of a run: locked by one process, removed if unused."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from fastsiam.console import Console
from fastsiam.errors import FastSiamError
from fastsiam.files import atomic_write, os_errors_as, require_local, why

_POLL = 0.1
"""Seconds between two attempts to take a lock."""
_FILE = "lock"

PATIENCE = 15.0
"""Seconds that a restarted run waits for the lock while processes of the previous start save."""


@contextlib.contextmanager
def create_folder(path: Path) -> Iterator[None]:
    """Create a run's folder and its parents; on exit, remove those that are new and empty.

    A run that fails before it writes anything leaves no folder behind.

    Raises:
        FastSiamError: the folder cannot be created.
    """
    require_local(path)
    with os_errors_as(FastSiamError, f"cannot create the run folder {path}"):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if missing and os.listdir(path) == [_FILE] and not _is_used(path):
                (path / _FILE).unlink()  # left by a killed rank
            for folder in missing:
                folder.rmdir()


def _is_used(run: Path) -> bool:
    """Return whether a process holds the lock of a run's folder; False if this is unknown."""
    try:
        with _lock(run).acquire(timeout=0):
            return False
    except OSError as error:
        return isinstance(error, Timeout)


def _lock(run: Path) -> FileLock:
    # filelock's fallback, a soft lock, would stay after its process is killed.
    return FileLock(run / _FILE, thread_local=False, fallback_to_soft=False)


def _holder(run: Path) -> str:
    """Return the description of the process that holds the lock, from the lock file."""
    with contextlib.suppress(OSError):
        if text := (run / _FILE).read_text(errors="replace").strip():
            return text
    return "another process"


class RunFolder:
    """A run's folder, which one process at a time can lock.

    A process that uses the folder holds a lock on ``RUN/lock``. The operating system releases the
    lock when the process ends, even if it is killed and its forked children survive. The text of
    the file names the process.

    Args:
        path: the folder, which must exist.
        console: prints warnings.
    """

    def __init__(self, path: Path, *, console: Console | None = None) -> None:
        self.path = path
        self.console = console or Console()

    @contextlib.contextmanager
    def lock(self, *, patience: float = 0.0) -> Iterator[None]:
        """Lock the folder inside a ``with`` block; wait for it at most ``patience`` seconds.

        Raises:
            FastSiamError: another process uses the folder, or it cannot be written.
        """
        path, inode = self.path / _FILE, 0
        with os_errors_as(FastSiamError, f"cannot write {path}"):
            path.touch()  # raises the folder's errors, before the lock's errors below
        lock = _lock(self.path)
        try:
            # At least two attempts: `_is_used` in another process holds the lock for an instant.
            lock.acquire(timeout=max(patience, 2 * _POLL), poll_interval=_POLL)
        except Timeout as error:
            raise FastSiamError(
                f"{self.path} is in use by {_holder(self.path)}; wait for it, or choose another "
                "--out"
            ) from error
        except OSError as error:
            self.console.warn(
                f"{self.path} cannot be locked ({why(error)}); make sure that no other run uses "
                "it as --out"
            )
        since = time.strftime("%Y-%m-%d %H:%M")
        with contextlib.suppress(OSError):  # on a full disk the lock works without its text
            path.write_text(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
            inode = path.stat().st_ino
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if path.stat().st_ino == inode:  # otherwise another process owns the file
                    path.unlink()  # before the release, so that waiting processes notice
            lock.release()

    def keep(self, name: str, content: bytes) -> None:
        """Write a small file to the folder, atomically.

        Raises:
            FastSiamError: the file cannot be written.
        """
        path = self.path / name
        with (
            os_errors_as(FastSiamError, f"cannot write {path}"),
            atomic_write(path, by_many=True) as temporary,
        ):
            temporary.write_bytes(content)
