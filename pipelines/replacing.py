"""A loader in which another image is shown in the place of each that is bad.

Which one is decided by the order, which every pipeline asks. So all that is left to do when an
image turns out to be bad is to tell the order, and to begin with that batch again: a loader's epoch
may begin at any of its steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import ImageError
from fastsiam.views.batch import Batch, CropLoader, Crops, Loader
from fastsiam.views.draws import ViewParams

from .bad_images import BadImages

log = logging.getLogger(__name__)

Made = TypeVar("Made")


def replacing(loader: Loader, bad: BadImages) -> Loader:
    """Return a loader that goes on where another meets a bad image.

    Args:
        loader: whose order has the same list of bad images.
        bad: the list, which grows.
    """
    kind = _ReplacingCrops if isinstance(loader, CropLoader) else _Replacing
    return kind(loader, bad)


class _Replacing:
    """Batches of another loader, and no bad image among them; see ``replacing``."""

    def __init__(self, loader: Loader, bad: BadImages) -> None:
        self.source, self.images, self.steps = loader.source, loader.images, loader.steps
        self._loader, self._bad = loader, bad

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from step ``skip`` on."""
        self._bad.share()
        return self._going_on(self._loader.epoch, number, skip)

    def close(self) -> None:
        """Close the loader."""
        self._loader.close()

    def _going_on(
        self, begin: Callable[..., Iterator[Made]], number: int, skip: int
    ) -> Iterator[Made]:
        step = skip
        while True:
            try:
                for made in begin(number, skip=step):
                    yield made
                    step += 1
                return
            except ImageError as error:
                own = self._bad.note(error, epoch=number, step=number * self.steps + step)
                log.warning(
                    f"bad image {own.index:,} ({own.name}): {own.reason}; another one is shown in "
                    "its place"
                )


class _ReplacingCrops(_Replacing):
    """The same of a loader that yields crops too."""

    _loader: CropLoader

    def crops(
        self, number: int, *, skip: int = 0
    ) -> Iterator[tuple[NDArray[np.int64], ViewParams, Crops]]:
        """Yield what ``epoch`` makes its batches of; see ``fastsiam.views.batch.CropLoader``."""
        return self._going_on(self._loader.crops, number, skip)
