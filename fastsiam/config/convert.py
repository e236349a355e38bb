"""Settings of ``fastsiam convert``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fastsiam.config.urls import Url

from .data import Alpha, ColumnNames, DataConfig, Exif
from .setting import Config, require, setting


def check_workers(number: int) -> None:
    """Raise ``ValueError`` for no worker processes; -1 stands for one per core."""
    require(number != 0, "workers must be -1 or at least 1, not 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig(Config):
    """Conversion of a data set into .beton files."""

    source: str = setting("", "Folder or file with the data. Default: $FASTSIAM_DATA, else ./data.")
    image_column: str = setting(
        "", "Image column of parquet or Arrow data, or path column of a list."
    )
    label_column: str = setting("", "Label column of parquet or Arrow data, or of a list.")
    out: str = setting(
        "", "Folder for train.beton, val.beton and manifest.json. Default: SOURCE-beton."
    )
    max_side: int = setting(
        0, "Shrink images whose longer side exceeds this, in pixels. 0: keep sizes.", at_least=0
    )
    short_side: int = setting(
        0, "Shrink images whose shorter side exceeds this, in pixels. 0: keep sizes.", at_least=0
    )
    quality: int = setting(
        95,
        "JPEG quality of re-encoded images: shrunk ones, CMYK, and formats other than JPEG.",
        at_least=1,
        at_most=100,
    )
    raw: bool | None = setting(
        None,
        "Store pixels instead of JPEGs, for small images. Default: if the source stores pixels.",
    )
    exif: Exif = setting(
        "ignore", "EXIF orientation: ignore it, or apply it, which re-encodes rotated images."
    )
    alpha: Alpha = setting(
        "drop",
        "Transparent pixels. drop: ignore the alpha channel. white, black: draw the image over "
        "this colour.",
    )
    limit: int = setting(
        0, "Maximum number of images per split, with classes in proportion. 0: all.", at_least=0
    )
    seed: int = setting(0, "Seed for choosing the images for --limit.")
    part: str = setting(
        "",
        "Convert one of several parts, such as 2/8, into its own file. The parts in a folder form "
        "one data set; fastsiam convert folder merges them into one file.",
    )
    parts: int = setting(
        0,
        "Convert into this many parts with dask workers; for other schedulers, see --part. 0: "
        "write one file per split in this process.",
        at_least=0,
        at_most=99999,
    )
    scheduler: str = setting(
        "",
        "Address of the dask scheduler, such as tcp://host:8786. Default: "
        "$DASK_SCHEDULER_ADDRESS, else workers on this machine.",
    )
    skip_bad: bool = setting(
        False, "Leave out images that cannot be decoded, and list them in the manifest."
    )
    workers: int = setting(-1, "Worker processes. -1: one per core.", at_least=-1)

    def check(self) -> None:
        """Raise ``ValueError`` if settings contradict each other."""
        check_workers(self.workers)
        require(
            self.parts > 0 or not self.scheduler,
            "--scheduler needs --parts: pass the number of parts, a few per machine",
        )
        require(not (self.parts and self.part), "choose one of --part and --parts")
        number, count = self.part_of
        require(
            1 <= number <= count <= 99999, f"part must be a part such as 2/8, not {self.part!r}"
        )

    @property
    def root(self) -> Path | Url:
        """Path or URL of the data, with the default filled in."""
        return DataConfig(data=self.source).root

    @property
    def columns(self) -> ColumnNames:
        """Names of the image and label columns, as far as they are set."""
        return ColumnNames(self.image_column, self.label_column)

    @property
    def part_of(self) -> tuple[int, int]:
        """Number of the part, from 1, and number of parts; (0, -1) if ``part`` is invalid."""
        match = re.fullmatch(r"([0-9]+)/([0-9]+)", self.part or "1/1")
        return (int(match[1]), int(match[2])) if match else (0, -1)
