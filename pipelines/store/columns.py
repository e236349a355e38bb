"""Which columns of a table hold images and labels: Arrow and parquet, as ``datasets`` write them.

All that is imported of pyarrow is imported when a table is read: it is an extra.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError
from fastsiam.files import parsed_json

from .base import numbered_classes

_IMAGES = ("image", "img", "jpg")
"""Of several columns that can hold images, one of these names is the one that is meant."""
_LABELS = ("label", "labels", "fine_label", "cls")


@dataclass(frozen=True)
class Columns:
    """The columns of a table that count."""

    image: str
    bare: bool
    """The image column holds the bytes themselves, not a struct of bytes and path."""
    label: str | None
    classes: tuple[str, ...]
    """Names of the label's numbers; empty if the schema tells none."""

    @property
    def bytes(self) -> str:
        """Name of the column of bytes, as parquet's leaves are named."""
        return self.image if self.bare else f"{self.image}.bytes"


def require_pyarrow(path: object) -> None:
    """Raise a ``DataError`` if what reads the table at ``path`` is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError as error:
        raise DataError(f"reading {path} takes pyarrow: pip install 'fastsiam[convert]'") from error


def columns_of(path: object, schema: Any) -> Columns:
    """Find the image column and, if there is one, the label column in an Arrow schema.

    The image column is found by its type: what ``datasets`` say is an image, else a struct with
    bytes in it, else bytes. The label column is found by its name, or as the only ClassLabel; it
    holds integers or text. Labels of other types, such as lists, name no class, and count as none.

    Raises:
        DataError: no column can hold images, or several can; names them.
    """
    features = _features(schema)
    able = [field.name for field in schema if _can_hold_images(field.type)]
    told = [name for name in able if _type(features.get(name)) == "Image"]
    images = told or able
    if len(images) > 1:
        images = [name for name in _IMAGES if name in images][:1] or images
    if len(images) != 1:
        which = f" ({', '.join(images)})" if images else f", of {', '.join(schema.names)}"
        raise DataError(
            f"{path} has {len(images) or 'no'} columns that can hold images{which}; one is wanted: "
            "a struct of bytes and path, or bytes; name it 'image', or take the others away"
        )
    labels = [field.name for field in schema if _can_hold_labels(field.type)]
    named = [name for name in _LABELS if name in labels]
    listed = [name for name in labels if _type(features.get(name)) == "ClassLabel"]
    label = named[0] if named else listed[0] if len(listed) == 1 else None
    names = (features.get(label) or {}).get("names") if label else None
    classes = tuple(map(str, names)) if isinstance(names, list) else ()
    bare = schema.field(images[0]).type.num_fields == 0
    return Columns(images[0], bare, label, classes)


def numbered(
    parts: list[Any], classes: tuple[str, ...], source: object
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Turn label columns into numbers of classes.

    Args:
        parts: Arrow columns of integers or of names of classes, one for each file.
        classes: names of the numbers, if they are known.
        source: for messages.

    Returns:
        (rows,) the number of each row's class, -1 where it has none; the classes' names.

    Raises:
        DataError: files differ in the type of their labels, or labels are no numbers of classes.
    """
    from pyarrow import types

    kinds = [p.type.value_type if types.is_dictionary(p.type) else p.type for p in parts]
    if len(set(map(_is_text, kinds))) > 1:
        raise DataError(
            f"{source}: the labels are numbers in some files and names in others; write them anew, "
            "alike"
        )
    if not _is_text(kinds[0]):
        try:
            found = [np.asarray(part.cast("int64").fill_null(-1), np.int64) for part in parts]
        except errors() as error:
            raise DataError(f"{source} has labels that number no class: {short(error)}") from error
        labels = np.maximum(np.concatenate(found), -1)
        classes = classes or numbered_classes(labels, source)
    else:
        own = [name for part in parts for name in part.to_pylist()]
        classes = tuple(sorted({name for name in own if name is not None}))
        place = {name: number for number, name in enumerate(classes)}
        labels = np.array([place.get(name, -1) for name in own], np.int64)
    if labels.max(initial=-1) >= len(classes):
        raise DataError(f"{source} has labels without a class name")
    return labels, classes


def errors() -> tuple[type[Exception], ...]:
    """Return what pyarrow raises on files that it cannot read."""
    import pyarrow

    return (OSError, ValueError, LookupError, TypeError, StopIteration, pyarrow.ArrowException)


def short(error: Exception) -> str:
    """Return an error's first line, as much of it as a message takes."""
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _can_hold_images(kind: Any) -> bool:
    from pyarrow import types

    if types.is_struct(kind):
        at = kind.get_field_index("bytes")
        return at >= 0 and _is_bytes(kind.field(at).type)
    return _is_bytes(kind)


def _can_hold_labels(kind: Any) -> bool:
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_integer(kind)) or _is_text(kind)


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def _is_bytes(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _features(schema: Any) -> dict[str, Any]:
    """Return what ``datasets`` leave in the schema about its columns; empty if nothing."""
    try:
        return dict(parsed_json((schema.metadata or {})[b"huggingface"])["info"]["features"])
    except (KeyError, TypeError, ValueError):
        return {}


def _type(feature: Any) -> str:
    return str(feature.get("_type")) if isinstance(feature, dict) else ""
