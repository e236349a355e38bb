"""Settings of a conversion."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fastsiam.config.urls import Url

from .data import Alpha, ColumnNames, DataConfig, Exif
from .setting import Config, require, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig(Config):
    """Conversion of a data set into .beton files."""

    source: str = setting("", "Folder or file of the data. Default: $FASTSIAM_DATA, else ./data.")
    image_column: str = setting("", "Image column of parquet or Arrow data, or of a list.")
    label_column: str = setting("", "Label column of parquet or Arrow data, or of a list.")
    out: str = setting("", "Folder to write. Default: the source's name with -beton.")
    max_side: int = setting(0, "Shrink images with a longer longer side; 0: none.", at_least=0)
    short_side: int = setting(0, "Shrink images with a longer shorter side; 0: none.", at_least=0)
    quality: int = setting(
        95, "JPEG quality of shrunk images, CMYK and other formats.", at_least=1, at_most=100
    )
    raw: bool | None = setting(None, "Store pixels. Default: of images that come as pixels.")
    exif: Exif = setting("ignore", "EXIF orientation: ignore it, or apply it and encode again.")
    alpha: Alpha = setting("drop", "Transparency: drop it, or draw over white or black.")
    limit: int = setting(0, "Most images of each split; 0: all.", at_least=0)
    seed: int = setting(0, "Decides which images --limit takes.")
    part: str = setting("", "Convert one part of several, such as 2/8, of a data set.")
    parts: int = setting(
        0,
        "Convert into so many parts, by dask's workers; other schedulers run --part, such as 2/8. "
        "0 makes one file of each split, here.",
        at_least=0,
        at_most=99999,
    )
    scheduler: str = setting(
        "", "Address of dask's scheduler. Default: $DASK_SCHEDULER_ADDRESS, else local workers."
    )
    skip_bad: bool = setting(False, "Leave out images that cannot be read, and list them.")
    workers: int = setting(-1, "Processes; -1: one for each core.", at_least=-1)

    def check(self) -> None:
        """Refuse settings that contradict each other."""
        require(self.workers != 0, "workers must be -1 or at least 1, not 0")
        require(
            self.parts > 0 or not self.scheduler,
            "--scheduler converts parts: say how many by --parts, a few for each machine",
        )
        require(not (self.parts and self.part), "--part is one of --parts: leave one of them out")
        number, count = self.part_of
        require(1 <= number <= count <= 99999, f"part must be such as 2/8, not {self.part!r}")

    @property
    def root(self) -> Path | Url:
        """Where the data are, with the default filled in."""
        return DataConfig(data=self.source).root

    @property
    def columns(self) -> ColumnNames:
        """Columns of a table that hold images and labels, where they are named."""
        return ColumnNames(self.image_column, self.label_column)

    @property
    def part_of(self) -> tuple[int, int]:
        """Number of the part, from 1, and how many there are; (0, -1) if it makes no sense."""
        match = re.fullmatch(r"([0-9]+)/([0-9]+)", self.part or "1/1")
        return (int(match[1]), int(match[2])) if match else (0, -1)
