"""The journal of a conversion: the finished blocks, from which the next start resumes.

It is a text file beside the partial .beton. The first line is the plan. Each further line is a
finished block, in the order of the blocks.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import json
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError
from fastsiam.files import parsed_json

ROW = np.dtype(
    [
        ("source", "<i8"),
        ("start", "<u8"),
        ("size", "<u4"),
        ("crc", "<u4"),
        ("width", "<u2"),
        ("height", "<u2"),
        ("mode", "u1"),
    ]
)
"""A written image: its index in the source, offset, bytes, checksum, size in pixels, and mode."""


class Block(NamedTuple):
    """Images that were written, or found bad, together."""

    start: int
    end: int
    """Its offsets in the file."""
    rows: NDArray[np.void]
    """(images,) of type ROW."""
    how: dict[str, int]
    """The number of images by what was done to them (``Record.how``)."""
    bad: list[tuple[int, str]]
    """Index in the source and reason of each bad image."""

    def line(self) -> bytes:
        """Return the block as a line of the journal."""
        rows = base64.b64encode(self.rows.tobytes()).decode()
        return json.dumps(self._replace(rows=rows)).encode() + b"\n"  # type: ignore[arg-type]

    @staticmethod
    def parse(line: bytes) -> Block:
        """Read a line of the journal; ValueError if it is incomplete or corrupt."""
        start, end, rows, how, bad = parsed_json(line)
        images = np.frombuffer(base64.b64decode(rows), ROW)
        return Block(start, end, images, how, [tuple(item) for item in bad])

    def is_intact(self, file: int) -> bool:
        """Tell whether an open file holds the images as they were written."""
        for row in self.rows:
            data = os.pread(file, int(row["size"]), int(row["start"]))
            if len(data) != row["size"] or zlib.crc32(data) != row["crc"]:
                return False
        return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[IO[bytes]]:
    """Open the journal and lock it against other processes.

    Raises:
        DataError: another conversion has locked it.
        OSError: it cannot be opened.
    """
    with path.open("a+b") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"another conversion is writing {path.stem}; wait until it ends"
            ) from error
        except OSError:
            pass  # a file system without locks
        yield journal


def resume(
    journal: IO[bytes], plan: dict[str, Any], partial: Path, say: Callable[[str], None]
) -> list[Block]:
    """Return the intact blocks of an earlier start, and cut journal and file behind them.

    If the earlier start had another plan, both start over.
    """
    first_line = json.dumps(plan).encode() + b"\n"
    journal.seek(0)
    old_line, *lines = journal.readlines() or [b""]
    blocks: list[Block] = []
    if old_line == first_line and partial.exists():
        blocks = _intact_blocks(lines, partial)
        images = sum(len(block.rows) + len(block.bad) for block in blocks)
        say(f"resuming {partial.stem}: {images:,} images are done and verified")
    elif old_line.strip() and partial.exists():
        say(
            f"starting {partial.stem} over: the source, the options or the version of fastsiam "
            "have changed"
        )
    if blocks:
        os.truncate(partial, blocks[-1].end)
        journal.truncate(len(first_line) + sum(map(len, lines[: len(blocks)])))
    else:
        partial.write_bytes(b"")
        journal.truncate(0)
        journal.write(first_line)
        journal.flush()
    return blocks


def _intact_blocks(lines: list[bytes], partial: Path) -> list[Block]:
    """Return the journal's blocks up to the first that is missing or corrupt."""
    blocks: list[Block] = []
    with contextlib.suppress(ValueError, TypeError):
        for line in lines:
            blocks.append(Block.parse(line))
    with partial.open("rb") as file, ThreadPoolExecutor() as threads:
        checks = list(threads.map(functools.partial(Block.is_intact, file=file.fileno()), blocks))
    return blocks[: [*checks, False].index(False)]
