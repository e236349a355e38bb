"""Caches of compiled code: what lies there is executed, so nobody else may write into them."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from fastsiam.errors import BackendError


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
