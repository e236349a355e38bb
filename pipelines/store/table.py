"""Tables of images: the base class, and data sets saved by Hugging Face's ``save_to_disk``.

``save_to_disk`` writes Arrow's streaming format: batches of a thousand rows, which contain the
images' bytes unchanged. The files are memory-mapped, and pyarrow finds the offset of each image
once. After that only the mapping is needed, also in loader processes.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import AUTOMATIC, ColumnNames
from fastsiam.errors import DataError, NoImagesError, as_one_line
from fastsiam.files import parse_json

from ..remote.path import Place
from .base import PlacedStore, blocks, warn_once
from .columns import arrow_errors, columns_of, concatenate_labels, require_pyarrow
from .index import fingerprint
from .labels import number_classes
from .mapped_files import Mapped
from .probe import Bytes, probe

_CHECKED_VALUES = 8
"""Number of values of which one has to be an image, in a column that only its type suggests."""


class TableStore(PlacedStore):
    """Base class of stores whose images are the rows of tables, one table per file.

    Raises:
        DataError: there are no rows, the image column is missing or ambiguous, a named column does
            not exist, or the labels are not valid classes.
    """

    repair = "remove the row"

    def __init__(
        self,
        root: Place,
        paths: Sequence[Place],
        schemas: Sequence[Any],
        rows: Sequence[int],
        names: ColumnNames,
    ) -> None:
        self.root = root
        self._tables = [
            columns_of(path, schema, names) for path, schema in zip(paths, schemas, strict=True)
        ]
        self._named = [table.named for table in self._tables if table.named]
        """The image column of each table, if the user named one that would not be detected."""
        self._first_rows = np.cumsum([0, *rows])
        self.file = np.repeat(np.arange(len(paths)), rows)
        if not len(self.file):
            raise DataError(f"the tables in {root} have no rows")
        self.labels, self.classes = self._read_labels()

    def _read_labels(self) -> tuple[NDArray[np.int64], tuple[str, ...]]:
        """Return the images' labels, all -1 if a file has no label column, and the class names."""
        unlabelled = [table.path for table in self._tables if table.label is None]
        if unlabelled:
            if len(unlabelled) < len(self._tables):
                warn_once(
                    f"the images in {self.root} are unlabelled: {unlabelled[0]} has no label column"
                )
            return np.full(len(self.file), -1), ()
        columns, first = [], self._tables[0]
        for file, table in enumerate(self._tables):
            with arrow_errors(f"{table.path} is damaged in column {table.label!r}"):
                columns.append(self._read_leaf(file, str(table.label)))
            if table.classes and first.classes and table.classes != first.classes:
                raise DataError(
                    f"{table.path} and {first.path} have different classes: pass them as separate "
                    "data sets, each with --data"
                )
        return number_classes(concatenate_labels(columns, self.root), self.root, first.classes)

    @abstractmethod
    def _read_leaf(self, file: int, leaf: str) -> Any:
        """Return a column of a file, or a field such as ``image.path``, as an Arrow array."""

    def name(self, index: int) -> str:
        """Return the row's path or ``row N``, prefixed with the class name if it has one."""
        position, label = self.position(index), int(self.labels[index])
        row_name = self._named_paths[position] or f"row {position}"
        return f"{self.classes[label]}/{row_name}" if label >= 0 else row_name

    def where(self, index: int) -> str:
        """Return an image's row, file and name, for messages."""
        number = int(self.file[index])
        row = self.position(index) - int(self._first_rows[number])
        return f"row {row} of {self._tables[number].path} ({self.name(index)})"

    def _blocks(self) -> NDArray[np.int64]:
        return blocks(self.file, np.arange(len(self)))

    def stamp(self) -> str:
        """Return a fingerprint of the files' names, sizes and times, and of the image column."""
        return fingerprint([table.path for table in self._tables], *self._named)

    def read(self, index: int) -> Bytes:
        """Return an image's bytes.

        Raises:
            ImageError: the row has no bytes.
        """
        if len(data := self._read(index)):
            return data
        path = self._named_paths[self.position(index)]
        raise self.cannot_decode(
            index, "the row has no bytes" + (f", only the path {path}" if path else "")
        )

    def _read(self, index: int) -> Bytes:
        return super().read(index)

    @cached_property
    def _named_paths(self) -> list[str | None]:
        """The path in each row, or None: (images,)."""
        paths: list[str | None] = []
        rows = np.diff(self._first_rows).tolist()
        for file, (table, count) in enumerate(zip(self._tables, rows, strict=True)):
            file_paths: list[str | None] = []
            with contextlib.suppress(DataError), arrow_errors("no paths beside the images"):
                file_paths = self._read_leaf(file, f"{table.image}.path").to_pylist()
            paths += file_paths if len(file_paths) == count else [None] * count
        return paths

    def _check_content(self, values: Iterable[Bytes]) -> None:
        """Raise a ``NoImagesError`` if a guessed column has other bytes, such as embeddings."""
        first = self._tables[0]
        if first.is_guess:
            for data in islice(filter(len, values), _CHECKED_VALUES):
                with contextlib.suppress(ValueError):
                    probe(data)
                    return
            raise NoImagesError(
                f"{first.path} has a column of bytes, {as_one_line(first.image)}, "
                "but they are not images; if some of them are, pass --image-column"
            )

    def _check_has_bytes(self) -> None:
        """Raise a ``DataError`` if the rows have only paths of image files, not their bytes."""
        if not self.size.any() and (path := next(filter(None, self._named_paths), None)):
            raise DataError(
                f"{self.root} holds paths of images (such as {path}), not their bytes: point "
                "--data at the folder of those files, or write the data set with save_to_disk of "
                "datasets, which includes the bytes"
            )


