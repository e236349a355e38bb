"""The folder of a run: of one process at a time, made again if deleted, removed if unused."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from fastsiam.console import Console
from fastsiam.errors import FastSiamError
from fastsiam.files import explained, why, written_whole

_LOOK = 0.1
"""Seconds between two looks at a lock."""
_TAKEN = (errno.EACCES, errno.EAGAIN)
"""How the system says that another process holds a lock."""


PATIENCE = 15.0
"""Seconds that a run which starts again waits for those it was to leave the folder: they save."""


@contextlib.contextmanager
def created(path: Path) -> Iterator[None]:
    """Create a run's folder and its parents; at the end remove those of them that are empty.

    So a run that is refused before it writes anything leaves no folder. One that was there before
    stays.

    Raises:
        FastSiamError: it cannot be created.
    """
    with explained(FastSiamError, f"cannot make the run folder {path}"):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if missing and os.listdir(path) == ["lock"] and not user_of(path):
                (path / "lock").unlink()  # of a rank that was killed
            for folder in missing:
                folder.rmdir()


def wait_until_free(run: Path, *, patience: float = PATIENCE) -> str:
    """Wait until no process has a run's folder; say which one has it still after so many seconds.

    Returns:
        Empty if nobody has it.
    """
    until = time.monotonic() + patience
    while (who := user_of(run)) and time.monotonic() < until:
        time.sleep(_LOOK)
    return who


def user_of(run: Path) -> str:
    """Say which process has a run's folder now; empty if none has, or nobody can tell."""
    try:
        file = os.open(run / "lock", os.O_RDWR)
    except OSError:
        return ""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return _written(file) if error.errno in _TAKEN else ""
    finally:
        os.close(file)
    return ""


def _written(file: int) -> str:
    """Return what the process that has a lock wrote of itself."""
    return os.pread(file, 1000, 0).decode(errors="replace").strip() or "another process"


class RunFolder:
    """A run's folder.

    While a process has it, ``RUN/lock`` says who that is. What keeps others out is the system's
    lock of that file (POSIX's, as NFS has it too), which ends with the process, however it ends;
    processes that it forks do not share it. The file's text is for people.

    Args:
        path: the folder, which is there.
        console: for warnings.
    """

    def __init__(self, path: Path, *, console: Console | None = None) -> None:
        self.path = path
        self.console = console or Console()
        self._file: int | None = None
        """The lock's file, while this process has the folder."""
        self._is_taken = False
        self._kept: dict[str, bytes] = {}

    @contextlib.contextmanager
    def taken(self, *, patience: float = 0.0) -> Iterator[None]:
        """Have the folder alone while inside.

        Args:
            patience: seconds to wait for another process to leave it.

        Raises:
            FastSiamError: another process has it, or it cannot be written.
        """
        if patience:
            wait_until_free(self.path, patience=patience)
        self._take()
        self._is_taken = True
        try:
            yield
        finally:
            self._is_taken = False
            self._leave()

    def keep(self, name: str, content: bytes) -> None:
        """Write a small file that is written again should somebody delete the folder.

        Args:
            name: of the file, within the folder.
            content: what it holds.

        Raises:
            FastSiamError: it cannot be written.
        """
        self._kept[name] = content
        path = self.path / name
        with (
            explained(FastSiamError, f"cannot write {path}"),
            written_whole(path, by_many=True) as temporary,
        ):
            temporary.write_bytes(content)

    def restore(self) -> None:
        """Make the folder again if it is gone, take it, and write what was to be kept in it.

        Raises:
            FastSiamError: it cannot be made, or another process has made it and has it.
        """
        has_it = self._file is not None and self._is_ours(self._file)
        if self.path.is_dir() and (has_it or not self._is_taken):
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

    def _take(self) -> None:
        lock = self.path / "lock"
        while True:
            with explained(FastSiamError, f"cannot write {lock}"):
                file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _TAKEN:
                    who = _written(file)
                    os.close(file)
                    raise FastSiamError(
                        f"{self.path} is in use by {who}; wait for it, or choose another --out"
                    ) from error
                self.console.warn(
                    f"{self.path} cannot be locked ({why(error)}): take care that no other run "
                    "has it as its --out"
                )
            if self._is_ours(file):
                break
            os.close(file)  # its owner went, and took the file away, between the two
        self._file = file
        since = time.strftime("%Y-%m-%d %H:%M")
        text = f"process {os.getpid()} on {socket.gethostname()} since {since}\n"
        with contextlib.suppress(OSError):  # a full disk: the lock holds without
            os.ftruncate(file, 0)
            os.pwrite(file, text.encode(), 0)

    def _leave(self) -> None:
        if self._file is None:
            return
        if self._is_ours(self._file):
            with contextlib.suppress(OSError):
                (self.path / "lock").unlink()
        os.close(self._file)
        self._file = None

    def _is_ours(self, file: int) -> bool:
        """Tell whether an open file is the one that has the lock's name."""
        try:
            return os.path.samestat(os.fstat(file), os.stat(self.path / "lock"))
        except OSError:
            return False
