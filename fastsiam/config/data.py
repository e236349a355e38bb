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
        "Training images: a folder of images, .tar or .parquet files, optionally split into "
        "train/ and val/ or test/; a folder written by fastsiam convert; a Hugging Face dataset "
        "saved to disk; a .tar, .parquet or .beton file; a list of image files (.csv with a "
        "column path); or an s3://, gs://, az:// or https:// URL of .tar or .beton files. Repeat "
        "--data to train on a mixture; evaluations use the first. Default: $FASTSIAM_DATA, else "
        "./data.",
    )
    mixed_with: tuple[str, ...] = setting(
        (), "The other data sets of a mixture: every --data after the first.", option=False
    )
    weights: tuple[float, ...] = setting(
        (),
        "Share of each data set of a mixture in every batch, such as 0.7,0.3. Default: "
        "proportional to the numbers of images.",
        above=0,
    )
    image_column: str = setting(
        "",
        "Image column of parquet or Arrow data, or path column of a list. Default: detected by "
        "type and name.",
    )
    label_column: str = setting(
        "",
        "Label column of parquet or Arrow data, or of a list. Default: label, labels, fine_label "
        "or cls, else the only ClassLabel column.",
    )
    holdout: str = setting(
        "",
        "Share of each class of the training images to hold out for validation, such as 10%, if "
        "there are no validation images. 0: none.",
    )
    shuffle: str = setting(
        "full",
        "full: shuffle all images. window:N: shuffle blocks of neighbouring images, then images "
        "within a window of N, so that object storage and hard disks read neighbours together. N "
        "should be many batches, such as window:16384.",
    )
    bad_images: Literal["stop", "replace"] = setting(
        "stop",
        "What to do if an image cannot be decoded. stop: exit with an error. replace: use another "
        "image, the same in all pipelines and on any number of ranks; evaluations skip it. May "
        "change on resume.",
    )
    exif: Exif = setting(
        "ignore",
        "EXIF orientation: ignore it, as torchvision does, or apply it. No effect on .beton files, "
        "where fastsiam convert --exif decides.",
    )
    alpha: Alpha = setting(
        "drop",
        "Transparent pixels. drop: ignore the alpha channel and show the hidden colours, as "
        "torchvision does. white, black: draw the image over this colour.",
    )
    pipeline: PipelineSetting = setting(
        "auto",
        "native: compiled code in threads. torchvision: PIL in worker processes. ffcv, dali: "
        "these libraries. memory: decode all images once and keep them on the device. synthetic: "
        "random tensors. auto: memory if all images fit; else dali, if installed, on a GPU with "
        "fewer than six CPU cores; else native. A resumed run keeps its pipeline.",
    )
    workers: int | str = setting(
        -1,
        "Loader threads per rank (torchvision: processes). -1: one per core. 0 (torchvision): "
        "load in the training process. auto (native, ffcv): the smallest number that does not "
        "slow training down, measured over the first hundred batches.",
    )
    prefetch: int = setting(
        2,
        "Batches to prepare ahead of the training step (native, ffcv, dali, memory on a CPU).",
        at_least=1,
    )
    cache: str = setting(
        "", "Folder on a local disk in which to cache remote data for later epochs and runs."
    )
    cache_gb: float = setting(
        100.0, "Maximum size of the cache in GB; the least recently used data are deleted.", above=0
    )
    os_cache: bool = setting(
        True,
        "ffcv: memory-map the file. Otherwise each rank reads it into memory, which takes nearly "
        "the size of the file.",
        option=False,
    )
    dali_hw_decoder_load: float = setting(
        0.9,
        "dali on a GPU: share of the images that the JPEG engine decodes; CUDA cores decode the "
        "others. DALI's default is 0.65; NVIDIA measured 1.8% faster training with 0.9.",
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
            f"weights must have one number per --data of a mixture, not {self.weights} for "
            f"{len(self.places)}",
        )
        if not self.holdout_percent:
            object.__setattr__(self, "holdout", "")  # "0", "0%" and "" are one setting
        require(
            re.fullmatch(r"full|window:[1-9][0-9]*", self.shuffle) is not None,
            f"shuffle must be full, or window:N such as window:16384, not {self.shuffle!r}",
        )

    @classmethod
    def of(cls, data: DataConfig | Path | str) -> DataConfig:
        """Return settings, given settings or only the path or address of images.

        Raises:
            TypeError: ``data`` is something else.
        """
        if isinstance(data, Path | str):
            return cls(data=str(data))
        if not isinstance(data, DataConfig):
            raise TypeError(
                f"data must be a path or address of images, or a DataConfig, not a "
                f"{type(data).__name__}: the loader reads the files; pass chosen for a subset"
            )
        return data

    @property
    def loads_images(self) -> bool:
        """Whether the pipeline loads images; "synthetic" generates tensors instead."""
        return self.pipeline != "synthetic"

    @property
    def window(self) -> int:
        """Size of the shuffle window in images; 0 means a full shuffle."""
        return int(self.shuffle.partition(":")[2] or 0)

    @property
    def holdout_percent(self) -> float:
        """Percentage of the training images to hold out; 0.0 for none."""
        return parse_holdout(self.holdout)

    @property
    def columns(self) -> ColumnNames:
        """Names of the image and label columns, as far as they are set."""
        return ColumnNames(self.image_column, self.label_column)

    def has_same_root(self, other: DataConfig) -> bool:
        """Return whether other settings name the same data, perhaps by other paths."""
        roots, other_roots = ([os.path.realpath(str(x)) for x in y.places] for y in (self, other))
        return roots == other_roots

    def at(self, data: str, columns: ColumnNames) -> DataConfig:
        """Return a copy of these settings for other data, whose columns may have other names.

        Args:
            data: path or URL of the data; "" keeps the current one.
            columns: "" keeps the current name if the data are the same, else detects the column.
        """
        config = replace(self, data=data, mixed_with=(), weights=()) if data else self
        default = self.columns if self.has_same_root(config) else AUTOMATIC
        return replace(
            config,
            image_column=columns.image or default.image,
            label_column=columns.label or default.label,
        )

    @property
    def root(self) -> Path | Url:
        """Path or URL of the data, with the default filled in; for a mixture, of the first."""
        return self.places[0]

    @property
    def full_root(self) -> str:
        """``root`` as an absolute path or a URL."""
        return str(self.root.resolve())

    @property
    def places(self) -> tuple[Path | Url, ...]:
        """Paths or URLs of the data: one, or several for a mixture."""
        first = self.data or os.environ.get("FASTSIAM_DATA", "") or "data"
        return tuple(place(one) for one in (first, *self.mixed_with))

    @property
    def parts(self) -> tuple[DataConfig, ...]:
        """The settings of each data set of a mixture; without a mixture, these settings."""
        sources = (self.data, *self.mixed_with)
        return tuple(replace(self, data=source, mixed_with=(), weights=()) for source in sources)


def parse_holdout(text: str) -> float:
    """Parse ``--holdout``, such as "10%", into a percentage; 0.0 for "", "0" and "0%".

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
        f"holdout must be a share above 0% and below 100%, such as 10%, or 0, not {text!r}",
    )
    return percent