_STATE = "state.json"


class ArrowStore(TableStore):
    """Images of a folder written by ``Dataset.save_to_disk`` of Hugging Face ``datasets``.

    Raises:
        DataError: pyarrow is missing, a file cannot be read or is corrupt, or ``TableStore`` raises
            it.
    """

    kind = "datasets' Arrow files, in place"
    files: Sequence[Mapped]

    def __init__(self, root: Path, names: ColumnNames = AUTOMATIC) -> None:
        require_pyarrow(root)
        paths = _data_files(root)
        self.files = files = [Mapped(path) for path in paths]
        tables = [_read(file) for file in files]
        schemas, rows = [table.schema for table in tables], list(map(len, tables))
        super().__init__(root, paths, schemas, rows, names)
        start, size = np.hstack(
            [
                _places(file, chunk)
                for file, columns, table in zip(files, self._tables, tables, strict=True)
                for chunk in table.flatten().column(columns.bytes).chunks
            ]
        )
        self._set_places(files, self.file, start, size)
        self._check_content(map(self._read, range(len(self))))
        self._check_has_bytes()

    def _read_leaf(self, file: int, leaf: str) -> Any:
        return _read(self.files[file]).flatten().column(leaf)


def is_saved_dataset(folder: Path) -> bool:
    """Return whether a folder was written by ``Dataset.save_to_disk``."""
    return (folder / _STATE).is_file() and (folder / "dataset_info.json").is_file()


def _data_files(root: Path) -> list[Path]:
    """Return the Arrow files of a saved data set, in the order of its rows."""
    with arrow_errors(
        f"{root / _STATE} cannot be read", "; save the data set again, with save_to_disk"
    ):
        state = parse_json((root / _STATE).read_text())
        return [root / str(file["filename"]) for file in state["_data_files"]]


def _read(file: Mapped) -> Any:
    """Return an Arrow file's table, whose buffers are views into the mapping."""
    import pyarrow

    with arrow_errors(f"{file.path} is not a complete Arrow stream", "; save the data set again"):
        stream = pyarrow.ipc.open_stream(pyarrow.BufferReader(pyarrow.py_buffer(file.view)))
        table = stream.read_all()
        table.validate(full=True)  # by default pyarrow trusts the offsets in a file
        return table


def _places(file: Mapped, data: Any) -> NDArray[np.int64]:
    """Return the offsets of a binary Arrow array's values in the file, and their sizes: (2, N)."""
    if str(data.type) == "binary_view":
        raise DataError(f"{file.path} has images of type binary_view: save them as binary")
    _, offsets, content = data.buffers()
    if not len(data) or content is None or not content.size:
        return np.zeros((2, len(data)), np.int64)
    end = data.offset + len(data) + 1  # the buffer may have padding
    is_large = str(data.type).startswith("large")
    edges = np.frombuffer(offsets, np.int64 if is_large else np.int32, end)[data.offset :]
    edges = edges.astype(np.int64)
    begin = content.address - file.address
    if not 0 <= begin <= len(file) - content.size:
        raise DataError(f"{file.path} is compressed: save the data set again without compression")
    return np.stack([begin + edges[:-1], np.diff(edges) * np.asarray(data.is_valid())])
