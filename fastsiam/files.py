"""Files written whole or not at all; errors of files, and paths, as users read them; who else can
write into a folder."""

from __future__ import annotations

import contextlib
import errno
import grp
import json
import os
import pwd
import re
import secrets
import shlex
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastsiam.errors import BackendError, FastSiamError

_ADVICE = {
    errno.EACCES: "give this user the right to do so",
    errno.EPERM: "give this user the right to do so",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path: what should be a folder is a file",
    errno.EISDIR: "check the path: what should be a file is a folder",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ELOOP: "check the path: its links lead in a circle",
    errno.EROFS: "choose a place that can be written",
    errno.ENOSPC: "make room and try again",
    errno.EDQUOT: "make room and try again",
    errno.EFBIG: "allow larger files there, or choose another place",
    errno.EIO: "check the disk, or the connection to it",
    errno.ESTALE: "check the disk, or the connection to it",
    errno.EMFILE: "allow more open files (ulimit -n)",
    errno.ENFILE: "allow more open files (ulimit -n)",
}
"""What the user can do about an operating system's error."""
_PROBE = 1 << 20
"""Bytes that are written to learn whether a disk is full: more than what a library held back."""


@contextlib.contextmanager
def written_whole(path: Path, *, by_many: bool = False) -> Iterator[Path]:
    """Give a temporary file's path that becomes ``path`` if all goes well, and else goes away.

    Whatever happens, the old file or the new one is there, and the new one is on the disk. The
    folder is made. A link's target is written, and so is a device or a pipe.

    Libraries report a full disk in words of their own, as torch does by its "enforce fail": after
    an error that is none of the system's, the system is asked.

    Args:
        path: the file to be.
        by_many: other processes may write the same file just now: each has a temporary file of its
            own, and the last to end leaves its file.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    path = Path(os.path.realpath(path))  # a link stays one
    if path.exists() and not path.is_file() and not path.is_dir():
        with _copied(path) as temporary:
            yield temporary
        return
    own = f".{secrets.token_hex(4)}" if by_many else ""
    temporary = path.with_name(f"{path.name}{own}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        refusal = _refusal(error, temporary) if _is_a_librarys(error) else None
        with contextlib.suppress(OSError):
            os.truncate(temporary, 0)  # a library may still have it open: its room is free now
        with contextlib.suppress(OSError):
            temporary.unlink()
        if refusal:
            raise refusal from error
        raise
    with contextlib.suppress(OSError):  # not every file system can; the file itself is there
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def _copied(device: Path) -> Iterator[Path]:
    """Give a temporary file's path whose content goes into a device or a pipe at the end."""
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder) / device.name
        yield temporary
        with temporary.open("rb") as content, device.open("wb") as file:
            shutil.copyfileobj(content, file)


def _is_a_librarys(error: BaseException) -> bool:
    """Tell whether an error may stand for one of the system's, whose number it lacks."""
    if isinstance(error, OSError):
        return error.errno is None
    return isinstance(error, Exception) and not isinstance(error, FastSiamError)


def _refusal(error: BaseException, path: Path) -> OSError | None:
    """Return the system's error behind a library's: named there, or met on making a file longer."""
    if named := re.search(r"\(os error (\d+)\)", str(error)):  # as Rust writes it
        number = int(named[1])
        return OSError(number, os.strerror(number))
    try:
        with path.open("ab", buffering=0) as file:
            file.write(bytes(_PROBE))
            os.fsync(file.fileno())
    except OSError as refusal:
        return refusal
    return None


