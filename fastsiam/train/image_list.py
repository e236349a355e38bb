"""The ordered list of a run's image names, which detects changes of the data.

A run's order and augmentations depend on each image's position in the data set. Adding or removing
a file would shift all later positions. The list of names detects that, and keeps every image at its
position, even in another container.

For containers (.beton, tar, Arrow, parquet) the list also has the size and modification time of
each file, because a changed file may contain images with the same names. For folders it has only
names, because reading the sizes of ImageNet's files takes minutes on a network file system.

For the 1,281,167 names of ImageNet the list takes 3.8 MB. Writing it takes 0.9 s of CPU time,
reading and comparing it 0.6 s.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import CheckpointError, DataError
from fastsiam.files import is_file, os_errors_as, parse_json, quote
from fastsiam.pipelines.store import Store

FILE = "images.npz"
"""Name of the list in a run's folder."""


class DataFile(NamedTuple):
    """Path, size and modification time of a container."""

    path: str
    """Absolute path, with links resolved."""
    bytes: int
    mtime_ns: int
    """Modification time in nanoseconds."""


@dataclass(frozen=True, slots=True)
class ImageList:
    """The list of a run's images."""

    names: tuple[str, ...]
    """Name of each image, in the order of the run's data set."""
    files: tuple[DataFile, ...] = ()
    """Containers of the images, as of the run's last start."""
    accepted: str = ""
    """``fingerprint`` of the changed data that the user accepted; empty without such a change."""
    blocks: NDArray[np.int32] | None = field(default=None, compare=False)
    """(names,) block of each image when the run started (``Store.blocks``); None unless the run
    shuffles within a window, where the order depends on the blocks."""

    @classmethod
    def load(cls, run: Path) -> ImageList | None:
        """Read the list from a run's folder; None if there is no list.

        Raises:
            CheckpointError: the list cannot be read, or is corrupt.
        """
        path = run / FILE
        with os_errors_as(CheckpointError, f"cannot read {path}"):
            if not is_file(path):
                return None
            content = path.read_bytes()
        try:
            with np.load(io.BytesIO(content)) as file:
                names = file["names"].tobytes().decode("utf-8", "surrogateescape").split("\0")
                files = parse_json(str(file["files"])) if "files" in file else []
                blocks = file.get("blocks")
                if blocks is not None and (blocks.dtype, blocks.shape) != (np.int32, (len(names),)):
                    raise ValueError("the number of blocks differs from the number of images")
                containers = tuple(DataFile(*facts) for facts in files)
                return cls(tuple(names), containers, str(file["accepted"]), blocks)
        except Exception as error:  # numpy and zipfile may raise anything on a corrupt archive
            raise CheckpointError(
                f"the list of the run's images is corrupt: {path}; if the data have not changed "
                f"since the run started, `rm {quote(path)}`"
            ) from error

    def to_bytes(self) -> bytes:
        """Return the content of ``FILE``."""
        names = "\0".join(self.names).encode("utf-8", "surrogateescape")
        buffer = io.BytesIO()
        blocks: dict[str, Any] = {} if self.blocks is None else {"blocks": self.blocks}
        np.savez_compressed(
            buffer,
            names=np.frombuffer(names, np.uint8),
            accepted=np.array(self.accepted),
            files=np.array(json.dumps(self.files)),
            **blocks,
        )
        return buffer.getvalue()

    def positions_in(self, names: Sequence[str]) -> NDArray[np.int64]:
        """Return the position of each listed image among names, (listed,); -1 if it is missing."""
        positions: dict[str, list[int]] = {}  # several images may share a name; each is used once
        for position in range(len(names) - 1, -1, -1):
            positions.setdefault(names[position], []).append(position)
        return np.array(
            [positions[n].pop() if positions.get(n) else -1 for n in self.names], np.int64
        )


def with_replacements(places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Replace the position of each missing image by that of the next present image in the list.

    The search wraps around at the end of the list.

    Args:
        places: (listed,) position of each listed image in the data set; -1 if it is missing. At
            least one image must be present.
    """
    present = np.flatnonzero(places >= 0)
    next_present = np.searchsorted(present, np.arange(len(places))) % len(present)
    result: NDArray[np.int64] = places[present[next_present]]
    return result


def fingerprint(names: Sequence[str]) -> str:
    """Return a hash of the names, independent of their order."""
    text = "\0".join(sorted(names)).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def files_of(store: Store) -> tuple[DataFile, ...]:
    """Return the containers of a store's images; () for a folder of images.

    Raises:
        DataError: the size of a container cannot be read.
    """
    paths = [file.path for file in store.files]
    if not paths and store.root.is_file():
        paths = [store.root]
    containers = []
    for path in paths:
        with os_errors_as(DataError, f"cannot read {path}"):
            resolved_path = path.resolve()
            status = resolved_path.stat()
        containers.append(DataFile(str(resolved_path), status.st_size, status.st_mtime_ns))
    return tuple(containers)


def names_of(store: Store) -> list[str]:
    """Return the names of all images, in order."""
    return [store.name(i).replace("\0", "_") for i in range(len(store))]
