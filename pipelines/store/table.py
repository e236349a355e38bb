"""The base of Arrow and parquet data sets: labels, names and the stamp."""

from __future__ import annotations

import contextlib
import hashlib
import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import ColumnNames
from fastsiam.errors import DataError, ImageError
from fastsiam.files import explained

from ..remote.path import Place
from .base import blocks
from .columns import columns_of, errors, read_labels, reading
from .labels import number_classes
from .placed import PlacedStore
from .probe import Bytes


class TableStore(PlacedStore):
    """Images that are rows of tables in files, in the files' order.

    Args:
        root: folder or file, for messages.
        paths: of the files.
        schemas: of each, as Arrow has it.
        rows: how many each has.
        names: columns that the user named.

    Raises:
        DataError: there are no rows, no column or several can hold images, a named column is not
            there, or the labels are no classes.
    """

    repair = "take the row away"
    remedy = "write it again"

    def __init__(
        self,
        root: Place,
        paths: Sequence[Place],
        schemas: Sequence[Any],
        rows: Sequence[int],
        names: ColumnNames,
    ) -> None:
        self.root, self._paths = root, paths
        self._columns = [
            columns_of(path, schema, names) for path, schema in zip(paths, schemas, strict=True)
        ]
        self._named = next((own.named for own in self._columns if own.named), "")
        """The image column, if it would not have been found."""
        self._first_rows = np.cumsum([0, *rows])
        self._names: list[str | None] | None = None
        images = int(self._first_rows[-1])
        if not images:
            raise DataError(f"{root} holds tables without rows")
        self.labels, self.classes = np.full(images, -1), ()
        if all(own.label is not None for own in self._columns):
            labels = []
            for file, (path, own) in enumerate(zip(paths, self._columns, strict=True)):
                with reading(f"{path} is damaged in column {own.label!r}"):
                    labels.append(self._read_column(file, str(own.label)))
            known = self._columns[0].classes
            self.labels, self.classes = number_classes(read_labels(labels, root), root, known)

    def _read(self, index: int) -> Bytes:
        return super().read(index)

    @abstractmethod
    def _read_column(self, file: int, column: str, part: str = "") -> Any:
        """Read a column of a file, as Arrow has it; of a struct, a part suffices."""

    def name(self, index: int) -> str:
        """Return the path that the row names, else its number; the class before it."""
        own = self._own_name(index) or f"row {self.position(index)}"
        label = int(self.labels[index])
        return f"{self.classes[label]}/{own}" if label >= 0 else own

    def where(self, index: int) -> str:
        """Return file, row and name of an image, for messages."""
        row = self.position(index)
        number = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        row -= int(self._first_rows[number])
        return f"row {row} of {self._paths[number]} ({self.name(index)})"

    def _blocks(self) -> NDArray[np.int64]:
        rows = np.arange(len(self))
        return blocks(np.searchsorted(self._first_rows, rows, side="right"), rows)

    def stamp(self) -> str:
        """Return a text that changes with the files' names, sizes and times, and the column."""
        with explained(DataError, f"cannot read the files of {self.root}"):
            stats = [(path.name, path.stat()) for path in self._paths]
        found: list[object] = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        found += [columns.named for columns in self._columns if columns.named]
        return hashlib.sha256(json.dumps(found).encode()).hexdigest()

    def read(self, index: int) -> Bytes:
        """Return an image's bytes.

        Raises:
            ImageError: the row has none.
        """
        if len(data := self._read(index)):
            return data
        named = self._own_name(index)
        problem = "the row has no bytes" + (f", but the path {named} alone" if named else "")
        raise ImageError(
            f"{self.where(index)}: {problem}; {self.ways_out()}",
            index=index,
            name=self.name(index),
            reason=problem,
        )

    def _own_name(self, index: int) -> str | None:
        if self._names is None:
            self._names = self._named_paths()
        return self._names[self.position(index)]

    def _named_paths(self) -> list[str | None]:
        """Read the path that each row names, if any: (images,)."""
        from pyarrow import compute

        paths: list[str | None] = []
        rows = np.diff(self._first_rows).tolist()
        for file, (columns, count) in enumerate(zip(self._columns, rows, strict=True)):
            own: list[str | None] = []
            with contextlib.suppress(*errors()):  # an image column without paths
                images = self._read_column(file, columns.image, "path")
                own = compute.struct_field(images, "path").to_pylist()
            paths += own if len(own) == count else [None] * count
        return paths

    def _refuse_paths_alone(self) -> None:
        """Raise a ``DataError`` if no row has bytes, and some have paths of files."""
        if not self.size.any() and (path := next(filter(None, self._named_paths()), None)):
            raise DataError(
                f"{self.root} holds paths of images (such as {path}), not their bytes: point "
                "--data at the folder of those files, or write the data set with save_to_disk of "
                "datasets, which takes the bytes in"
            )
