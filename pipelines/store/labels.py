"""Labels of images as numbers of classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError

_MOST_CLASSES = 10**6


def number_classes(
    labels: NDArray[np.int64] | Sequence[str | None], source: object, classes: tuple[str, ...] = ()
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Turn labels into numbers of classes.

    Args:
        labels: (images,) numbers of classes, negative for none; or names of classes, None for none,
            which are numbered by the names' order.
        source: of the labels, for messages.
        classes: names of the numbers, if they are known.

    Returns:
        (images,) the number of each image's class, -1 where it has none; the classes' names.

    Raises:
        DataError: a label is no class number.
    """
    if isinstance(labels, np.ndarray):
        numbers = np.maximum(labels, -1)
        classes = classes or name_classes(numbers, source)
        if numbers.max(initial=-1) >= len(classes):
            raise DataError(f"{source} has labels without a class name")
        return numbers, classes
    classes = tuple(sorted({name for name in labels if name is not None}))
    number: dict[str | None, int] = {name: number for number, name in enumerate(classes)}
    return np.array([number.get(name, -1) for name in labels], np.int64), classes


def name_classes(labels: NDArray[np.int64], source: object) -> tuple[str, ...]:
    """Name the classes of bare labels by their numbers: "0", "1", ...; none if all are negative.

    Raises:
        DataError: a label is no class number.
    """
    most = int(labels.max(initial=-1))
    if most >= _MOST_CLASSES:
        raise DataError(f"{source} has the label {most}, which is no number of a class")
    return tuple(str(i) for i in range(most + 1))
