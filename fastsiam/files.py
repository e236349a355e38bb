"""Atomic writes, messages about file errors, quoted paths, and checks of folder permissions."""

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
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fastsiam.errors import BackendError, DataError, FastSiamError

_ADVICE = {
    errno.EACCES: "check the permissions of this user",
    errno.EPERM: "check the permissions of this user",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path: a file is where a folder should be",
    errno.EISDIR: "check the path: a folder is where a file should be",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ELOOP: "check the path: its links form a loop",
    errno.EROFS: "choose a writable folder",
    errno.ENOSPC: "free some space and try again",
    errno.EDQUOT: "free some space and try again",
    errno.EFBIG: "allow larger files there, or choose another folder",
    errno.EIO: "check the disk, or the connection to it",
    errno.ESTALE: "check the disk, or the connection to it",
    errno.EMFILE: "allow more open files (ulimit -n)",
    errno.ENFILE: "allow more open files (ulimit -n)",
}
"""Advice for errors of the operating system."""

_SCHEMES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "file", "ftp", "http", "https"}
"""Schemes of the URLs that are not accepted as local paths."""

_PROBE = 1 << 20
"""Bytes of a test write that detects a full disk: more than any library buffers."""


@contextlib.contextmanager
def atomic_write(path: Path, *, by_many: bool = False) -> Iterator[Path]:
    """Write a file atomically: yield a temporary path, which replaces ``path`` at the end.

    After an error the temporary file is deleted and the old file stays. Missing parent folders are
    created, and the new file is synced to disk. Links are followed; devices and pipes are written
    directly.

    Libraries report a full disk in their own words, such as torch's "enforce fail". After an error
    without an ``errno``, a test write therefore determines the reason.

    With ``by_many``, other processes may write the same file at the same time: each has its own
    temporary file, and the last one to finish wins.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path  # unresolved: a pipe behind /dev/stdout has no real path
        return
    path = Path(os.path.realpath(path))  # replace the target, not the link
    suffix = f".{secrets.token_hex(4)}" if by_many else ""
    temporary = path.with_name(f"{path.name}{suffix}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        os_error = _find_os_error(error, temporary)
        with contextlib.suppress(OSError):
            os.truncate(temporary, 0)  # frees the space even if a library has the file open
        with contextlib.suppress(OSError):
            temporary.unlink()
        if os_error:
            raise os_error from error
        raise
    with contextlib.suppress(OSError):  # not every file system can sync folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _find_os_error(error: BaseException, path: Path) -> OSError | None:
    """Return the OS error behind a library's error, from its message or by a test write."""
    if not isinstance(error, Exception) or isinstance(error, FastSiamError):
        return None
    if isinstance(error, OSError) and error.errno is not None:
        return None
    if match := re.search(r"\(os error (\d+)\)", str(error)):  # the format of safetensors
        number = int(match[1])
        return OSError(number, os.strerror(number))
    try:
        with path.open("ab", buffering=0) as file:
            file.write(bytes(_PROBE))
            os.fsync(file.fileno())
    except OSError as os_error:
        return os_error
    return None


def is_file(path: Path) -> bool:
    """Return whether a file exists. Unlike ``Path.is_file``, raise if that cannot be determined.

    ``Path.is_file`` also returns False for a link to a disk that is not mounted and, since Python
    3.14, if a file server does not answer. A run that relied on it would start over.

    Raises:
        OSError: the path cannot be read, or contains a broken link.
    """
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        for link in (path, *path.parents):
            if link.is_symlink() and not link.exists():
                target = f"{link} is a link to {os.readlink(link)}, which does not exist"
                raise OSError(errno.ENOENT, f"{target} (is its disk mounted?)") from None
        return False


