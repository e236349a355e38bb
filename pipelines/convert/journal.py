"""The journal of a conversion: which blocks are done, so that another try goes on from there.

It is a text file beside the partial one. The first line holds the plan of what is being made, and
each further line a finished block with a checksum. A line that is torn or damaged is left out; of
two lines of one block the later counts.
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
"""An image that is written: its place in the source and in the file, its size, its checksum."""


@dataclass(frozen=True)
class Block:
    """Images that were written, or found bad, together: what is noted of them."""

    number: int
    start: int
    end: int
    """Where it begins and ends in the file, in bytes."""
    rows: NDArray[np.void]
    """(images,) of type ROW."""
    how: dict[str, int]
    """How many images had what done to them."""
    bad: list[tuple[int, str]]
    """Position in the source, and reason."""
    again: bool = False
    """Whether another try may find an image that could not be read, so that it starts here."""

    def line(self) -> str:
        """Return it as a line of the journal."""
        rows = base64.b64encode(self.rows.tobytes()).decode()
        values = [self.number, self.start, self.end, rows, self.how, self.bad, self.again]
        text = json.dumps(values)
        return f"{zlib.crc32(text.encode()):08x} {text}\n"

    @staticmethod
    def parse(line: str) -> Block:
        """Read a line of the journal; ValueError if it is torn."""
        check, _, text = line.rstrip("\n").partition(" ")
        if f"{zlib.crc32(text.encode()):08x}" != check:
            raise ValueError("torn line")
        number, start, end, rows, how, bad, again = parsed_json(text)
        return Block(
            number,
            start,
            end,
            np.frombuffer(base64.b64decode(rows), ROW),
            how,
            [(index, reason) for index, reason in bad],
            again,
        )


@contextlib.contextmanager
def locked(journal: Path) -> Iterator[IO[str]]:
    """Open the journal, which no other process can open meanwhile.

    Raises:
        DataError: another conversion has it open.
        OSError: it cannot be opened.
    """
    while True:
        with journal.open("a+", errors="replace") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DataError(
                    f"another conversion is writing {journal.stem} just now: let it end first"
                ) from error
            except OSError:
                pass  # a file system without locks
            if journal.exists() and os.path.samestat(os.fstat(log.fileno()), journal.stat()):
                yield log
                return
            # Another process finished between the two, and took the journal away.


def read(
    log: IO[str], plan: dict[str, Any], partial: Path, say: Callable[[str], None]
) -> list[Block]:
    """Return the blocks of an earlier try, up to the first that is missing or not whole."""
    log.seek(0)
    known, lines = log.readline().strip(), list(log)
    if not known or not partial.exists():
        return []
    if known != json.dumps(plan):
        say(
            f"starting {partial.stem} anew: the source, the options or the version of fastsiam "
            "are others than before"
        )
        return []
    blocks = {}
    for line in lines:
        with contextlib.suppress(ValueError):
            block = Block.parse(line)
            blocks[block.number] = block
    numbers = itertools.takewhile(lambda number: number in blocks, itertools.count())
    in_order = [blocks[number] for number in numbers]
    with partial.open("rb") as file, ThreadPoolExecutor() as threads:
        checks = list(threads.map(functools.partial(_is_whole, file.fileno()), in_order))
    done = in_order[: [*checks, False].index(False)]
    images = sum(len(block.rows) + len(block.bad) for block in done)
    say(f"going on with {partial.stem}: {images:,} images are done, and checked")
    return done


def _is_whole(file: int, block: Block) -> bool:
    """Tell whether a block is done and its records have the checksums that were noted."""
    if block.again:
        return False
    for row in block.rows:
        data = os.pread(file, int(row["size"]), int(row["start"]))
        if len(data) != row["size"] or zlib.crc32(data) != row["crc"]:
            return False
    return True


def start(log: IO[str], plan: dict[str, Any], partial: Path, begin: int, *, anew: bool) -> None:
    """Bring journal and file to where the work begins.

    Args:
        log: the journal, opened by ``locked``.
        plan: what is being made.
        partial: the file.
        begin: the file's length up to there, in bytes.
        anew: nothing of an earlier try is kept.
    """
    with partial.open("ab") as file:
        if anew:
            file.truncate(0)
        file.truncate(begin)
    if anew:
        log.seek(0)
        log.truncate()
        log.write(json.dumps(plan) + "\n")
    else:
        log.write("\n")  # the last line may be torn; later lines count
    log.flush()
