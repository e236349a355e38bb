"""The index of a set of tars, or of parquet files: what it holds, and where it is kept.

One row is 24 bytes: 1.28 million images in 30 MB.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError
from fastsiam.files import explained, parsed_json, written_whole

from .files import File

ROW = np.dtype(
    [
        ("offset", "<u8"),
        ("size", "<u4"),
        ("label", "<i4"),
        ("file", "<u2"),
        ("width", "<u2"),
        ("height", "<u2"),
        ("flags", "<u2"),
    ]
)
"""An image of the index: where its bytes are, its class, its size in pixels, ``Flags``."""

_FORMAT = 2


@dataclass(frozen=True)
class Index:
    """What lies where in a set of files; of parquet files the rows alone are kept."""

    rows: NDArray[np.void]
    """(images,) of type ROW; of tars, sorted by class and name."""
    classes: tuple[str, ...]
    split: bool
    """Whether folders train/ and val/ tell the splits; ``Flags.HELD_OUT`` marks the second."""
    names: bytes
    """The images' names, joined by zeros and compressed: they are seldom wanted."""


def file_facts(files: Sequence[File]) -> list[list[str | int]]:
    """Return name, size and modification time (ns) of each file: they change when it does.

    Raises:
        DataError: a file is not there any more.
    """
    facts: list[list[str | int]] = []
    for file in files:
        with explained(DataError, f"cannot read {file.path}"):
            found = file.path.stat()
        facts.append([file.path.name, found.st_size, found.st_mtime_ns])
    return facts


def homes(files: Sequence[File], column: str = "") -> list[Path]:
    """Return where the index of these files may be kept: beside them, or in the user's cache.

    Beside those of another machine nothing is written.

    Args:
        files: tars or parquet files.
        column: of the parquet files' images, if another than the one that is found is indexed.
    """
    first = files[0].path
    names = [file.path.name for file in files]
    stem = first.stem if len(files) == 1 else f"{first.stem}-and-{len(files) - 1}-more"
    if column:
        stem += f"-{hashlib.sha256(column.encode()).hexdigest()[:8]}"
        names.append(column)
    found = []
    if isinstance(first, Path):
        found.append(first.parent / f".{stem}.fastsiam-index")
    with contextlib.suppress(OSError, RuntimeError):  # a user without a home
        cache = Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache")
        key = hashlib.sha256(json.dumps([str(first.parent.resolve()), names]).encode()).hexdigest()
        found.append(cache / "fastsiam" / f"{key[:16]}.index")
    return found


def load(home: Path, facts: list[list[str | int]]) -> Index | None:
    """Read a kept index if it is whole and of files with these ``file_facts``; else return None."""
    try:
        head, _, body = home.read_bytes().partition(b"\n")
        known = parsed_json(head)
        if known["format"] != _FORMAT or known["files"] != facts:
            return None
        if known["crc32"] != zlib.crc32(body):
            return None
        size = int(known["images"]) * ROW.itemsize
        rows = np.frombuffer(body[:size], ROW)
        return Index(rows, tuple(known["classes"]), bool(known["split"]), body[size:])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def keep(index: Index, homes: list[Path], facts: list[list[str | int]]) -> Path | None:
    """Write the index to the first place that takes it, and return that; None if none does."""
    body = index.rows.tobytes() + index.names
    head = {
        "format": _FORMAT,
        "files": facts,
        "classes": index.classes,
        "split": index.split,
        "images": len(index.rows),
        "crc32": zlib.crc32(body),
    }
    for home in homes:
        try:
            with written_whole(home, by_many=True) as temporary:  # all ranks of a run at once
                temporary.write_bytes(json.dumps(head).encode() + b"\n" + body)
        except OSError:  # a read-only place, or a full one
            continue
        return home
    return None
