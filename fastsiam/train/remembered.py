"""The list of a run's images, by name and in order, which detects changes of the data.

A run's order and augmentations are functions of an image's place in the data set. A file that is
added or removed would move all places after it; the list of names keeps every image at its place,
even in another container.

For containers (.beton, tar, Arrow, parquet) the list also has the size and modification time of
each file, because a changed file may contain images of the same names. For folders it has names
only, because reading the sizes of ImageNet's files takes minutes on a network file system.

For the 1,281,167 names of ImageNet the list takes 3.8 MB (64-bit hashes would take 10 MB, and could
not name the missing images). Writing it takes 0.9 s of CPU time, reading and comparing it 0.6 s if
nothing changed, and finding out what changed 4 s.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastsiam.config.urls import Url
from fastsiam.errors import CheckpointError, DataError
from fastsiam.files import explained, parsed_json, quoted
from fastsiam.pipelines.store import BetonStore, Store

FILE = "images.npz"
"""Name of the list in a run's folder."""
_SHOWN = 3
"""Number of names that a message shows at most."""


class DataFile(NamedTuple):
    """Path, size and modification time of a container."""

    path: str
    """Absolute path, with links resolved."""
    bytes: int
    written: int
    """Modification time, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """The list of a run's images."""

    names: tuple[str, ...]
    """Name of each image, in the order of the run's data set."""
    accepted: str = ""
    """``fingerprint`` of the changed data that the user accepted; empty without such a change."""
    files: tuple[DataFile, ...] = ()
    """Containers of the images when the run last used them."""
    blocks: NDArray[np.int32] | None = field(default=None, compare=False)
    """(names,) block of each image when the run started (``Store.blocks``); None unless the run
    shuffles within a window, where the order depends on the blocks."""

    @classmethod
    def load(cls, run: Path) -> Remembered | None:
        """Read the list from a run's folder; None if there is no list.

        Raises:
            CheckpointError: the list is corrupt.
        """
        path = run / FILE
        if not path.is_file():
            return None
        try:
            with np.load(path) as file:
                names = file["names"].tobytes().decode("utf-8", "surrogateescape")
                files = parsed_json(str(file["files"])) if "files" in file else []
                own = tuple(DataFile(*facts) for facts in files)
                blocks = file.get("blocks")
                found = cls(tuple(names.split("\0")), str(file["accepted"]), own, blocks)
                one_each = (np.dtype(np.int32), (len(found.names),))
                if blocks is not None and (blocks.dtype, blocks.shape) != one_each:
                    raise ValueError("the number of blocks is not that of the images")
                return found
        except Exception as error:  # numpy and zipfile may raise anything on a corrupt archive
            raise CheckpointError(
                f"the list of the run's images is corrupt: {path}; if the data have not changed "
                f"since the run started, `rm {quoted(path)}`"
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

    def accepts(self, now: list[str]) -> bool:
        """Return whether the user accepted a change to exactly these names."""
        return self.accepted == fingerprint(now)

    def accepting(self, now: list[str]) -> Remembered:
        """Return a copy of the list that accepts a change to these names."""
        return replace(self, accepted=fingerprint(now))

    def missing_files(self, root: Path | Url) -> list[str]:
        """Return the files at or below a path that no longer exist."""
        if isinstance(root, Url):
            return []  # opening a URL reports its missing files
        within = (f for f in self.files if Path(f.path).is_relative_to(root.resolve()))
        return [file.path for file in within if not Path(file.path).exists()]

    def other_files(self, now: tuple[DataFile, ...]) -> list[tuple[DataFile, DataFile]]:
        """Return the files that changed, each as a pair: as recorded, and as it is now."""
        then = {file.path: file for file in self.files}
        return [(then[f.path], f) for f in now if f.path in then and then[f.path] != f]


def files_of(store: Store) -> tuple[DataFile, ...]:
    """Return the containers of a store's images; () for a folder of images.

    Raises:
        DataError: the size of one cannot be read.
    """
    paths = [file.path for file in store.mapped()]
    if not paths and store.root.is_file():
        paths = [store.root]
    found = []
    for path in paths:
        with explained(DataError, f"cannot read {path}"):
            whole = path.resolve()
            facts = whole.stat()
        found.append(DataFile(str(whole), facts.st_size, facts.st_mtime_ns))
    return tuple(found)


def names_of(store: Store) -> list[str]:
    """Return the names of all images, in order."""
    return [store.name(i).replace("\0", "_") for i in range(len(store))]


def set_numbers(names: Sequence[str]) -> NDArray[np.int64]:
    """Return the number of each image's data set in a mixture, (N,), from its name."""
    return np.array([int(name.partition("/")[0]) for name in names], np.int64)


def has_names(store: Store) -> bool:
    """Return whether a store has image names; files that FFCV wrote have none."""
    return not isinstance(store, BetonStore) or store.ours


def fingerprint(names: list[str]) -> str:
    """Return a hash of the names, independent of their order."""
    text = "\0".join(sorted(names)).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Change:
    """The difference between the images of a data set and those in a run's list."""

    place: NDArray[np.int64]
    """(listed,) position of each listed image in the data set; -1 if it is missing."""
    gone: tuple[str, ...]
    """Names of listed images that are missing from the data set."""
    new: tuple[str, ...]
    """Names of images that are missing from the list."""

    @classmethod
    def between(cls, remembered: Remembered, now: list[str], held: NDArray[np.int64]) -> Change:
        """Compare a run's list with a data set.

        Args:
            remembered: the run's list.
            now: names of all images of the data set.
            held: positions of the holdout set, which does not count as new.
        """
        free: dict[str, list[int]] = {}  # several images may share a name; each is used once
        for position in range(len(now) - 1, -1, -1):
            free.setdefault(now[position], []).append(position)
        place = np.array([free[n].pop() if free.get(n) else -1 for n in remembered.names], np.int64)
        new = np.setdiff1d(np.arange(len(now)), np.concatenate([place, held]))
        return cls(
            place,
            tuple(remembered.names[i] for i in np.flatnonzero(place < 0).tolist()),
            tuple(now[i] for i in new.tolist()),
        )

    def positions(self) -> NDArray[np.int64]:
        """Return the data set position of the image shown at each place of the list: (listed,).

        The augmentations are those of the place, even if another image replaces a missing one.
        """
        positions: NDArray[np.int64] = self.place[self.shown()]
        return positions

    def shown(self) -> NDArray[np.int64]:
        """Return the place of the image that is shown at each place of the list: (listed,).

        A missing image is replaced by the next one in the list that exists; after the last one, the
        list starts again.
        """
        assert not self.all_gone
        there = np.flatnonzero(self.place >= 0)
        following = np.searchsorted(there, np.arange(len(self.place))) % len(there)
        shown: NDArray[np.int64] = there[following]
        return shown

    @property
    def all_gone(self) -> bool:
        """Whether all listed images are missing."""
        return len(self.gone) == len(self.place)

    def __bool__(self) -> bool:
        """Return whether images are missing or new; another order does not count."""
        return bool(self.gone or self.new)

    def __str__(self) -> str:
        """Return one line on missing and new images."""
        parts = [(self.gone, f"of {len(self.place):,} images missing"), (self.new, "new")]
        return ", ".join(
            f"{len(names):,} {what} ({_some(names)})" for names, what in parts if names
        )


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
