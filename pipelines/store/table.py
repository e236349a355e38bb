"""Tables of images: the base class, and data sets saved by Hugging Face's ``save_to_disk``.

``save_to_disk`` writes Arrow's streaming format: batches of a thousand rows, which contain the
images' bytes unchanged. The files are memory-mapped, and pyarrow finds the offset of each image
once. After that only the mapping is needed, also in loader processes. pyarrow is an optional
dependency, so it is imported only when a table is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import AUTOMATIC, ColumnNames
from fastsiam.errors import DataError, NoImagesError, as_one_line
from fastsiam.files import parse_json

from ..remote.path import Place
from .base import PlacedStore, blocks, warn_once
from .files import Mapped
from .index import file_facts
from .labels import LABELS, number_classes
from .probe import Bytes, probe

_CHECKED_VALUES = 8
"""Number of values of which one has to be an image, in a column that only its type suggests."""
_IMAGES = ("image", "img", "jpg")
"""Preferred names if several columns can hold images; the first one that exists is used."""

_BYTES, _TEXTS = ("binary", "large_binary"), ("string", "large_string")
_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
"""Names of Arrow types."""


class Columns(NamedTuple):
    """The image and label columns of a table."""

    image: str
    bytes: str
    """The column with the encoded bytes: ``image``, or its field such as ``image.bytes``."""
    label: str | None
    classes: tuple[str, ...]
    """Class names, indexed by label; empty if the schema does not have them."""
    named: str
    """The image column, if the user named one that would not have been detected; else ""."""
    is_guess: bool
    """Whether nothing but its type, binary, says that the column has images."""


def require_pyarrow(path: object) -> None:
    """Raise a ``DataError`` if pyarrow, which reads the table at ``path``, is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError as error:
        raise DataError(f"reading {path} needs pyarrow: pip install 'fastsiam[convert]'") from error


def columns_of(path: object, schema: Any, names: ColumnNames = AUTOMATIC) -> Columns:
    """Find the image column and the optional label column in an Arrow schema.

    The image column is one that ``datasets`` declares as ``Image``, else one with binary values or
    with structs that have a field ``bytes``. Several candidates are resolved by name. The label
    column has integers or strings. It is found by its name, or as the only ``ClassLabel``. A label
    column of another type, such as lists, is ignored.

    Args:
        path: path of the table, for messages.
        schema: the Arrow schema of the table.
        names: columns to use instead of detecting them.

    Raises:
        NoImagesError: no column can hold images.
        DataError: the image column is ambiguous, or a named column does not exist or has an
            unsuitable type.
    """
    usable = {
        "image": [field.name for field in schema if _can_hold_images(field.type)],
        "label": [field.name for field in schema if _can_hold_labels(field.type)],
    }
    for role, name in names._asdict().items():
        if name and name not in usable[role]:
            exists = name in schema.names
            problem = (
                f"holds {schema.field(name).type}, not {role}s" if exists else "does not exist"
            )
            raise DataError(
                f"{path}: --{role}-column {name} {problem}; the columns are "
                f"{as_one_line(', '.join(schema.names))}"
            )
    features = _features(schema)
    images = [name for name in usable["image"] if features.get(name) == "Image"] or usable["image"]
    matches = images if len(images) == 1 else [name for name in _IMAGES if name in images][:1]
    if images and not (names.image or matches):
        raise DataError(
            f"{path} has {len(images)} columns that can hold images "
            f"({as_one_line(', '.join(images))}): name one with --image-column, such as "
            f"--image-column {as_one_line(images[0])}"
        )
    if not images:
        raise NoImagesError(
            f"{path} has no column that can hold images (a struct of bytes and path, or bytes), "
            f"only {as_one_line(', '.join(schema.names))}; a list of image files has to be a .csv"
        )
    image = names.image or matches[0]
    is_struct = schema.field(image).type.num_fields > 0
    is_declared = image in (names.image, *_IMAGES) or features.get(image) == "Image"
    class_labels = [name for name in usable["label"] if isinstance(features.get(name), list)]
    named_labels = [name for name in LABELS if name in usable["label"]]
    label = names.label or next(
        iter(named_labels or (class_labels if len(class_labels) == 1 else [])), None
    )
    classes = features.get(label) if label else None
    return Columns(
        image,
        f"{image}.bytes" if is_struct else image,
        label,
        tuple(map(str, classes)) if isinstance(classes, list) else (),
        "" if [image] == matches else image,
        not is_struct and not is_declared,
    )


