"""Files of a data set, here or on another machine."""

from __future__ import annotations

from pathlib import Path

from fastsiam.errors import DataError

from ..remote import RemoteFile, RemotePath
from ..remote.path import Place
from .mapped import Mapped

File = Mapped | RemoteFile
"""A file that is read by ranges."""


def open_file(path: Place) -> File:
    """Open a file: map it, or ask for its size.

    Raises:
        DataError: it is not there, cannot be read, or is empty.
    """
    return RemoteFile(path) if isinstance(path, RemotePath) else Mapped(path)


def on_disk(path: Place) -> Path:
    """Return a path of this machine; refuse data that cannot be read in place on another one."""
    if isinstance(path, Path):
        return path
    raise DataError(
        f"{path} holds neither tars nor .beton, which alone are read in place on another machine: "
        "copy it to a disk and name that, or upload what fastsiam convert makes of it"
    )
