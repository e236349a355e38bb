"""The one implementation of ``DetectionSet``: checked pictures, and the files of their images."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from fastsiam.errors import DataError

from .annotations import DetectionSet, Picture
from .files import Files


@dataclass(frozen=True)
class Part:
    """Pictures whose images lie in one place."""

    pictures: Sequence[Picture]
    files: Files
    digest: str
    """Of the annotations, as they were read."""


class Annotated(DetectionSet):
    """Pictures of one or several places.

    Raises:
        DataError: there is no picture, or two have the same number.
    """

    def __init__(self, name: str, classes: tuple[str, ...], parts: Sequence[Part]) -> None:
        self.name, self.classes, self._parts = name, classes, tuple(parts)
        self._entries = [(picture, part.files) for part in parts for picture in part.pictures]
        if not self._entries:
            raise DataError(f"{name} has no images")
        files: dict[int, str] = {}
        for picture, _ in self._entries:
            if picture.image_id in files:
                raise DataError(
                    f"{name} has two images with the number {picture.image_id}: "
                    f"{files[picture.image_id]} and {picture.file}"
                )
            files[picture.image_id] = picture.file

    def __len__(self) -> int:
        """Count the pictures."""
        return len(self._entries)

    def picture(self, index: int) -> Picture:
        """Return a picture's objects."""
        return self._entries[index][0]

    def read(self, index: int) -> bytes:
        """Return a picture's image as encoded."""
        picture, files = self._entries[index]
        return files.read(picture.file)

    def stamp(self) -> str:
        """Return a text that changes when the annotations or the images' files do."""
        digest = hashlib.sha256("\0".join(self.classes).encode())
        for part in self._parts:
            names = [picture.file for picture in part.pictures]
            digest.update(f"{part.digest}\0{part.files.stamp(names)}\0".encode())
        return digest.hexdigest()
