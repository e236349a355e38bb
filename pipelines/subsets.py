"""Parts of a data set: some percent of every class, so many images, or those that a list names.

Low-shot evaluation trains on 1 or 10 percent of ImageNet's labels; ``convert --limit`` takes so
many images; ``--holdout`` keeps a share of each class for validation. A subset is an ascending
array of positions in the data set, which ``build_loader`` and ``build_eval_loader`` take as
``chosen``.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError
from fastsiam.files import explained
from fastsiam.views import rng

from .store import Store

_SHOWN = 3
"""Most lines of a list that a message names."""
_NONE, _SEVERAL = -1, -2
"""In the place of a position: no image has that name, or more than one has."""


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
    key = rng.keys(seed, rng.Stream.SHARE, np.arange(len(labels)))
    order, rank, count = _ranked(labels, key)
    wanted = np.maximum(np.rint(count * percent / 100), 1)
    return np.sort(order[rank < wanted])


def sample(labels: NDArray[np.int64], *, size: int, seed: int) -> NDArray[np.int64]:
    """Draw so many images, the classes in their proportions; the seed decides which.

    Args:
        labels: (N,) class of each image of the data set; images without a label are one class.
        size: how many to draw, at most N.
        seed: another draws others.

    Returns:
        (size,) int64 positions, ascending: a function of the arguments alone.
    """
    key = rng.keys(seed, 0, rng.Stream.LIMIT, np.arange(len(labels)))
    order, rank, count = _ranked(labels, key)
    share = (rank + 0.5) / count
    return np.sort(order[np.lexsort((key[order], share))[:size]])


def hold_out(store: Store, *, percent: float) -> NDArray[np.int64]:
    """Draw the same share of every class by the images' names, to validate on.

    Of each class at least one image is drawn and at least one is left. Which ones is a function of
    the names and labels alone, whatever the order of the images and the container they lie in.

    Args:
        store: the data set; images without a label are one class.
        percent: of each class's images, above 0 and below 100; halves are rounded to even.

    Returns:
        (n,) int64 positions, ascending.
    """
    digests = b"".join(
        hashlib.blake2b(store.name(i).encode("utf-8", "surrogateescape"), digest_size=8).digest()
        for i in range(len(store))
    )
    key = rng.keys(0, 0, rng.Stream.HOLDOUT, np.frombuffer(digests, "<u8"))
    order, rank, count = _ranked(store.labels, key)
    wanted = np.minimum(np.maximum(np.rint(count * percent / 100), 1), count - 1)
    return np.sort(order[rank < wanted])


def _ranked(
    labels: NDArray[np.int64], key: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Sort images by class, and within each class by their random key.

    Returns:
        Three (N,) arrays, each in the sorted order: the image's position in the data set, its place
        within its class, and how many images its class has.
    """
    order = np.lexsort((key, labels))
    _, begin, count = np.unique(labels[order], return_index=True, return_counts=True)
    rank = np.arange(len(labels)) - np.repeat(begin, count)
    return order, rank, np.repeat(count, count)


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
    with explained(DataError, f"cannot read the list {path}"):
        text = path.read_text("utf-8", "surrogateescape")
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