def write_at(file: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes to an open file at an offset."""
    count = os.pwrite(file, data, offset)
    while count < len(data):
        count += os.pwrite(file, memoryview(data)[count:], offset + count)


@contextlib.contextmanager
def os_errors_as(kind: type[FastSiamError], what: str) -> Iterator[None]:
    """Convert an ``OSError`` in the block to an error with a one-line message and advice.

    Raises:
        FastSiamError: of class ``kind``. Its message starts with ``what``, which says what failed,
            such as "cannot read /data/list.txt".
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {reason(error)}") from error


@contextlib.contextmanager
def value_errors_as_data_error(path: Path) -> Iterator[None]:
    """Convert errors of a block that uses values from a file, which may have been edited by hand.

    Raises:
        DataError: a value is missing or has the wrong type.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {why(error)}"
        raise DataError(
            f"{path} is damaged: a value in it is missing or wrong ({reason}); restore or delete it"
        ) from error


def as_utf8(text: str) -> str:
    r"""Return text that UTF-8 can encode: undecodable bytes become escapes such as ``\udce9``."""
    return text.encode("utf-8", "backslashreplace").decode()


def quote(path: object) -> str:
    """Quote a path or another word for a shell command in a message."""
    return shlex.quote(str(path))


def reason(error: Exception) -> str:
    """Return why a file operation failed, and advice if there is any."""
    advice = _ADVICE.get(getattr(error, "errno", None) or 0, "")
    return f"{why(error)}; {advice}" if advice else why(error)


def why(error: BaseException) -> str:
    """Return a short reason why a file operation failed."""
    if isinstance(error, FileExistsError):  # raised when a folder is created
        return f"{error.filename} is not a folder"
    first = next(iter(str(error).splitlines()), "")
    return getattr(error, "strerror", None) or first or type(error).__name__


@contextlib.contextmanager
def atomic_write_for_user(path: Path) -> Iterator[Path]:
    """Write a local file atomically, like ``atomic_write``, with error messages for users.

    Raises:
        FastSiamError: the file cannot be written.
    """
    require_local(path)
    with os_errors_as(FastSiamError, f"cannot write {path}"), atomic_write(path) as temporary:
        yield temporary


def require_local(path: Path, *, reads: bool = False) -> None:
    """Check the path of an output, or of an input if ``reads``.

    Otherwise ``s3://bucket`` would be a local folder ``s3:``, and ``~/runs`` in a folder ``~``.

    Raises:
        FastSiamError: the path is a URL, or starts with an unexpanded ``~`` or ``~user``.
    """
    action = "read" if reads else "write to"
    if hint := tilde_hint(path):
        raise FastSiamError(f"cannot {action} {path}{hint}")
    scheme, *parts = path.parts or ("",)
    if scheme.endswith(":") and scheme.removesuffix(":").lower() in _SCHEMES:
        advice = "only --data and --source can be remote; copy it to this machine"
        if not reads:
            advice = (
                "results can only be written to a local path; pass one, and upload the results "
                "afterwards"
            )
        raise FastSiamError(f"cannot {action} {scheme}//{'/'.join(parts)}: {advice}")


def tilde_hint(path: object) -> str:
    """Return advice about a path whose ``~`` the shell did not expand; "" for other paths."""
    name = str(path)
    if (expanded := os.path.expanduser(name)) == name:  # also if ``~bob`` is no user
        return ""
    return f" (the shell did not expand {name.split('/')[0]}: pass {expanded})"


def expand_home(path: Path) -> Path:
    """Expand the ``~`` or ``~user`` at the start of a path.

    Raises:
        FastSiamError: there is no such user.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise FastSiamError(
            f"cannot find the home directory in {path}; pass a full path"
        ) from error


def parse_json(
    text: str | bytes, *, table: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Parse JSON; ``table`` builds an object from its (name, value) pairs, by default a dict.

    Raises:
        ValueError: the text is not JSON, or it is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=table)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_json(path: Path, value: Any) -> None:
    """Write a value as a JSON file, atomically.

    Raises:
        FastSiamError: the file cannot be written.
    """
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    with atomic_write_for_user(path) as temporary:
        temporary.write_text(text)


def create_private_folder(folder: Path) -> None:
    """Create a cache folder and its missing parents for this user alone, whatever the umask.

    With a umask of 002, other users of the group could write to them, and the cache is refused.

    Raises:
        OSError: a folder cannot be created.
    """
    folder = expand_home(folder)
    for place in (*reversed(folder.parents), folder):
        place.mkdir(mode=0o700, exist_ok=True)


def check_private_folder(folder: Path, *, what: str, instead: str) -> None:
    """Check that no other user can write to a cache of compiled code, which need not exist.

    The message names its content (``what``), and says how to choose another folder (``instead``).

    Raises:
        BackendError: another user owns or can write to the folder or one of its parents.
    """
    if reason := others_can_write(folder):
        raise BackendError(
            f"{what} in {folder} would be executed, but {reason}; change its owner or permissions, "
            f"or {instead}"
        )


def others_can_write(folder: Path) -> str:
    """Return why another user can change a folder or one of its parents; "" if no other user can.

    Parents with the sticky bit, such as /tmp, are safe, because only owners can rename their
    entries. The user's private group, as on Debian, is safe too.
    """
    folder = expand_home(folder).absolute()
    real = folder.resolve()
    for place in dict.fromkeys((folder, real, *folder.parents, *real.parents)):
        is_parent = place not in (folder, real)
        try:
            status = place.stat()
        except OSError:
            continue  # does not exist yet: this user will create it
        is_others = status.st_uid not in (0, os.geteuid())
        if is_others and not (is_parent and _is_hidden(status.st_uid)):
            return f"{place} belongs to {_user(status.st_uid)}"
        if status.st_mode & stat.S_ISVTX and is_parent:
            continue
        if status.st_mode & stat.S_IWOTH:
            return f"everybody can write to {place} (`chmod o-w {quote(place)}`)"
        if status.st_mode & stat.S_IWGRP and status.st_gid != 0:
            group = _group(status.st_gid)
            if group != _user(os.geteuid()):
                return f"the group {group} can write to {place} (`chmod g-w {quote(place)}`)"
    return ""


def _is_hidden(user: int) -> bool:
    """Return whether a user ID stands for all users that are not mapped into this user namespace.

    In a container of an unprivileged user, such as Apptainer's, the host's root is one of them.
    """
    with contextlib.suppress(OSError, ValueError):
        counts = Path("/proc/self/uid_map").read_text().split()[2::3]
        overflow_uid = int(Path("/proc/sys/kernel/overflowuid").read_text())
        return user == overflow_uid and sum(map(int, counts)) < 2**32 - 1
    return False


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
