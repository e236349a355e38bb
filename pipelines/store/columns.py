"""The image and label columns of a table, found by their types and names in its Arrow schema.

pyarrow is an optional dependency, so it is imported only when a table is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import ColumnNames
from fastsiam.errors import DataError, NoImagesError, as_one_line
from fastsiam.files import parse_json

from ..remote.path import Place
from .labels import LABELS

_IMAGES = ("image", "img", "jpg")
"""Preferred names if several columns can hold images; the first one that exists is used."""

_BYTES = ("binary", "large_binary", "binary_view")
_TEXTS = ("string", "large_string", "string_view")
_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
"""Names of Arrow types."""


class Columns(NamedTuple):
    """The image and label columns of a table."""

    path: Place
    """The table's file."""
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


@contextlib.contextmanager
def arrow_errors(problem: str, advice: str = "") -> Iterator[None]:
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


def columns_of(path: Place, schema: Any, names: ColumnNames) -> Columns:
    """Find the image column and the optional label column in an Arrow schema.

    The image column is one that ``datasets`` declares as ``Image``, else one with binary values or
    with structs that have a field ``bytes``. Several candidates are resolved by name. The label
    column has integers or strings. It is found by its name, or as the only ``ClassLabel``. A label
    column of another type, such as lists, is ignored. Columns in ``names`` are used instead.

    Raises:
        NoImagesError: no column can hold images.
        DataError: the image column is ambiguous, or a named column does not exist or has an
            unsuitable type.
    """
    images = [field.name for field in schema if _can_hold_images(field.type)]
    labels = [field.name for field in schema if _value_type(field.type) in (*_TEXTS, *_INTEGERS)]
    for role, name, usable in (("image", names.image, images), ("label", names.label, labels)):
        if name and name not in usable:
            problem = "does not exist"
            if name in schema.names:
                problem = f"holds {schema.field(name).type}, not {role}s"
            raise DataError(
                f"{path}: --{role}-column {name} {problem}; the columns are "
                f"{as_one_line(', '.join(schema.names))}"
            )
    if not images:
        raise NoImagesError(
            f"{path} has no column that can hold images (a struct of bytes and path, or bytes), "
            f"only {as_one_line(', '.join(schema.names))}; a list of image files has to be a .csv"
        )
    features = _features(schema)
    kinds = {name: feature.get("_type") for name, feature in features.items()}
    images = [name for name in images if kinds.get(name) == "Image"] or images
    preferred = images if len(images) == 1 else [name for name in _IMAGES if name in images]
    detected = next(iter(preferred), None)
    image = names.image or detected
    if image is None:
        raise DataError(
            f"{path} has {len(images)} columns that can hold images "
            f"({as_one_line(', '.join(images))}): name one with --image-column, such as "
            f"--image-column {as_one_line(images[0])}"
        )
    class_labels = [name for name in labels if kinds.get(name) == "ClassLabel"]
    named_labels = [name for name in LABELS if name in labels]
    if len(class_labels) == 1:
        named_labels += class_labels
    label = names.label or next(iter(named_labels), None)
    for column in (image, label):
        if schema.names.count(column) > 1:
            raise DataError(f"{path} has several columns named {column}: rename all but one")
    is_struct = schema.field(image).type.num_fields > 0
    is_declared = image in (names.image, *_IMAGES) or kinds.get(image) == "Image"
    classes = features.get(label or "", {}).get("names")
    return Columns(
        path,
        image,
        f"{image}.bytes" if is_struct else image,
        label,
        tuple(map(str, classes)) if isinstance(classes, list) else (),
        "" if image == detected else image,
        not is_struct and not is_declared,
    )


def concatenate_labels(
    parts: Sequence[Any], source: object
) -> NDArray[np.int64] | list[str | None]:
    """Concatenate Arrow columns: class numbers (-1 if missing), or class names (None if missing).

    Raises:
        DataError: some files have numbers and others names, or a number does not fit into int64.
    """
    texts = [_value_type(part.type) in _TEXTS for part in parts]
    if len(set(texts)) > 1:
        raise DataError(
            f"{source}: the labels are numbers in some files and names in others; rewrite "
            "the files with one type"
        )
    if texts[0]:
        return [name for part in parts for name in part.to_pylist()]
    with arrow_errors(f"{source} has labels that are not class numbers"):
        return np.concatenate([part.cast("int64").fill_null(-1).to_numpy() for part in parts])


def _can_hold_images(kind: Any) -> bool:
    if str(kind).startswith("struct<"):
        index = kind.get_field_index("bytes")
        return index >= 0 and str(kind.field(index).type) in _BYTES
    return str(kind) in _BYTES


def _value_type(kind: Any) -> str:
    """Return the name of an Arrow type, or of a dictionary's value type."""
    return str(kind.value_type if str(kind).startswith("dictionary<") else kind)


def _features(schema: Any) -> dict[str, dict[str, Any]]:
    """Return the feature of each column that ``datasets`` stores in a schema's metadata."""
    try:
        features = dict(parse_json(schema.metadata[b"huggingface"])["info"]["features"])
    except (KeyError, TypeError, ValueError):  # not written by ``datasets``
        return {}
    return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
