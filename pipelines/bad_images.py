"""The bad images of a run: images that no decoder can decode, and that loaders replace.

A run keeps a list of them in its folder. Which image replaces a bad one depends only on the list
(see ``order.Order``). So a resumed run loads the same images as an uninterrupted one, with any
pipeline and any number of ranks. A listed image stays replaced even if its file is repaired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from fastsiam.bad_image_list import BadImage, format_list, parse_list
from fastsiam.errors import DataError, ImageError

_FEW, _SHARE = 8, 100
"""Any data set may have ``_FEW`` bad images, and a large one may have one in ``_SHARE``."""

Exchange = Callable[[str], list[str]]
"""Function that gathers every rank's text on every rank; all ranks must call it."""


class BadImages:
    """The bad images of a run that are known to one rank.

    Args:
        images: number of images in an epoch, good or bad.
        known: bad images that the run found earlier.
        takes_more: whether further bad images are replaced too; otherwise they are errors.
        exchange: gathers a text from every rank.
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
        self._by_index = {image.index: image for image in known}
        self._has_grown = False

    def __len__(self) -> int:
        return len(self._by_index)

    @property
    def matters(self) -> bool:
        """Whether any bad images are known or may still be added."""
        return self._takes_more or bool(self._by_index)

    def list(self) -> list[BadImage]:
        """Return the known bad images in the order in which they were found."""
        return sorted(self._by_index.values())

    def contains(self, images: NDArray[np.int64], *, at: int) -> NDArray[np.bool_]:
        """Return which of N images were known to be bad after ``at`` steps of the run: (N,)."""
        records = map(self._by_index.get, images.tolist())
        return np.array([record is not None and record.step <= at for record in records], np.bool_)

    def note(self, error: ImageError, *, epoch: int, step: int) -> BadImage:
        """Add an image that could not be decoded; the run had done ``step`` steps.

        Raises:
            ImageError: ``error`` itself, if no further images are replaced.
            DataError: there are too many bad images.
        """
        if not self._takes_more:
            raise error
        bad_image = BadImage(step, error.index, error.name, error.reason, epoch)
        self.add([bad_image])
        return bad_image

    def share(self) -> None:
        """Exchange bad images between all ranks, each of which must call this.

        It is called at the start of each epoch and before a run is saved.

        Raises:
            DataError: there are too many bad images.
        """
        if not self.matters:
            return
        texts = self._exchange(format_list(self.list()))
        try:
            self.add([image for text in texts for image in parse_list(text)])
        finally:  # if there are too many, this rank's own
            if self._has_grown:
                self.write()

    def write(self) -> None:
        """Store the list, if this rank has a ``keep`` function."""
        self._has_grown = False
        if self._keep is not None:
            self._keep(format_list(self.list()).encode())

    def add(self, found: Sequence[BadImage]) -> None:
        """Add bad images to the list. Of two with the same index, the earlier one is kept.

        Raises:
            DataError: there are too many bad images.
        """
        merged = self._by_index.copy()
        for image in found:
            merged[image.index] = min(image, merged.get(image.index, image))
        if merged == self._by_index:
            return
        check_number(len(merged), self._images, max(merged.values()))
        self._by_index = merged  # after the check: a run that is then saved is within the limit
        self._has_grown = True


def check_number(bad: int, images: int, last: BadImage | ImageError) -> None:
    """Raise a ``DataError`` if so many images are bad that there must be another cause."""
    limit = min(max(_FEW, images // _SHARE), images - 1)
    if bad > limit:
        raise DataError(
            f"{bad:,} of {images:,} images cannot be decoded, the last one {last.name} "
            f"({last.reason}), and --bad-images replace accepts at most {limit:,}: check the data; "
            "fastsiam convert folder --skip-bad lists and skips all bad images"
        )
