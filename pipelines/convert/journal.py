"""The journal of a conversion: the finished blocks, from which the next start resumes.

It is a text file beside the partial .beton. The first line is the plan. Each further line is a
finished block with a checksum, in the order of the blocks.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

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


@dataclass(frozen=True)
class Block:
    """Images that were written, or found bad, together."""

    number: int
    start: int
    end: int
    """Its offsets in the file."""
    rows: NDArray[np.void]
    """(images,) of type ROW."""
    how: dict[str, int]
    """The number of images by what was done to them (``Record.how``)."""
    bad: list[tuple[int, str]]
    """Index in the source and reason of each bad image."""
    retry: bool
    """Whether the next start may be able to read a bad image, so that it resumes here."""

    def line(self) -> bytes:
        """Return the block as a line of the journal."""
        rows = base64.b64encode(self.rows.tobytes()).decode()
        values = [self.number, self.start, self.end, rows, self.how, self.bad, self.retry]
        text = json.dumps(values).encode()
        return b"%08x %s\n" % (zlib.crc32(text), text)

    @staticmethod
    def parse(line: bytes) -> Block:
        """Read a line of the journal; ValueError if it is incomplete or corrupt."""
        check, _, text = line.removesuffix(b"\n").partition(b" ")
        if b"%08x" % zlib.crc32(text) != check:
            raise ValueError("corrupt line")
        number, start, end, rows, how, bad, retry = parsed_json(text.decode())
        images = np.frombuffer(base64.b64decode(rows), ROW)
        return Block(number, start, end, images, how, [tuple(item) for item in bad], retry)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[IO[bytes]]:
    """Open the journal and lock it against other processes.

    Raises:
        DataError: another conversion has locked it.
        OSError: it cannot be opened.
    """
    while True:
        with path.open("a+b") as journal:
            try:
                fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DataError(
                    f"another conversion is writing {path.stem}; wait until it ends"
                ) from error
            except OSError:
                pass  # a file system without locks
            if path.exists() and os.path.samestat(os.fstat(journal.fileno()), path.stat()):
                yield journal
                return
            # Another process finished and removed the journal after it was opened here.


def resume(
    journal: IO[bytes], plan: dict[str, Any], partial: Path, start: int, say: Callable[[str], None]
) -> list[Block]:
    """Return the intact blocks of an earlier start, and cut journal and file behind them.

    Args:
        journal: opened by ``locked``.
        plan: of this conversion. Blocks of another plan are dropped.
        partial: the unfinished file.
        start: offset of the first block.
        say: for messages.
    """
    first_line = json.dumps(plan).encode() + b"\n"
    journal.seek(0)
    old_line = journal.readline()
    blocks: list[Block] = []
    if old_line == first_line and partial.exists():
        blocks = _intact_blocks(journal, partial)
        images = sum(len(block.rows) + len(block.bad) for block in blocks)
        say(f"resuming {partial.stem}: {images:,} images are done and verified")
    elif old_line.strip() and partial.exists():
        say(
            f"starting {partial.stem} over: the source, the options or the version of fastsiam "
            "have changed"
        )
    with partial.open("ab") as file:
        if not blocks:
            file.truncate(0)
        file.truncate(blocks[-1].end if blocks else start)
    kept = first_line + b"".join(block.line() for block in blocks)
    journal.seek(0)
    if journal.read(len(kept)) == kept:
        journal.truncate(len(kept))
    else:  # a new journal, or one of an earlier version, whose blocks are in any order
        journal.truncate(0)
        journal.write(kept)
        journal.flush()
    return blocks


def _intact_blocks(journal: IO[bytes], partial: Path) -> list[Block]:
    """Read the journal's blocks up to the first that is missing, corrupt or to be retried."""
    known: dict[int, Block] = {}
    for line in journal:
        with contextlib.suppress(ValueError):
            block = Block.parse(line)
            known[block.number] = block
    numbers = itertools.takewhile(lambda n: n in known and not known[n].retry, itertools.count())
    blocks = [known[number] for number in numbers]
    with partial.open("rb") as file, ThreadPoolExecutor() as threads:
        checks = list(threads.map(functools.partial(_is_intact, file.fileno()), blocks))
    return blocks[: [*checks, False].index(False)]


def _is_intact(file: int, block: Block) -> bool:
    """Tell whether the file holds a block's images as they were written."""
    for row in block.rows:
        data = os.pread(file, int(row["size"]), int(row["start"]))
        if len(data) != row["size"] or zlib.crc32(data) != row["crc"]:
            return False
    return True
