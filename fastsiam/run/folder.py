"""The folder of a run: locked by one process, recreated if it is deleted, removed if unused."""

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
from fastsiam.files import explained, why, written_whole

_POLL = 0.1
"""Seconds between two attempts to take a lock."""
_FILE = "lock"

PATIENCE = 15.0
"""Seconds that a restarted run waits for the folder: processes of the previous start still save."""


@contextlib.contextmanager
def created(path: Path) -> Iterator[None]:
    """Create a run's folder and its parents; at the end remove those that are new and empty.

    A run that is refused before it writes anything leaves no folder behind.

    Raises:
        FastSiamError: the folder cannot be created.
    """
    with explained(FastSiamError, f"cannot make the run folder {path}"):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if missing and os.listdir(path) == [_FILE] and not user_of(path):
                (path / _FILE).unlink()  # of a rank that was killed
            for folder in missing:
                folder.rmdir()


def wait_until_free(run: Path, *, patience: float = PATIENCE) -> str:
    """Wait until no process has a run's folder; return who still has it after so many seconds.

    Returns:
        Empty if the folder is free.
    """
    until = time.monotonic() + patience
    while (who := user_of(run)) and time.monotonic() < until:
        time.sleep(_POLL)
    return who


def user_of(run: Path) -> str:
    """Return which process has a run's folder; empty if the folder is free or this is unknown."""
    if not (run / _FILE).exists():
        return ""
    try:
        with _lock(run).acquire(timeout=0):
            return ""
    except Timeout:
        return _holder(run)
    except OSError:
        return ""


def _lock(run: Path) -> FileLock:
    # A soft lock, which filelock would fall back to, outlives a process that is killed.
    return FileLock(run / _FILE, thread_local=False, fallback_to_soft=False)


def _holder(run: Path) -> str:
    """Return what the process that holds the lock wrote about itself."""
    with contextlib.suppress(OSError):
        if text := (run / _FILE).read_text(errors="replace").strip():
            return text
    return "another process"


class RunFolder:
    """A run's folder.

    While a process has the folder, it holds the operating system's lock of ``RUN/lock``, which ends
    with the process, even if the process is killed and its forked children live on. The file's
    text says for people which process that is.

    Args:
        path: the folder, which exists.
        console: for warnings.
    """

    def __init__(self, path: Path, *, console: Console | None = None) -> None:
        self.path = path
        self.console = console or Console()
        self._lock: FileLock | None = None
        self._lock_file: os.stat_result | None = None
        """The file that was locked; another may have its name by now."""
        self._is_taken = False
        self._kept: dict[str, bytes] = {}

    @contextlib.contextmanager
    def taken(self, *, patience: float = 0.0) -> Iterator[None]:
        """Have the folder exclusively while inside.

        Args:
            patience: seconds to wait for another process to leave it.

        Raises:
            FastSiamError: another process has the folder, or it cannot be written.
        """
        self._take(patience)
        self._is_taken = True
        try:
            yield
        finally:
            self._is_taken = False
            self._leave()

    def keep(self, name: str, content: bytes) -> None:
        """Write a small file, and again should somebody delete the folder.

        Args:
            name: path of the file within the folder.
            content: what it holds.

        Raises:
            FastSiamError: the file cannot be written.
        """
        self._kept[name] = content
        path = self.path / name
        with (
            explained(FastSiamError, f"cannot write {path}"),
            written_whole(path, by_many=True) as temporary,
        ):
            temporary.write_bytes(content)

    def restore(self) -> None:
        """Recreate the folder if it was deleted, lock it, and write the kept files again.

        Raises:
            FastSiamError: the folder cannot be created, or another process recreated and has it.
        """
        if self.path.is_dir() and (self._has_lock() or not self._is_taken):
            return
        if not self.path.is_dir():
            self.console.warn(
                f"{self.path} was deleted: it is made again; what else was in it is lost"
            )
            with explained(FastSiamError, f"cannot make the run folder {self.path}"):
                self.path.mkdir(parents=True, exist_ok=True)
        if self._is_taken:
            self._leave()
            self._take()
        for name, content in dict(self._kept).items():
            if not (self.path / name).exists():
                self.keep(name, content)

    def _take(self, patience: float = 0.0) -> None:
        path = self.path / _FILE
        with explained(FastSiamError, f"cannot write {path}"):
            path.touch()  # errors of the folder, as opposed to those of the lock below
        lock = _lock(self.path)
        try:
            # Twice at least: a process that only looks has the lock for an instant.
            lock.acquire(timeout=max(patience, 2 * _POLL), poll_interval=_POLL)
        except Timeout as error:
            raise FastSiamError(
                f"{self.path} is in use by {_holder(self.path)}; wait for it, or choose another "
                "--out"
            ) from error
        except OSError as error:
            self.console.warn(
                f"{self.path} cannot be locked ({why(error)}): take care that no other run "
                "has it as its --out"
            )
        self._lock = lock
        since = time.strftime("%Y-%m-%d %H:%M")
        with contextlib.suppress(OSError):  # on a full disk the lock holds without its text
            path.write_text(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
        with contextlib.suppress(OSError):
            self._lock_file = path.stat()

    def _leave(self) -> None:
        if self._lock is None:
            return
        if self._has_lock():
            with contextlib.suppress(OSError):
                (self.path / _FILE).unlink()  # while locked: a process that waits notices it
        self._lock.release()
        self._lock = self._lock_file = None

    def _has_lock(self) -> bool:
        """Tell whether the file that this process locked still has the lock's name."""
        try:
            now = (self.path / _FILE).stat()
        except OSError:
            return False
        return self._lock_file is not None and os.path.samestat(self._lock_file, now)