def read_labels(parts: Sequence[Any], source: object) -> NDArray[np.int64] | list[str | None]:
    """Concatenate label columns: class numbers (-1 if missing), or class names (None if missing).

    Args:
        parts: Arrow columns, one per file.
        source: description of the data, for messages.

    Raises:
        DataError: some files have numbers and others names, or a number does not fit into int64.
    """
    texts = [_is_text(part.type) for part in parts]
    if len(set(texts)) > 1:
        raise DataError(
            f"{source}: the labels are numbers in some files and names in others; rewrite "
            "the files with one type"
        )
    if texts[0]:
        return [name for part in parts for name in part.to_pylist()]
    with reading(f"{source} has labels that are not class numbers"):
        return np.concatenate([part.cast("int64").fill_null(-1).to_numpy() for part in parts])


@contextlib.contextmanager
def reading(problem: str, advice: str = "") -> Iterator[None]:
    """Convert exceptions that pyarrow raises in the block to a ``DataError``.

    Args:
        problem: start of the message, such as "x.parquet is damaged".
        advice: end of the message, including its punctuation.

    Raises:
        DataError: the message has the problem, pyarrow's reason and the advice.
    """
    from pyarrow import ArrowException

    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, StopIteration, ArrowException) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise DataError(f"{problem}: {reason}{advice}") from error


def _can_hold_images(kind: Any) -> bool:
    if str(kind).startswith("struct<"):
        index = kind.get_field_index("bytes")
        return index >= 0 and str(kind.field(index).type) in _BYTES
    return str(kind) in _BYTES


def _can_hold_labels(kind: Any) -> bool:
    return _is_text(kind) or _plain(kind) in _INTEGERS


def _is_text(kind: Any) -> bool:
    """Return whether an Arrow type is a string or a dictionary of strings."""
    return _plain(kind) in _TEXTS


def _plain(kind: Any) -> str:
    """Return the name of an Arrow type, or of a dictionary's value type."""
    return str(kind.value_type if str(kind).startswith("dictionary<") else kind)


def _features(schema: Any) -> dict[str, Any]:
    """Return the features that ``datasets`` stores in a schema's metadata, or an empty dict.

    The value is the list of class names for a ClassLabel, else the name of the column's type.
    """
    try:
        features = dict(parse_json((schema.metadata or {})[b"huggingface"])["info"]["features"])
    except (KeyError, TypeError, ValueError):
        return {}
    typed_features = {
        name: feature for name, feature in features.items() if isinstance(feature, dict)
    }
    return {
        name: feature.get("names", []) if kind == "ClassLabel" else kind
        for name, feature in typed_features.items()
        for kind in [feature.get("_type")]
    }


