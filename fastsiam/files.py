"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastsiam.errors import FastSiamError


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a temporary file's path that becomes ``path`` if all goes well, and else goes away.

    Whatever happens, the old file or the new one is there, and the new one is on the disk. The
    folder is made.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    with contextlib.suppress(OSError):  # not every file system can; the file itself is there
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def written_for_user(path: Path) -> Iterator[Path]:
    """Give a temporary file's path as ``written_whole``, for a file that a user asked for.

    Raises:
        FastSiamError: the file cannot be written; one line says why.
    """
    try:
        with written_whole(path) as temporary:
            yield temporary
    except OSError as error:
        raise FastSiamError(f"cannot write {path}: {why(error)}") from error


def write_json(path: Path, value: Any) -> None:
    """Write plain values into a file that a user asked for.

    Raises:
        FastSiamError: the file cannot be written; one line says why.
    """
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    with written_for_user(path) as temporary:
        temporary.write_text(text)


def why(error: BaseException) -> str:
    """Say in a few words why a file could not be written; torch reports that as RuntimeError."""
    if isinstance(error, FileExistsError):  # of a folder to be made
        return f"{error.filename} is no folder"
    return getattr(error, "strerror", None) or str(error).splitlines()[0]
