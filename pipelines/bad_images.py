"""The bad images of a run, which no decoder can decode and loaders replace.

A run keeps the list of them in its folder. Which image replaces a bad one is a function of the list
alone (``order.Order``), so a resumed run shows what it would have shown, by any pipeline on any
number of processes. An image of the list stays replaced, even if its file is repaired meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from fastsiam.bad_image_list import BadImage, format_list, parse_list
from fastsiam.errors import DataError, ImageError

_FEW, _SHARE = 8, 100
"""Any data set may have so many bad images, and a large one may have one in so many."""

Exchange = Callable[[str], list[str]]
"""Returns every rank's text on every rank; all of them call it."""


class BadImages:
    """The bad images of a run, as one rank knows them.

    Args:
        images: in an epoch, good or bad.
        known: those that the run found before.
        takes_more: whether another one is replaced too; else it is an error.
        exchange: passes texts between ranks.
        keep: stores the text of the list (``fastsiam.bad_image_list``) when it has grown.
    """

    def __init__(
        self,
        images: int,
        known: Iterable[BadImage] = (),
        *,
        takes_more: bool = True,
        exchange: Exchange = lambda text: [text],
        keep: Callable[[bytes], None] | None = None,
    ) -> None:
        self._images, self._takes_more, self._exchange = images, takes_more, exchange
        self._keep = keep
        self._known = {own.index: own for own in known}
        self._has_grown = False

    def __len__(self) -> int:
        """Return how many are known."""
        return len(self._known)

    @property
    def matter(self) -> bool:
        """Whether there are any, or may be."""
        return self._takes_more or bool(self._known)

    def list(self) -> list[BadImage]:
        """Return them in the order in which they were found."""
        return sorted(self._known.values())

    def among(self, images: NDArray[np.int64], *, at: int) -> NDArray[np.bool_]:
        """Tell which of N images were known to be bad after ``at`` steps of the run: (N,)."""
        found = map(self._known.get, images.tolist())
        return np.array([own is not None and own.step <= at for own in found], np.bool_)

    def note(self, error: ImageError, *, epoch: int, step: int) -> BadImage:
        """Add an image that could not be shown, after so many steps of the run, to the list.

        Raises:
            ImageError: the error, if bad images are not replaced.
            DataError: there are too many.
        """
        known = self._known.get(error.index)
        if not self._takes_more or (known is not None and known.step <= step):
            raise error
        own = BadImage(step, error.index, error.name, error.reason, epoch)
        self.add([own])
        return own

    def share(self) -> None:
        """Tell all ranks what each has found, before a run is saved; every rank calls it.

        Raises:
            DataError: there are too many.
        """
        if not self.matter:
            return
        texts = self._exchange(format_list(self.list()))
        self.add([own for text in texts for own in parse_list(text)])
        if self._has_grown:
            self.write()

    def write(self) -> None:
        """Store the list, if this rank keeps it."""
        self._has_grown = False
        if self._keep is not None:
            self._keep(format_list(self.list()).encode())

    def add(self, found: Sequence[BadImage]) -> None:
        """Add some to the list: of two with one index the one that was found first.

        Raises:
            DataError: there are too many.
        """
        merged = self._known.copy()
        for own in found:
            merged[own.index] = min(own, merged.get(own.index, own))
        if merged == self._known:
            return
        check_number(len(merged), self._images, max(merged.values()))
        self._known = merged  # not before: the run that is saved then has not too many
        self._has_grown = True


def check_number(bad: int, images: int, last: BadImage | ImageError) -> None:
    """Raise a ``DataError`` if so many images are bad that something else must be wrong."""
    most = min(max(_FEW, images // _SHARE), images - 1)
    if bad > most:
        raise DataError(
            f"{bad:,} of {images:,} images cannot be decoded, the last one {last.name} "
            f"({last.reason}), and --bad-images replace accepts at most {most:,}: check what is "
            "wrong with the data; fastsiam convert folder --skip-bad lists and leaves out all"
        )