class TableStore(PlacedStore):
    """Base class of stores whose images are the rows of tables, one table per file.

    Args:
        root: folder or file, for messages.
        paths: the files, in order.
        schemas: Arrow schema of each file.
        rows: number of rows of each file.
        names: columns that the user named.

    Raises:
        DataError: there are no rows, the image column is missing or ambiguous, a named column does
            not exist, or the labels are not valid classes.
    """

    repair = "remove the row"
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
        files = list(zip(paths, self._columns, strict=True))
        self._named = next((columns.named for columns in self._columns if columns.named), "")
        """The image column, if the user named one that would not have been detected; else ""."""
        self._first_rows = np.cumsum([0, *rows])
        self.file = np.repeat(np.arange(len(paths)), rows)
        images = len(self.file)
        if not images:
            raise DataError(f"the tables in {root} have no rows")
        self.labels, self.classes = np.full(images, -1), ()
        unlabelled = [path for path, columns in files if columns.label is None]
        if unlabelled and len(unlabelled) < len(paths):
            warn_once(f"the images in {root} are unlabelled: {unlabelled[0]} has no label column")
        if not unlabelled:
            labels = []
            for file, (path, columns) in enumerate(files):
                with reading(f"{path} is damaged in column {columns.label!r}"):
                    labels.append(self._read_leaf(file, str(columns.label)))
            classes = self._columns[0].classes
            for path, columns in files:
                if columns.classes and classes and columns.classes != classes:
                    raise DataError(
                        f"{path} and {paths[0]} have different classes: pass them as separate data "
                        "sets, each with --data"
                    )
            self.labels, self.classes = number_classes(read_labels(labels, root), root, classes)

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
        return f"row {row} of {self._paths[number]} ({self.name(index)})"

    def _blocks(self) -> NDArray[np.int64]:
        return blocks(self.file, np.arange(len(self)))

    def stamp(self) -> str:
        """Return a fingerprint of the files' names, sizes and times, and of the image column."""
        image_columns = [columns.named for columns in self._columns if columns.named]
        return hashlib.sha256(
            json.dumps([*file_facts(self._paths), *image_columns]).encode()
        ).hexdigest()

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
        for file, (columns, count) in enumerate(zip(self._columns, rows, strict=True)):
            file_paths: list[str | None] = []
            with contextlib.suppress(DataError), reading("no paths beside the images"):
                file_paths = self._read_leaf(file, f"{columns.image}.path").to_pylist()
            paths += file_paths if len(file_paths) == count else [None] * count
        return paths

    def _check_content(self, values: Iterable[Bytes]) -> None:
        """Raise a ``NoImagesError`` if a guessed column has other bytes, such as embeddings."""
        if self._columns[0].is_guess:
            for data in islice(filter(len, values), _CHECKED_VALUES):
                with contextlib.suppress(ValueError):
                    probe(data)
                    return
            raise NoImagesError(
                f"{self._paths[0]} has a column of bytes, {as_one_line(self._columns[0].image)}, "
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

    def __init__(self, root: Path, names: ColumnNames = AUTOMATIC) -> None:
        require_pyarrow(root)
        paths = _data_files(root)
        files = [Mapped(path) for path in paths]
        self._mapped = files
        tables = [_read(file) for file in files]
        schemas, rows = [table.schema for table in tables], list(map(len, tables))
        super().__init__(root, paths, schemas, rows, names)
        start, size = np.hstack(
            [
                _places(file, chunk)
                for file, columns, table in zip(files, self._columns, tables, strict=True)
                for chunk in table.flatten().column(columns.bytes).chunks
            ]
        )
        self._set_places(files, self.file, start, size)
        self._check_content(map(self._read, range(len(self))))
        self._check_has_bytes()

    def _read_leaf(self, file: int, leaf: str) -> Any:
        return _read(self._mapped[file]).flatten().column(leaf)


def is_saved_dataset(folder: Path) -> bool:
    """Return whether a folder was written by ``Dataset.save_to_disk``."""
    return (folder / _STATE).is_file() and (folder / "dataset_info.json").is_file()


def _data_files(root: Path) -> list[Path]:
    """Return the Arrow files of a saved data set, in the order of its rows."""
    with reading(f"{root / _STATE} cannot be read", "; save the data set again, with save_to_disk"):
        state = parse_json((root / _STATE).read_text())
        return [root / str(file["filename"]) for file in state["_data_files"]]


def _read(file: Mapped) -> Any:
    """Return an Arrow file's table, whose buffers are views into the mapping."""
    import pyarrow

    with reading(f"{file.path} is not a complete Arrow stream", "; save the data set again"):
        stream = pyarrow.ipc.open_stream(pyarrow.BufferReader(pyarrow.py_buffer(file.view)))
        table = stream.read_all()
        table.validate(full=True)  # by default pyarrow trusts the offsets in a file
        return table


def _places(file: Mapped, data: Any) -> NDArray[np.int64]:
    """Return the offsets of a binary Arrow array's values in the file, and their sizes: (2, N)."""
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
