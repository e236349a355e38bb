"""Images in parquet files, as Hugging Face's datasets have them: an image struct and a label."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError, NoSplitError

from ..store.base import Bytes, Split, Store, numbered_classes

_SPLIT_WORDS: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "val": ("validation", "valid", "val", "test"),
}


class ParquetStore(Store):
    """Images of parquet files. One row group is read at a time, so read them in order.

    Args:
        root: folder that the files lie in, for messages.
        files: the parquet files.

    Raises:
        DataError: pyarrow is missing, or a file cannot be read or has no image column.
    """

    def __init__(self, root: Path, files: list[Path]) -> None:
        self.root, self._paths = root, files
        labels: list[NDArray[np.int64]] = []
        pieces: list[tuple[int, int, int]] = []
        sizes: list[NDArray[np.int64]] = []
        self.classes = ()
        for number, path in enumerate(files):
            table = _open(path)
            _, label = _columns(path, table)
            self.classes = self.classes or _class_names(table, label)
            if label is None:
                labels.append(np.full(table.metadata.num_rows, -1))
            else:
                column = table.read([label]).column(label).fill_null(-1)
                labels.append(column.to_numpy().astype(np.int64))
            for group in range(table.metadata.num_row_groups):
                facts = table.metadata.row_group(group)
                pieces.append((number, group, facts.num_rows))
                mean = facts.total_byte_size // max(1, facts.num_rows)
                sizes.append(np.full(facts.num_rows, mean))
        self.labels = np.concatenate(labels)
        self.classes = self.classes or numbered_classes(self.labels, root)
        if self.labels.max(initial=-1) >= len(self.classes) and self.classes:
            raise DataError(f"{root} has labels without a class name")
        counts = [count for _, _, count in pieces]
        self.groups = np.repeat(np.arange(len(pieces)), counts)
        self._pieces, self._sizes = pieces, np.concatenate([*sizes, np.zeros(0, np.int64)])
        self._first = np.cumsum([0, *counts])
        self._held: tuple[int, list[dict[str, Any]]] = (-1, [])
        if not len(self):
            raise DataError(f"{root} holds parquet files without rows")

    def read(self, index: int) -> Bytes:
        """Return an image's encoded bytes."""
        row = self._row(index)
        data = row.get("bytes") if row else None
        if data:
            return bytes(data)
        path = row.get("path") if row else None
        raise DataError(
            f"cannot read {self.where(index)}: the row has no bytes"
            + (f", only the path {path}" if path else "")
        )

    def name(self, index: int) -> str:
        """Return the path that the row names, else its number; the class before it."""
        row, label = self._row(index), int(self.labels[index])
        own = (row or {}).get("path") or f"row {index}"
        return f"{self.classes[label]}/{own}" if label >= 0 else str(own)

    def sizes(self) -> NDArray[np.int64]:
        """Return the mean bytes of each image's row group: (images,); the exact ones are inside."""
        return self._sizes

    def stamp(self) -> str:
        """Return a text that changes with the files."""
        found = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self._paths]
        return hashlib.sha256(json.dumps(found).encode()).hexdigest()

    def _row(self, index: int) -> dict[str, Any] | None:
        assert self.groups is not None
        piece = int(self.groups[index])
        if self._held[0] != piece:
            number, group, _ = self._pieces[piece]
            table = _open(self._paths[number])
            image, _ = _columns(self._paths[number], table)
            try:
                rows = table.read_row_group(group, [image]).column(image).to_pylist()
            except (OSError, ValueError) as error:
                raise DataError(
                    f"{self._paths[number]} is damaged in row group {group}: {_short(error)}"
                ) from error
            self._held = (piece, rows)
        row = self._held[1][index - int(self._first[piece])]
        return {"bytes": row, "path": None} if isinstance(row, bytes) else row


def parquet_files(root: Path, split: Split) -> list[Path]:
    """Return a split's parquet files in a folder and below it, chosen by their names.

    Raises:
        DataError: the folder has none of that split.
    """
    files = [root] if root.is_file() else sorted(root.rglob("*.parquet"))
    for word in _SPLIT_WORDS[split]:
        named = [path for path in files if path.stem.lower().startswith(word)]
        named = named or [path for path in files if path.parent.name.lower() == word]
        if named:
            return named
    words = [word for names in _SPLIT_WORDS.values() for word in names]
    named = [path for path in files if path.stem.lower().startswith(tuple(words))]
    if split == "train" and files and not named:
        return files
    raise NoSplitError(f"{root} has no parquet files of the {split} split")


def _open(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise DataError(
            "reading parquet files takes pyarrow: pip install 'fastsiam[convert]'"
        ) from error
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
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
    labels = [
        name
        for name in ("label", "labels", "fine_label", "cls")
        if name in schema.names and pyarrow.types.is_integer(schema.field(name).type)
    ]
    return images[0], labels[0] if labels else None


def _class_names(table: Any, label: str | None) -> tuple[str, ...]:
    """Read the class names that Hugging Face's datasets leave in the schema."""
    try:
        told = json.loads((table.schema_arrow.metadata or {})[b"huggingface"])
        names = told["info"]["features"][label]["names"]
        return tuple(str(name) for name in names)
    except (KeyError, TypeError, ValueError):
        return ()


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
