"""The images that a run began with, by name and in order, so that it notices when the data change.

A run's order and draws are functions of an image's place in the data set. A file that is added or
removed would move all places after it; the list of names keeps every image at its place, whatever
container it lies in by now.

For containers (.beton, tar, Arrow, parquet) the list also has size and time of each file: another
file of the same name may name the same images. Files of a folder are known by their names alone,
because asking for the sizes of ImageNet's takes minutes on a network file system.

For the 1,281,167 names of ImageNet the list takes 3.8 MB (64-bit hashes would take 10 MB, and could
not say which images are gone). It takes 0.9 s of CPU time to make and write, 0.6 s to read and
compare if nothing changed, and 4 s to find out what changed.
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
from fastsiam.files import explained, parsed_json
from fastsiam.pipelines.store import BetonStore, Store

FILE = "images.npz"
"""The list, in a run's folder."""
_SHOWN = 3
"""Most names that a message shows."""


class DataFile(NamedTuple):
    """A file that holds many images."""

    path: str
    """With links resolved."""
    bytes: int
    written: int
    """Time of its last change, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """The list of a run's images."""

    names: tuple[str, ...]
    """Of each image, in the order of the run's data set."""
    accepted: str = ""
    """``fingerprint`` of the changed data that the user accepted; empty if none were accepted."""
    files: tuple[DataFile, ...] = ()
    """Containers of the images when the run last used them."""
    blocks: NDArray[np.int32] | None = field(default=None, compare=False)
    """(names,) which images lay side by side when the run began (``Store.blocks``), if the run is
    shuffled within a window: its order depends on them."""

    @classmethod
    def load(cls, run: Path) -> Remembered | None:
        """Read a run's list; None if it has none.

        Raises:
            CheckpointError: the list is damaged.
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
                    raise ValueError("it has not one block for each image")
                return found
        except Exception as error:  # a damaged archive makes numpy and zipfile raise anything
            raise CheckpointError(
                f"{path}, the list of the run's images, is damaged: delete it, if the data are "
                "what they were when the run began"
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
        """Tell whether the user accepted exactly the names that there are now."""
        return self.accepted == fingerprint(now)

    def accepting(self, now: list[str]) -> Remembered:
        """Return the list with the names that there are now as accepted."""
        return replace(self, accepted=fingerprint(now))

    def missing_files(self, root: Path | Url) -> list[str]:
        """Return the files at a path, or below it, that do not exist any more."""
        if isinstance(root, Url):
            return []  # opening it names what is missing
        within = (f for f in self.files if Path(f.path).is_relative_to(root.resolve()))
        return [file.path for file in within if not Path(file.path).exists()]

    def other_files(self, now: tuple[DataFile, ...]) -> list[tuple[DataFile, DataFile]]:
        """Return the files that changed at their path, each as it was then and as it is now."""
        then = {file.path: file for file in self.files}
        return [(then[f.path], f) for f in now if f.path in then and then[f.path] != f]


def files_of(store: Store) -> tuple[DataFile, ...]:
    """Return the containers that a store's images lie in; () for the files of a folder.

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
    """Return which data set of a mixture each image is of, by its name (``MixedStore``)."""
    return np.array([int(name.partition("/")[0]) for name in names], np.int64)


def has_names(store: Store) -> bool:
    """Tell whether a store names its images; files of FFCV's own writer only count them."""
    return not isinstance(store, BetonStore) or store.ours


def fingerprint(names: list[str]) -> str:
    """Return a hash of names that does not depend on their order."""
    text = "\0".join(sorted(names)).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Change:
    """The difference between the images of a data set and those that a run remembers."""

    place: NDArray[np.int64]
    """(remembered,) position of each remembered image in the data set, or -1."""
    gone: tuple[str, ...]
    """Names of remembered images that are missing."""
    new: tuple[str, ...]
    """Names of images that the run does not remember."""

    @classmethod
    def between(cls, remembered: Remembered, now: list[str], held: NDArray[np.int64]) -> Change:
        """Compare a run's list with a data set.

        Args:
            remembered: the run's list.
            now: names of all images of the data set.
            held: positions of those that are held out, which do not count as new.
        """
        free: dict[str, list[int]] = {}  # several images may have one name: each is taken once
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
        """Return the position of the image that is shown at each remembered place: (remembered,).

        The parameters are those of the place, also where another image replaces a missing one.
        """
        positions: NDArray[np.int64] = self.place[self.shown()]
        return positions

    def shown(self) -> NDArray[np.int64]:
        """Return the place whose image is shown at each remembered place: (remembered,).

        A missing image is replaced by the next one of the list that exists; after the last comes
        the first.
        """
        assert not self.all_gone
        there = np.flatnonzero(self.place >= 0)
        following = np.searchsorted(there, np.arange(len(self.place))) % len(there)
        shown: NDArray[np.int64] = there[following]
        return shown

    @property
    def all_gone(self) -> bool:
        """Whether all remembered images are missing."""
        return len(self.gone) == len(self.place)

    def __bool__(self) -> bool:
        """Tell whether images are gone or new; another order is no change."""
        return bool(self.gone or self.new)

    def __str__(self) -> str:
        """Return one line on what is gone and what is new."""
        parts = [(self.gone, f"of its {len(self.place):,} images gone"), (self.new, "new")]
        return ", ".join(
            f"{len(names):,} {what} ({_some(names)})" for names, what in parts if names
        )


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
