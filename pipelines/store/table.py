"""What data sets of tables, Arrow or parquet, have in common: names, places of bytes, the stamp."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError, ImageError
from fastsiam.files import explained

from ..remote.path import Place
from .base import Store
from .blocks import blocks
from .columns import Columns
from .files import located, read_ahead
from .mapped import Mapped
from .probe import Bytes


@dataclass(frozen=True)
class Places:
    """Where the bytes of each image lie, in mapped files."""

    files: list[Mapped]
    file: NDArray[np.integer]
    """(images,) number of the file."""
    start: NDArray[np.integer]
    """(images,) where the bytes begin in it."""
    size: NDArray[np.integer]
    """(images,) how many there are; 0 where an image has none."""

    def read(self, index: int) -> memoryview:
        """Return an image's bytes: a view into its mapped file."""
        start = int(self.start[index])
        return self.files[int(self.file[index])].view[start : start + int(self.size[index])]

    def locate(
        self, indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Return addresses and lengths of images; None if a row has no bytes: ``read`` says so."""
        size = self.size[indices]
        if not size.all():
            return None
        return located(self.files, self.file[indices], self.start[indices], size)

    def ahead(self, indices: Sequence[int]) -> None:
        """Start to fetch images that will be read soon."""
        own = np.asarray(indices, np.int64)
        read_ahead(self.files, self.file[own], self.start[own], self.size[own])


class TableStore(Store):
    """Images that are rows of tables in files, in the files' order.

    Args:
        root: folder or file, for messages.
        files: of the tables.
        rows: how many each has.
        columns: of each.
    """

    repair = "take the row away"

    def __init__(
        self, root: Place, files: Sequence[Place], rows: list[int], columns: Sequence[Columns]
    ) -> None:
        self.root, self._paths, self._columns = root, files, columns
        self._first_rows = np.cumsum([0, *rows])
        self._names: list[str | None] | None = None
        if not self._first_rows[-1]:
            raise DataError(f"{root} holds tables without rows")

    @abstractmethod
    def _named_paths(self) -> list[str | None]:
        """Read the path that each row names, if any: (images,)."""

    @abstractmethod
    def _encoded(self, index: int) -> Bytes:
        """Return an image's bytes, none if the row has none."""

    def read(self, index: int) -> Bytes:
        """Return an image's encoded bytes.

        Raises:
            DataError: they cannot be read.
            ImageError: the row has none; names it.
        """
        data = self._encoded(index)
        if len(data):
            return data
        named = self._own_name(index)
        told = f", but the path {named} alone" if named else ""
        problem = f"the row has no bytes{told}"
        raise ImageError(
            f"{self.where(index)}: {problem}; {self.ways_out()}",
            index=index,
            name=self.name(index),
            reason=problem,
        )

    def name(self, index: int) -> str:
        """Return the path that the row names, else its number; the class before it."""
        own = self._own_name(index) or f"row {index}"
        label = int(self.labels[index])
        return f"{self.classes[label]}/{own}" if label >= 0 else own

    def where(self, index: int) -> str:
        """Return file, row and name of an image, for messages."""
        number = int(np.searchsorted(self._first_rows, index, side="right")) - 1
        row = index - int(self._first_rows[number])
        return f"row {row} of {self._paths[number]} ({self.name(index)})"

    def blocks(self) -> NDArray[np.int64]:
        """Return the numbers of the blocks that images lie in: rows of one file each."""
        rows = np.arange(len(self))
        return blocks(np.searchsorted(self._first_rows, rows, side="right"), rows)

    def stamp(self) -> str:
        """Return a text that changes with the files' names, sizes and times, and the column."""
        with explained(DataError, f"cannot read the files of {self.root}"):
            stats = [(path.name, path.stat()) for path in self._paths]
        found: list[object] = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        found += [columns.named for columns in self._columns if columns.named]
        return hashlib.sha256(json.dumps(found).encode()).hexdigest()

    def _own_name(self, index: int) -> str | None:
        if self._names is None:
            self._names = self._named_paths()
        return self._names[index]

    def _refuse_paths_alone(self, size: NDArray[np.integer]) -> None:
        """Raise a ``DataError`` if no row has bytes, and some have paths of files."""
        if not size.any() and (path := next(filter(None, self._named_paths()), None)):
            raise DataError(
                f"{self.root} holds paths of images (such as {path}), not their bytes: point "
                "--data at the folder of those files, or write the data set with save_to_disk of "
                "datasets, which takes the bytes in"
            )
