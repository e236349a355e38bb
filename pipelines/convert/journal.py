"""Journal of a conversion: the list of finished blocks, from which the next run resumes.

It is a text file next to the partial .beton file. The first line is the plan as JSON. Each further
line is a finished block, in file order.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
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
from fastsiam.files import why

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
"""Dtype of a stored image: index in the source, offset, bytes, CRC-32, size in pixels, mode."""


_CHECKS = 1
"""Increment it when images are checked more strictly, or lines have another format: unfinished
conversions then start over."""


class Block(NamedTuple):
    """A block of consecutive images that one worker has written or found bad."""

    start: int
    end: int
    """Byte range of the block in the file."""
    rows: NDArray[np.void]
    """(images,) array of dtype ``ROW``."""
    how: dict[str, int]
    """Number of images by processing (``Record.how``)."""
    bad: list[tuple[int, str]]
    """Index in the source, and error, of each bad image."""

    @property
    def images(self) -> int:
        """Number of images of the source, with the bad ones."""
        return len(self.rows) + len(self.bad)

    def line(self) -> bytes:
        """Serialise the block as a line of the journal, which starts with the rest's CRC-32."""
        rows = base64.b64encode(self.rows.tobytes()).decode()
        text = json.dumps(self._replace(rows=rows)).encode()  # type: ignore[arg-type]
        return b"%08x %s\n" % (zlib.crc32(text), text)

    @staticmethod
    def parse(line: bytes) -> Block:
        """Parse a line of the journal; ValueError if it is incomplete or corrupt."""
        if int(line[:8], 16) != zlib.crc32(text := line[9:-1]):
            raise ValueError("the line does not match its checksum")
        start, end, rows, how, bad = json.loads(text)
        images = np.frombuffer(base64.b64decode(rows), ROW)
        return Block(start, end, images, how, [tuple(item) for item in bad])

    def is_intact(self, file: int) -> bool:
        """Return whether a file's images match their checksums, with zeros between the images."""
        end = self.start
        for start, size, crc in self.rows[["start", "size", "crc"]].tolist():
            data, gap = os.pread(file, start + size - end, end), start - end
            if len(data) != gap + size or data[:gap] != bytes(gap):
                return False
            if zlib.crc32(memoryview(data)[gap:]) != crc:
                return False
            end = start + size
        return True


@contextlib.contextmanager
def open_locked(path: Path, warn: Callable[[str], None]) -> Iterator[IO[bytes]]:
    """Open the journal and lock it against other processes; warn if it cannot be locked.

    Raises:
        DataError: another conversion holds the lock.
        OSError: the journal cannot be opened.
    """
    with path.open("a+b") as journal:
        try:
            # Not by filelock: version 3.30, which is supported, empties the file that it locks.
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:  # EACCES: network shares
            raise DataError(
                f"another conversion is writing {path.stem}; wait until it ends"
            ) from error
        except OSError as error:
            warn(
                f"{path} cannot be locked ({why(error)}); make sure that no other conversion "
                f"writes {path.stem}"
            )
        yield journal


def resume(
    journal: IO[bytes], plan: dict[str, Any], partial: Path, say: Callable[[str], None]
) -> list[Block]:
    """Return the intact blocks of an earlier run, and truncate journal and file after them.

    If the earlier run had a different plan, both start over.
    """
    first_line = json.dumps(plan | {"checks": _CHECKS}).encode() + b"\n"
    journal.seek(0)
    old_line, *lines = journal.readlines() or [b""]
    blocks: list[Block] = []
    if old_line == first_line and partial.exists():
        blocks = _intact_blocks(lines, partial)
        images = sum(block.images for block in blocks)
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
    """Return the journal's blocks before the first one that is missing or corrupt."""
    blocks: list[Block] = []
    with contextlib.suppress(ValueError):
        for line in lines:
            blocks.append(Block.parse(line))
    with partial.open("rb") as file, ThreadPoolExecutor() as threads:
        checks = list(threads.map(lambda block: block.is_intact(file.fileno()), blocks))
    return blocks[: [*checks, False].index(False)]