def write_at(file: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes to an open file from an offset on, in as many calls as the system needs."""
    written = os.pwrite(file, data, offset)
    while written < len(data):
        written += os.pwrite(file, memoryview(data)[written:], offset + written)


def lack_of_room(error: Exception, path: Path, needed: int) -> str:
    """Say how much room a file lacks, if a full disk is why it could not be written, else "".

    Args:
        error: why it could not be written.
        path: the file.
        needed: bytes that it takes, beside those of the file that it replaces.
    """
    if getattr(error, "errno", None) != errno.ENOSPC:
        return ""
    try:
        free = f"{shutil.disk_usage(path.parent).free / 1e6:,.1f} MB free"
    except OSError:
        free = "it cannot be looked at"
    return f"no space left on its disk: {needed / 1e6:,.1f} MB needed, {free}; make room"


@contextlib.contextmanager
def explained(kind: type[FastSiamError], what: str, *, advice: str = "") -> Iterator[None]:
    """Turn an operating system's error in the block into an error of the user's world.

    Args:
        kind: of the error to raise.
        what: what could not be done, such as "cannot read /data/list.txt".
        advice: what the user can do about it; if empty, what is known to help against the system's
            reason.

    Raises:
        FastSiamError: of that kind, in one line: what, the system's reason, the advice.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {reason(error, advice)}") from error


def quoted(path: object) -> str:
    """Return a path, or another word, as it is typed in a shell: for commands in messages."""
    return shlex.quote(str(path))


def reason(error: Exception, advice: str = "") -> str:
    """Say why a file operation failed and what to do: the advice, or what is known to help."""
    advice = advice or _ADVICE.get(getattr(error, "errno", None) or 0, "")
    return f"{why(error)}; {advice}" if advice else why(error)


def why(error: BaseException) -> str:
    """Say in a few words why a file operation failed."""
    if isinstance(error, FileExistsError):  # of a folder to be made
        return f"{error.filename} is no folder"
    first = next(iter(str(error).splitlines()), "")
    return getattr(error, "strerror", None) or first or type(error).__name__


@contextlib.contextmanager
def written_for_user(path: Path) -> Iterator[Path]:
    """Give a temporary file's path as ``written_whole``, for a file that a user asked for.

    Raises:
        FastSiamError: the file cannot be written; one line says why.
    """
    with explained(FastSiamError, f"cannot write {path}"), written_whole(path) as temporary:
        yield temporary


def parsed_json(text: str | bytes) -> Any:
    """Return what a text in JSON holds.

    Raises:
        ValueError: it is no JSON, or nested deeper than the interpreter goes.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_json(path: Path, value: Any) -> None:
    """Write plain values into a file that a user asked for.

    Raises:
        FastSiamError: the file cannot be written; one line says why.
    """
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    with written_for_user(path) as temporary:
        temporary.write_text(text)


def require_own(folder: Path, *, what: str, instead: str) -> None:
    """Refuse a cache of compiled code that another user can put something into.

    Args:
        folder: the cache; it need not be there.
        what: is kept there, for the message.
        instead: how another folder is chosen.

    Raises:
        BackendError: names the folder that is another user's or writable by others, and the way
            out.
    """
    if reason := others_can_write(folder):
        raise BackendError(
            f"{what} is kept in {folder} and executed from there, but {reason}: take it into your "
            f"own hands, or {instead}"
        )


def others_can_write(folder: Path) -> str:
    """Say which folder on the way to one another user can change, or "".

    A folder of the system's with the sticky bit, such as /tmp, is fine as a parent: what lies in it
    can be renamed by its owner alone. So is a group that is the user's own, as Debian has them.
    """
    folder = folder.expanduser().absolute()
    real = folder.resolve()
    for place in dict.fromkeys((folder, real, *folder.parents, *real.parents)):
        try:
            found = place.stat()
        except OSError:
            continue  # not there yet: this user makes it
        if found.st_uid not in (0, os.geteuid()):
            return f"{place} belongs to {_user(found.st_uid)}"
        if found.st_mode & stat.S_ISVTX and place not in (folder, real):
            continue
        if found.st_mode & stat.S_IWOTH:
            return f"everybody can write into {place} (chmod o-w)"
        if found.st_mode & stat.S_IWGRP and not _is_own(found.st_gid):
            return f"the group {_group(found.st_gid)} can write into {place} (chmod g-w)"
    return ""


def _is_own(group: int) -> bool:
    """Tell whether a group is the system's or this user's alone."""
    return group == 0 or _group(group) == _user(os.geteuid())


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return f"{number}"
