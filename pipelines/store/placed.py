"""The base of stores whose images are ranges of files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError

from .base import Store, blocks
from .files import File, Mapped
from .probe import Bytes


class PlacedStore(Store):
    """Images that lie in files: each is a range of bytes, see ``_set_places``."""

    columns: ClassVar[tuple[str, ...]] = (*Store.columns, "file", "start", "size")
    remedy: ClassVar[str] = "fetch it again"
    """What can be done about a damaged file."""

    def _set_places(
        self,
        files: Sequence[File],
        file: NDArray[np.integer],
        start: NDArray[np.integer],
        size: NDArray[np.integer],
    ) -> None:
        """Set where the images lie.

        Args:
            files: mapped, or on another machine.
            file: (images,) number of each image's file.
            start: (images,) where its bytes begin in the file.
            size: (images,) how many there are.

        Raises:
            DataError: a range lies outside of its file.
        """
        self._files, self.file, self.start, self.size = files, file, start, size
        if not files:
            return
        ends = np.array([len(one) for one in files])[file]
        outside = (start < 0) | (size < 0) | (start > ends - size)
        if outside.any():
            index = int(np.argmax(outside))
            path = files[int(file[index])].path
            raise DataError(f"{path} is damaged: image {index} lies outside of it; {self.remedy}")

    def read(self, index: int) -> Bytes:
        """Return an image's bytes: a view into a mapped file, or fetched ones."""
        start = int(self.start[index])
        file: File = self._files[self.file[index]]
        return file.read(start, start + int(self.size[index]))

    def locate(
        self, indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Return addresses and lengths of images in mapped files; None if ``read`` is needed."""
        addresses = [file.address for file in self._files if isinstance(file, Mapped)]
        if len(addresses) < max(1, len(self._files)) or not self.size[indices].all():
            return None
        base = np.array(addresses, np.int64)[self.file[indices]]
        return base + self.start[indices].astype(np.int64), self.size[indices].astype(np.int64)

    def ahead(self, indices: Sequence[int]) -> None:
        """Start to fetch images that will be read soon."""
        own = np.asarray(indices, np.int64)
        file, start = self.file[own], self.start[own].astype(np.int64)
        stop = start + self.size[own].astype(np.int64)
        for number in np.unique(file).tolist() if self._files else ():
            of_file = file == number
            ranges = zip(start[of_file].tolist(), stop[of_file].tolist(), strict=True)
            self._files[number].ahead(list(ranges))

    def mapped(self) -> Sequence[File]:
        """Return the files."""
        return self._files

    def sizes(self) -> NDArray[np.int64]:
        """Return the bytes of each image as stored: (images,)."""
        return self.size.astype(np.int64)

    def _blocks(self) -> NDArray[np.int64]:
        return blocks(self.file, self.start)
