"""Settings of the data: where the images are and how they are loaded."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from fastsiam.config.urls import Url, place

from .setting import Config, require, setting

ImagePipeline = Literal["torchvision", "native", "ffcv", "dali", "memory"]
"""Pipelines that load images; ``fastsiam.pipelines.backends`` lists the features of each."""
Pipeline = Literal[ImagePipeline, "synthetic"]
PipelineSetting = Literal["auto", Pipeline]
"""Name of a pipeline, or "auto": ``fastsiam.pipelines.automatic`` chooses it."""


Exif = Literal["ignore", "apply"]
Alpha = Literal["drop", "white", "black"]


class ColumnNames(NamedTuple):
    """Names of a table's image and label columns; "" detects them by type and name."""

    image: str = ""
    label: str = ""


AUTOMATIC = ColumnNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(Config):
    """Data: where the images are and how they are loaded."""

    data: str = setting(
        "",
        "Training images: a folder of images (with train/ beside val/ or test/, or without), of "
        "tars, of parquet files, or of a Hugging Face dataset saved to disk; a .tar, .parquet or "
        ".beton file; a converted folder; a list of image files (.csv with a column path); or an "
        "address s3://, gs://, az:// or https:// of tars, .beton or parquet. Repeat "
        "--data to train on a mixture; the first is evaluated. Default: $FASTSIAM_DATA, else "
        "./data.",
    )
    mixed_with: tuple[str, ...] = setting(
        (), "The other data sets of a mixture: every --data after the first.", option=False
    )
    weights: tuple[float, ...] = setting(
        (),
        "Shares of the data sets of a mixture in every batch, such as 0.7,0.3. Default: in "
        "proportion to their images.",
        above=0,
    )
    image_column: str = setting(
        "",
        "Column with the images of parquet or Arrow data, or with the paths of a list. Default: "
        "found by type and name.",
    )
    label_column: str = setting(
        "",
        "Column with the labels of parquet or Arrow data, or of a list. Default: label, labels, "
        "fine_label or cls, else the only ClassLabel.",
    )
    holdout: str = setting(
        "",
        "Share of each class of the training images to validate on, such as 10%, if there are no "
        "validation images. 0: none.",
    )
    shuffle: str = setting(
        "full",
        "full, or window:N: shuffle blocks of neighbouring images, and images within N places, so "
        "that object storage and hard disks read them together; N should be many batches, such as "
        "window:16384.",
    )
    bad_images: Literal["stop", "replace"] = setting(
        "stop",
        "If an image cannot be decoded: stop, or replace it by another one, the same in all "
        "pipelines and on any number of ranks, and leave it out of evaluations. May change on "
        "resume.",
    )
    exif: Exif = setting(
        "ignore",
        "EXIF orientation: ignore it, as torchvision does, or apply it. .beton files keep the "
        "orientation of their conversion.",
    )
    alpha: Alpha = setting(
        "drop",
        "Transparent pixels: drop the transparency, as torchvision does, which shows the colours "
        "below; or draw the image over white or black.",
    )
    pipeline: PipelineSetting = setting(
        "auto",
        "native: compiled code in threads; torchvision: PIL in worker processes; ffcv and dali: "
        "these libraries; memory: images are decoded once and kept on the device; synthetic: "
        "random tensors. auto: the fastest that is installed and reads the data, memory if all "
        "images fit; a resumed run keeps its own.",
    )
    workers: int | str = setting(
        -1,
        "Loader threads (torchvision: processes) of each rank. -1: one for each core; 0 "
        "(torchvision): load in the training process; auto (native, ffcv): the fewest that do not "
        "slow training down, timed over the first hundred batches.",
    )
    prefetch: int = setting(
        2, "native, ffcv, dali, memory: batches to prepare ahead of the training step.", at_least=1
    )
    cache: str = setting(
        "", "Folder on a local disk that caches remote data for later epochs and runs."
    )
    cache_gb: float = setting(
        100.0, "Largest size of the cache in GB; the least recently used data are deleted.", above=0
    )
    os_cache: bool = setting(
        True,
        "ffcv: memory-map the file. Otherwise FFCV reads it into the memory of each rank, which "
        "takes nearly the size of the file.",
        option=False,
    )
    dali_hw_decoder_load: float = setting(
        0.9,
        "dali on a GPU: share of the images that its JPEG engine decodes; its cores decode the "
        "others. DALI's default is 0.65; NVIDIA measured training 1.8% faster at 0.9.",
        at_least=0,
        at_most=1,
        option=False,
    )

    def check(self) -> None:
        """Check the settings for which type and range are not enough."""
        require(
            self.workers == "auto" or (isinstance(self.workers, int) and self.workers >= -1),
            f"workers must be auto or at least -1, not {self.workers}",
        )
        require(
            not self.weights or len(self.weights) == len(self.places) > 1,
            f"weights must be a number for each --data of a mixture, not {self.weights} for "
            f"{len(self.places)}",
        )
        if not share(self.holdout, "holdout"):
            object.__setattr__(self, "holdout", "")  # "0", "0%" and "" are one setting
        require(
            re.fullmatch(r"full|window:[1-9][0-9]*", self.shuffle) is not None,
            f"shuffle must be full, or window:N such as window:16384, not {self.shuffle!r}",
        )

    @property
    def loads_images(self) -> bool:
        """Whether the pipeline loads images; "synthetic" generates tensors instead."""
        return self.pipeline != "synthetic"

    @property
    def window(self) -> int:
        """Size of the shuffle window in images; 0 means a full shuffle."""
        return int(self.shuffle.partition(":")[2] or 0)

    @property
    def held_percent(self) -> float:
        """Percentage of the training images to hold out."""
        return share(self.holdout, "holdout")

    @property
    def columns(self) -> ColumnNames:
        """Names of the image and label columns, as far as they are set."""
        return ColumnNames(self.image_column, self.label_column)

    def has_same_root(self, other: DataConfig) -> bool:
        """Return whether other settings name the same data, perhaps by other paths."""
        own, others = ([os.path.realpath(str(x)) for x in y.places] for y in (self, other))
        return own == others

    def at(self, data: str, columns: ColumnNames) -> DataConfig:
        """Return a copy of these settings for other data, whose columns may have other names.

        Args:
            data: path or URL of the data; "" keeps the current one.
            columns: "" keeps the current name if the data are the same, else detects the column.
        """
        moved = replace(self, data=data, mixed_with=(), weights=()) if data else self
        known = self.columns if self.has_same_root(moved) else AUTOMATIC
        return replace(
            moved,
            image_column=columns.image or known.image,
            label_column=columns.label or known.label,
        )

    @property
    def root(self) -> Path | Url:
        """Path or URL of the data, with the default filled in; for a mixture, of the first."""
        return self.places[0]

    @property
    def full_root(self) -> str:
        """``root`` as an absolute path or a URL."""
        root = self.root
        return str(root.resolve() if isinstance(root, Path) else root)

    @property
    def places(self) -> tuple[Path | Url, ...]:
        """Paths or URLs of the data: one, or several for a mixture."""
        first = self.data or os.environ.get("FASTSIAM_DATA", "") or "data"
        return tuple(place(one) for one in (first, *self.mixed_with))

    @property
    def parts(self) -> tuple[DataConfig, ...]:
        """The settings of each data set of a mixture; without a mixture, these settings."""
        each = (self.data, *self.mixed_with)
        return tuple(replace(self, data=one, mixed_with=(), weights=()) for one in each)


def share(text: str, name: str) -> float:
    """Parse a share such as "10%" into a percentage; 0.0 for "", "0" and "0%".

    Args:
        text: value of the setting.
        name: name of the setting, for the message.

    Raises:
        ValueError: it is neither 0 nor a share above 0% and below 100%.
    """
    if text in ("", "0", "0%"):
        return 0.0
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = 0.0
    require(
        text.endswith("%") and 0 < percent < 100,
        f"{name} must be a share above 0% and below 100%, such as 10%, or 0, not {text!r}",
    )
    return percent
