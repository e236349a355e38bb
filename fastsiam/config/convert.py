"""Settings of a conversion."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fastsiam.config.urls import Url

from .checks import require
from .data import Alpha, ColumnNames, DataConfig, Exif
from .setting import Config, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig(Config):
    """Conversion of a data set into .beton files."""

    source: str = setting(
        "", "Where the data are: a folder or a file. Default: $FASTSIAM_DATA, else ./data."
    )
    image_column: str = setting(
        "", "Column that holds the images of parquet or Arrow data, or the paths of a list."
    )
    label_column: str = setting(
        "", "Column that holds the labels of parquet or Arrow data, or of a list."
    )
    out: str = setting(
        "",
        "Folder for train.beton, val.beton and manifest.json. "
        "Default: beside the source, its name with -beton.",
    )
    max_side: int = setting(
        0, "Shrink images whose longer side has more pixels than this; 0 leaves them.", at_least=0
    )
    short_side: int = setting(
        0, "Shrink images whose shorter side has more pixels than this; 0 leaves them.", at_least=0
    )
    quality: int = setting(
        95,
        "JPEG quality of images that are encoded: other formats than JPEG, CMYK, and what is "
        "shrunk; other JPEGs keep their bytes.",
        at_least=1,
        at_most=100,
    )
    raw: bool | None = setting(
        None, "Store pixels, not JPEGs: for small images. Default: only those that come as pixels."
    )
    exif: Exif = setting(
        "ignore",
        "Orientation in an image's EXIF data: ignore it, as torchvision does; or apply it, which "
        "re-encodes the images that it turns.",
    )
    alpha: Alpha = setting(
        "drop", "Transparent pixels: drop the transparency; or lay the image over white or black."
    )
    limit: int = setting(
        0,
        "Take at most so many images of each split, the classes in their proportions; 0 takes all.",
        at_least=0,
    )
    seed: int = setting(0, "Decides which images --limit takes.")
    part: str = setting(
        "",
        "Convert one part of several, such as 2/8, into a file of its own. "
        "The parts in one folder are one data set; convert folder makes one file of them.",
    )
    parts: int = setting(
        0,
        "Convert into so many parts, by dask's workers; other schedulers run --part, such as 2/8. "
        "0 makes one file of each split, here.",
        at_least=0,
        at_most=99999,
    )
    scheduler: str = setting(
        "",
        "Address of dask's scheduler, such as tcp://host:8786. Default: $DASK_SCHEDULER_ADDRESS; "
        "without it, workers on this machine for as long as the conversion takes.",
    )
    skip_bad: bool = setting(
        False, "Leave out images that cannot be read, and list them in the manifest."
    )
    workers: int = setting(-1, "Processes; -1 is one for each core.", at_least=-1)

    def check(self) -> None:
        """Refuse settings that contradict each other."""
        require(self.workers != 0, "workers must be -1 or at least 1, not 0")
        require(
            self.parts > 0 or not self.scheduler,
            "--scheduler converts parts: say how many by --parts, a few for each machine",
        )
        require(not (self.parts and self.part), "--part is one of --parts: leave one of them out")
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
