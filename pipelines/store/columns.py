"""The image and label columns of Arrow and parquet tables, as ``datasets`` writes them.

pyarrow is an extra, so it is imported only when a table is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import AUTOMATIC, ColumnNames
from fastsiam.errors import DataError, NoImagesError, in_a_line
from fastsiam.files import parsed_json

LABELS = ("label", "labels", "fine_label", "cls")
"""Names of label columns; the first that a table has is taken."""
_IMAGES = ("image", "img", "jpg")
"""Of several columns that can hold images, one with such a name is taken."""

_BYTES, _TEXTS = ("binary", "large_binary"), ("string", "large_string")
_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
"""Names of Arrow's types."""


class Columns(NamedTuple):
    """The columns of a table that count."""

    image: str
    bytes: str
    """What holds the bytes: the image column itself, or a part of it such as ``image.bytes``."""
    label: str | None
    classes: tuple[str, ...]
    """Names of the label's numbers; empty if the schema tells none."""
    named: str
    """The image column, if it was named and would not have been found; else empty."""


def require_pyarrow(path: object) -> None:
    """Raise a ``DataError`` if what reads the table at ``path`` is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError as error:
        raise DataError(f"reading {path} takes pyarrow: pip install 'fastsiam[convert]'") from error


def columns_of(path: object, schema: Any, names: ColumnNames = AUTOMATIC) -> Columns:
    """Find the image column and, if there is one, the label column in an Arrow schema.

    The image column is found by its type: what ``datasets`` say is an image, else a struct with
    bytes in it, else bytes. The label column holds integers or text, and is found by its name, or
    as the only ClassLabel. A column of labels of another type, such as lists, counts as none.

    Args:
        path: of the table, for messages.
        schema: of the table.
        names: columns that are taken instead of those that would be found.

    Raises:
        NoImagesError: no column can hold images.
        DataError: several can; or a named column is not there or is of another type.
    """
    able = {
        "image": [field.name for field in schema if _can_hold_images(field.type)],
        "label": [field.name for field in schema if _can_hold_labels(field.type)],
    }
    for what, name in names._asdict().items():
        if name and name not in able[what]:
            there = name in schema.names
            problem = f"holds {schema.field(name).type}, not {what}s" if there else "is not there"
            raise DataError(
                f"{path}: --{what}-column {name} {problem}; the columns are "
                f"{in_a_line(', '.join(schema.names))}"
            )
    features = _features(schema)
    images = [name for name in able["image"] if features.get(name) == "Image"] or able["image"]
    found = images if len(images) == 1 else [name for name in _IMAGES if name in images][:1]
    if images and not (names.image or found):
        raise DataError(
            f"{path} has {len(images)} columns that can hold images "
            f"({in_a_line(', '.join(images))}): name one with --image-column, such as "
            f"--image-column {in_a_line(images[0])}"
        )
    if not images:
        raise NoImagesError(
            f"{path} has no column that can hold images (a struct of bytes and path, or bytes), "
            f"only {in_a_line(', '.join(schema.names))}; a list of image files is a .csv"
        )
    image = names.image or found[0]
    declared = [name for name in able["label"] if isinstance(features.get(name), list)]
    known = [name for name in LABELS if name in able["label"]]
    label = names.label or next(iter(known or (declared if len(declared) == 1 else [])), None)
    classes = features.get(label) if label else None
    return Columns(
        image,
        f"{image}.bytes" if schema.field(image).type.num_fields else image,
        label,
        tuple(map(str, classes)) if isinstance(classes, list) else (),
        "" if [image] == found else image,
    )


def read_labels(parts: Sequence[Any], source: object) -> NDArray[np.int64] | list[str | None]:
    """Return what label columns hold: numbers of classes, or names of classes.

    Args:
        parts: Arrow columns, one for each file.
        source: for messages.

    Raises:
        DataError: files differ in the type of their labels, or labels are too large.
    """
    texts = [_is_text(part.type) for part in parts]
    if len(set(texts)) > 1:
        raise DataError(
            f"{source}: the labels are numbers in some files and names in others; rewrite them, "
            "alike"
        )
    if texts[0]:
        return [name for part in parts for name in part.to_pylist()]
    with reading(f"{source} has labels that number no class"):
        return np.concatenate([part.cast("int64").fill_null(-1).to_numpy() for part in parts])


@contextlib.contextmanager
def reading(problem: str, advice: str = "") -> Iterator[None]:
    """Turn what pyarrow raises in the block into an error of the user's world.

    Args:
        problem: what is wrong if it raises something, such as "x.parquet is damaged".
        advice: what the user can do.

    Raises:
        DataError: the problem, pyarrow's reason and the advice.
    """
    from pyarrow import ArrowException

    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, StopIteration, ArrowException) as error:
        why = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise DataError(f"{problem}: {why}{advice}") from error


def _can_hold_images(kind: Any) -> bool:
    if str(kind).startswith("struct<"):
        at = kind.get_field_index("bytes")
        return at >= 0 and str(kind.field(at).type) in _BYTES
    return str(kind) in _BYTES


def _can_hold_labels(kind: Any) -> bool:
    return _is_text(kind) or _plain(kind) in _INTEGERS


def _is_text(kind: Any) -> bool:
    """Tell whether an Arrow type is that of text, perhaps by a dictionary of it."""
    return _plain(kind) in _TEXTS


def _plain(kind: Any) -> str:
    """Return the name of an Arrow type; of a dictionary, that of its values."""
    return str(kind.value_type if str(kind).startswith("dictionary<") else kind)


def _features(schema: Any) -> dict[str, Any]:
    """Return what ``datasets`` leave in the schema about its columns; empty if nothing.

    Of a ClassLabel it is the list of its names, of another column the name of its type.
    """
    try:
        found = dict(parsed_json((schema.metadata or {})[b"huggingface"])["info"]["features"])
    except (KeyError, TypeError, ValueError):
        return {}
    own = {name: feature for name, feature in found.items() if isinstance(feature, dict)}
    return {
        name: feature.get("names", []) if kind == "ClassLabel" else kind
        for name, feature in own.items()
        for kind in [feature.get("_type")]
    }
