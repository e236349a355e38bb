"""Images in parquet files, as Hugging Face's datasets have them: an image struct and a label."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError, NoSplitError
from fastsiam.files import explained

from ..store.base import Bytes, Split, Store, numbered_classes

_ROWS = 64
"""Read at a time."""
_SPLIT_WORDS: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("validation", "valid", "val", "test"),
}


class ParquetStore(Store):
    """Images of parquet files. Read them in order: one row group is held at a time.

    Args:
        root: folder that the files lie in, for messages.
        files: the parquet files.

    Raises:
        DataError: pyarrow is missing, or a file cannot be read or has no image column.
    """

    kind = "parquet files"

    def __init__(self, root: Path, files: list[Path]) -> None:
        self.root, self._files = root, files
        labels: list[Any] = []
        pieces: list[tuple[int, int, int]] = []
        sizes: list[NDArray[np.int64]] = []
        self.classes = ()
        for number, path in enumerate(files):
            table = _open(path)
            _, label = _columns(path, table)
            self.classes = self.classes or _class_names(table, label)
            labels += _labels(path, table, label)
            for group in range(table.metadata.num_row_groups):
                facts = table.metadata.row_group(group)
                pieces.append((number, group, facts.num_rows))
                mean = facts.total_byte_size // max(1, facts.num_rows)
                sizes.append(np.full(facts.num_rows, mean))
        if not labels:
            raise DataError(f"{root} holds parquet files without rows")
        if any(isinstance(label, str) for label in labels):
            self.classes = tuple(sorted({str(label) for label in labels if label is not None}))
            place = {name: number for number, name in enumerate(self.classes)}
            labels = [place.get(str(label), -1) if label is not None else -1 for label in labels]
        self.labels = np.array([-1 if label is None else label for label in labels], np.int64)
        self.labels = np.maximum(self.labels, -1)
        self.classes = self.classes or numbered_classes(self.labels, root)
        if self.labels.max() >= len(self.classes):
            raise DataError(f"{root} has labels without a class name")
        counts = [count for _, _, count in pieces]
        self.groups = np.repeat(np.arange(len(pieces)), counts)
        self._pieces, self._sizes = pieces, np.concatenate(sizes)
        self._first = np.cumsum([0, *counts])
        self._reader = _GroupReader()

    def read(self, index: int) -> Bytes:
        """Return an image's encoded bytes."""
        assert self.groups is not None
        piece = int(self.groups[index])
        number, group, _ = self._pieces[piece]
        row = self._reader.row(self._files[number], group, index - int(self._first[piece]))
        data = row.get("bytes") if isinstance(row, dict) else row
        if data:
            return bytes(data)
        raise DataError("the row has no bytes")

    def name(self, index: int) -> str:
        """Return the path that the row names, else its number; the class before it."""
        label = int(self.labels[index])
        own = self._paths[index] or f"row {index}"
        return f"{self.classes[label]}/{own}" if label >= 0 else own

    def sizes(self) -> NDArray[np.int64]:
        """Return about the bytes of each image: (images,) means of its row group."""
        return self._sizes

    def stamp(self) -> str:
        """Return a text that changes with the files."""
        with explained(DataError, f"cannot read the files of {self.root}"):
            stats = [(path.name, path.stat()) for path in self._files]
        found = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        return hashlib.sha256(json.dumps(found).encode()).hexdigest()

    @cached_property
    def _paths(self) -> list[str | None]:
        """The path that each row names, if any: read without the images."""
        paths: list[str | None] = []
        for file in self._files:
            table = _open(file)
            image, _ = _columns(file, table)
            try:
                column = table.read([f"{image}.path"]).column(image)
                paths += [row and row["path"] for row in column.to_pylist()]
            except _errors():  # an image column without paths
                paths += [None] * table.metadata.num_rows
        return paths


