"""Settings of a conversion."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from fastsiam.urls import Url

from .checks import require
from .data import Alpha, ColumnNames, DataConfig, Exif, check_image_rules

EngineName = Literal["local", "dask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig:
    """Conversion of a data set into .beton files."""

    source: str = ""
    """Where the data are: a folder or a file. Default: $FASTSIAM_DATA, else ./data."""
    image_column: str = ""
    """Column that holds the images of parquet or Arrow data, or the paths of a list."""
    label_column: str = ""
    """Column that holds the labels of parquet or Arrow data, or of a list."""
    out: str = ""
    (
        "Folder for train.beton, val.beton and manifest.json. "
        "Default: beside the source, its name with -beton."
    )
    max_side: int = 0
    """Shrink images whose longer side has more pixels than this; 0 leaves them."""
    short_side: int = 0
    """Shrink images whose shorter side has more pixels than this; 0 leaves them."""
    quality: int = 95
    (
        "JPEG quality of images that are encoded: other formats than JPEG, CMYK, and what is "
        "shrunk; other JPEGs keep their bytes."
    )
    raw: bool | None = None
    """Store pixels, not JPEGs: for small images. Default: only those that come as pixels."""
    exif: Exif = "ignore"
    (
        "Orientation in an image's EXIF data: ignore it, as torchvision does; or apply it, which "
        "re-encodes the images that it turns."
    )
    alpha: Alpha = "drop"
    """Transparent pixels: drop the transparency; or lay the image over white or black."""
    limit: int = 0
    """Take at most so many images of each split, the classes in their proportions; 0 takes all."""
    seed: int = 0
    """Decides which images --limit takes."""
    part: str = ""
    (
        "Convert one part of several, such as 2/8, into a file of its own. "
        "The parts in one folder are one data set; convert folder makes one file of them."
    )
    parts: int = 0
    """Convert into so many parts; --engine says where. 0 makes one file of each split, here."""
    engine: EngineName = "local"
    """Where --parts are made: one after the other here, or by the workers of dask."""
    scheduler: str = ""
    (
        "Address of dask's scheduler, such as tcp://host:8786. Default: $DASK_SCHEDULER_ADDRESS; "
        "without it, workers on this machine for as long as the conversion takes."
    )
    skip_bad: bool = False
    """Leave out images that cannot be read, and list them in the manifest."""
    workers: int = -1
    """Processes; -1 is one for each core."""

    def __post_init__(self) -> None:
        for name in ("max_side", "short_side", "limit"):
            value = getattr(self, name)
            require(value >= 0, f"{name.replace('_', '-')} must be 0 or more, not {value}")
        require(1 <= self.quality <= 100, f"quality must be 1 to 100, not {self.quality}")
        require(
            self.workers == -1 or self.workers >= 1,
            f"workers must be -1 or at least 1, not {self.workers}",
        )
        require(0 <= self.parts <= 99999, f"parts must be 0 to 99999, not {self.parts}")
        require(
            self.engine in get_args(EngineName),
            f"engine must be {' or '.join(get_args(EngineName))}, not {self.engine!r}; other "
            "schedulers run --part, such as 2/8",
        )
        require(
            self.parts > 0 or self.engine != "dask",
            "--engine dask converts parts: say how many by --parts, a few for each machine",
        )
        require(
            not self.scheduler or self.engine == "dask",
            f"--scheduler {self.scheduler} is dask's: add --engine dask",
        )
        require(not (self.parts and self.part), "--part is one of --parts: leave one of them out")
        check_image_rules(self.exif, self.alpha)
        number, count = self.part_of
        require(
            1 <= number <= count <= 99999,
            f"part must be such as 2/8, the first number from 1 to the second, not {self.part!r}",
        )

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
        if not self.part:
            return 1, 1
        number, _, count = self.part.partition("/")
        if not (number.isascii() and number.isdigit() and count.isascii() and count.isdigit()):
            return 0, -1
        return int(number), int(count)
