"""Parts of a data set: some percent of every class, or the images that a list names.

Low-shot evaluation trains on 1 or 10 percent of ImageNet's labels. A subset is an ascending array
of positions in the data set, which ``build_loader`` and ``build_eval_loader`` take as ``chosen``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError
from fastsiam.views import rng

from .store import Store

_NOT_AN_EPOCH = -1
"""In the place of an epoch in a key, so that no order and no augmentation draws the same."""
_SHOWN = 3
_NONE, _SEVERAL = -1, -2


def choose(labels: NDArray[np.int64], *, percent: float, seed: int) -> NDArray[np.int64]:
    """Draw the same share of every class, and of each at least one image.

    Args:
        labels: (N,) class of each image of the data set, such as ``Store.labels``.
        percent: of each class's images, above 0 and up to 100; halves are rounded to even.
        seed: another draws others.

    Returns:
        (n,) int64 positions, ascending: a function of the arguments alone.

    Raises:
        DataError: images have no label.
        ValueError: ``percent`` is no share.
    """
    if not 0 < percent <= 100:
        raise ValueError(f"percent must be above 0 and at most 100, not {percent}")
    if unlabelled := int((labels < 0).sum()):
        raise DataError(
            f"a share of every class needs labels, and {unlabelled:,} of {len(labels):,} images "
            "have none"
        )
    key = rng.keys(seed, _NOT_AN_EPOCH, np.arange(len(labels)))
    order = np.lexsort([key, labels])  # by class, and within a class at random
    _, begin, count = np.unique(labels[order], return_index=True, return_counts=True)
    wanted = np.maximum(np.rint(count * percent / 100), 1)
    rank = np.arange(len(labels)) - np.repeat(begin, count)
    return np.sort(order[rank < np.repeat(wanted, count)])


def read_list(store: Store, path: Path) -> NDArray[np.int64]:
    """Find the images that a text file names, one a line.

    Args:
        store: the data set.
        path: of the list. A line is an image's name within the data set (``class/file.jpg``), or
            the file's name alone if there is but one of that name, as in the lists that SimCLR's
            authors published for 1 and 10 percent of ImageNet. Blank lines do not count.

    Returns:
        (n,) int64 positions, ascending, each once.

    Raises:
        DataError: the list cannot be read, is empty, or names images that are not there or that
            several files could be.
    """
    try:
        text = path.read_text("utf-8", "surrogateescape")
    except OSError as error:
        raise DataError(f"cannot read the list {path}: {error.strerror}") from error
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    if not lines:
        raise DataError(f"the list {path} names no image")
    names = [store.name(i) for i in range(len(store))]
    place = {name.rpartition("/")[2]: _NONE for name in names}
    for i, name in enumerate(names):
        base = name.rpartition("/")[2]
        place[base] = i if place[base] == _NONE else _SEVERAL
    place |= {name: i for i, name in enumerate(names)}
    found = np.array([place.get(line, _NONE) for line in lines])
    for kind, problem in ((_NONE, "not there"), (_SEVERAL, "there more than once")):
        if wrong := [lines[i] for i in np.flatnonzero(found == kind)]:
            more = ", ..." if len(wrong) > _SHOWN else ""
            raise DataError(
                f"{len(wrong):,} of the {len(lines):,} images that {path} names are {problem} in "
                f"{store.root}: {', '.join(wrong[:_SHOWN])}{more}"
            )
    return np.unique(found)