class _GroupReader:
    """Reads the rows of row groups, in order, a few at a time."""

    def __init__(self) -> None:
        self._place: tuple[Path, int] | None = None
        self._batches: Iterator[Any] = iter(())
        self._rows: Any = []
        self._next = 0

    def row(self, file: Path, group: int, number: int) -> Any:
        """Return a row of the image column.

        Raises:
            DataError: the group is damaged.
        """
        try:
            if self._place != (file, group) or number < self._next - len(self._rows):
                self._place = None
                table = _open(file)
                image, _ = _columns(file, table)
                self._batches = table.iter_batches(_ROWS, row_groups=[group], columns=[image])
                self._rows, self._next = [], 0
                self._place = (file, group)
            while number >= self._next:
                self._rows = next(self._batches).column(0)
                self._next += len(self._rows)
            return self._rows[number - (self._next - len(self._rows))].as_py()
        except _errors() as error:
            self._place = None
            raise DataError(f"{file} is damaged in row group {group}: {_short(error)}") from None


def parquet_files(root: Path, split: Split) -> list[Path]:
    """Return a split's parquet files in a folder and below it, chosen by their names.

    Raises:
        DataError: the folder has none of that split.
    """
    files = [root] if root.is_file() else sorted(root.rglob("*.parquet"))
    if not files:
        raise DataError(f"{root} holds no .parquet files")
    for word in _SPLIT_WORDS[split]:
        named = [path for path in files if path.stem.lower().startswith(word)]
        named = named or [path for path in files if path.parent.name.lower() == word]
        if named:
            return named
    words = [word for names in _SPLIT_WORDS.values() for word in names]
    if split == "train" and not any(path.stem.lower().startswith(tuple(words)) for path in files):
        return files
    raise NoSplitError(
        f"{root} has no parquet files of the {split} split (named {_SPLIT_WORDS[split][0]}-...)"
    )


def _open(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise DataError(
            "reading parquet files takes pyarrow: pip install 'fastsiam[convert]'"
        ) from error
    try:
        return parquet.ParquetFile(path)
    except _errors() as error:
        raise DataError(f"{path} is no whole parquet file: {_short(error)}") from error


def _columns(path: Path, table: Any) -> tuple[str, str | None]:
    """Return the names of the image column and, if there is one, the label column."""
    import pyarrow

    schema = table.schema_arrow
    images = [
        field.name
        for field in schema
        if (pyarrow.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0)
        or pyarrow.types.is_binary(field.type)
        or pyarrow.types.is_large_binary(field.type)
    ]
    for wanted in ("image", "img", "jpg"):
        if wanted in images:
            images = [wanted]
    if len(images) != 1:
        raise DataError(
            f"{path} has {len(images)} columns that can hold images, of {schema.names}; "
            "one named 'image', of a struct of bytes and path, is wanted"
        )
    labels = [name for name in ("label", "labels", "fine_label", "cls") if name in schema.names]
    return images[0], labels[0] if labels else None


def _labels(path: Path, table: Any, name: str | None) -> list[int | str | None]:
    """Read the label column: numbers, or names of classes."""
    import pyarrow

    if name is None:
        return [-1] * int(table.metadata.num_rows)
    kind = table.schema_arrow.field(name).type
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if not (
        pyarrow.types.is_integer(kind)
        or pyarrow.types.is_string(kind)
        or pyarrow.types.is_large_string(kind)
    ):
        raise DataError(f"{path}: the labels in column {name!r} are of type {kind}")
    try:
        labels: list[int | str | None] = table.read([name]).column(name).to_pylist()
    except _errors() as error:
        raise DataError(f"{path} is damaged in column {name!r}: {_short(error)}") from error
    return labels


def _class_names(table: Any, label: str | None) -> tuple[str, ...]:
    """Read the class names that Hugging Face's datasets leave in the schema."""
    try:
        told = json.loads((table.schema_arrow.metadata or {})[b"huggingface"])
        names = told["info"]["features"][label]["names"]
        return tuple(str(name) for name in names)
    except (KeyError, TypeError, ValueError):
        return ()


def _errors() -> tuple[type[Exception], ...]:
    """Return what pyarrow raises on files that it cannot read."""
    import pyarrow

    return (OSError, ValueError, KeyError, StopIteration, pyarrow.ArrowException)


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
