"""Which images a run began with, by name and in order, so that it notices when the data change.

Of containers (.beton, tar, Arrow, parquet) it remembers size and time of each file too: another
file of the same name may name the same images. Files of a folder are known by their names alone: to
ask for the sizes of as many as ImageNet has takes minutes on a network's disk.

A run's order and draws are functions of an image's place in the data set. Files that come or go
would move all places behind them; a list of the names keeps every image at its own place, in
whatever container it lies by now.

For 1,281,167 images with names as ImageNet's the list has 3.8 MB (64-bit hashes would have 10, and
could not say which images are gone). It takes 0.9 s of CPU time to make and write, and 0.6 s to
read and compare where nothing changed; to find out what changed takes 4 s.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import CheckpointError, DataError
from fastsiam.files import explained, parsed_json
from fastsiam.urls import Url

from .store import BetonStore, Store

FILE = "images.npz"
"""The list, in a run's folder."""
_SHOWN = 3
"""Most names that a message shows."""


class DataFile(NamedTuple):
    """A file that holds many images."""

    path: str
    """Without links."""
    bytes: int
    written: int
    """When, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """The list of a run's images."""

    names: tuple[str, ...]
    """Of each image, in the order of the run's data set."""
    accepted: str = ""
    """``fingerprint`` of the changed data that the user agreed to; empty: there are none."""
    files: tuple[DataFile, ...] = ()
    """Containers of the images when the run was last at work."""
    blocks: NDArray[np.int32] | None = field(default=None, compare=False)
    """(names,) which images lay side by side when the run began (``Store.blocks``), of a run that
    is shuffled by it: its order is a function of them. None: there is no need."""

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
        """Return the content of ``FILE``, which holds the list in a run's folder."""
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
        """Tell whether the user agreed to exactly the names that there are now."""
        return self.accepted == fingerprint(now)

    def accepting(self, now: list[str]) -> Remembered:
        """Return the list with the user's consent to the names that there are now."""
        return replace(self, accepted=fingerprint(now))

    def missing_files(self, root: Path | Url) -> list[str]:
        """Return the files at a path, or below it, that are not there any more."""
        if isinstance(root, Url):
            return []  # whoever opens it names what is not there
        within = (f for f in self.files if Path(f.path).is_relative_to(root.resolve()))
        return [file.path for file in within if not Path(file.path).exists()]

    def other_files(self, now: tuple[DataFile, ...]) -> list[tuple[DataFile, DataFile]]:
        """Return those files at the same path that are not what they were: then and now."""
        then = {file.path: file for file in self.files}
        return [(then[f.path], f) for f in now if f.path in then and then[f.path] != f]


def files_of(store: Store) -> tuple[DataFile, ...]:
    """Return the containers that a store's images lie in; none for the files of a folder.

    Raises:
        DataError: one cannot be asked for its size.
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


def has_names(store: Store) -> bool:
    """Tell whether a store names its images; files of FFCV's own making only count them."""
    return not isinstance(store, BetonStore) or store.ours


def fingerprint(names: list[str]) -> str:
    """Return a hash of a set of names, whatever their order."""
    text = "\0".join(sorted(names)).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Change:
    """How the images at hand differ from those that a run remembers."""

    place: NDArray[np.int64]
    """(remembered,) where each remembered image is among those at hand, or -1."""
    gone: tuple[str, ...]
    """Names of remembered images that are not there."""
    new: tuple[str, ...]
    """Names of images that the run knows nothing of."""

    @classmethod
    def between(cls, remembered: Remembered, now: list[str], held: NDArray[np.int64]) -> Change:
        """Compare.

        Args:
            remembered: the run's list.
            now: names of all images at hand.
            held: positions of those that are held out: these are not new.
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
        """Return which image at hand is shown at each remembered place: (remembered,).

        It is drawn for as the missing one would be.
        """
        positions: NDArray[np.int64] = self.place[self.shown()]
        return positions

    def shown(self) -> NDArray[np.int64]:
        """Return whose image is shown at each remembered place: (remembered,) of these places.

        In the place of one that is gone stands the next of the list that is there; after the last
        comes the first.
        """
        assert not self.all_gone
        there = np.flatnonzero(self.place >= 0)
        following = np.searchsorted(there, np.arange(len(self.place))) % len(there)
        shown: NDArray[np.int64] = there[following]
        return shown

    @property
    def all_gone(self) -> bool:
        """Whether none of the remembered images is there."""
        return len(self.gone) == len(self.place)

    def __bool__(self) -> bool:
        """Tell whether images came or went; another order is no change."""
        return bool(self.gone or self.new)

    def __str__(self) -> str:
        """Say for people what came and went."""
        parts = [(self.gone, f"of its {len(self.place):,} images gone"), (self.new, "new")]
        return ", ".join(
            f"{len(names):,} {what} ({_some(names)})" for names, what in parts if names
        )


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
