"""Settings of the data: where the images are, and by which pipeline they are loaded."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from fastsiam.urls import Url, place

from .checks import require, share

ImagePipeline = Literal["torchvision", "native", "ffcv", "dali", "memory"]
"""Pipelines that load images; ``fastsiam.pipelines.backends`` has what each can do."""
Pipeline = Literal[ImagePipeline, "synthetic"]
PipelineSetting = Literal["auto", Pipeline]
"""One by name, or the one that ``fastsiam.pipelines.automatic`` chooses for the images."""


Exif = Literal["ignore", "apply"]
Alpha = Literal["drop", "white", "black"]


def check_image_rules(exif: str, alpha: str) -> None:
    """Refuse unknown values of ``exif`` and ``alpha``.

    Raises:
        ValueError: names the ones that are known.
    """
    for name, value, known in (("exif", exif, get_args(Exif)), ("alpha", alpha, get_args(Alpha))):
        require(value in known, f"{name} must be one of {', '.join(known)}, not {value!r}")


class ColumnNames(NamedTuple):
    """Columns of a table that hold the images and their labels; "" lets types and names decide."""

    image: str = ""
    label: str = ""


AUTOMATIC = ColumnNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Data: where the images are and how they are loaded."""

    data: str = ""
    (
        "Converted folder or .beton file, .tar or .parquet file, folder of images, of tars or of "
        "Hugging Face's datasets (saved to disk, or parquet), with train/ beside val/ or test/ or "
        "without; a list of image files (.csv or .parquet with a column path); tars, .beton and "
        ".parquet also by an address: s3://, gs://, az:// or https://. "
        "Default: $FASTSIAM_DATA, else ./data."
    )
    image_column: str = ""
    (
        "Column that holds the images of parquet or Arrow data, or the paths of a list. "
        "Default: found by type and name; path in a list."
    )
    label_column: str = ""
    (
        "Column that holds the labels, integers or names of classes, of parquet or Arrow data or "
        "of a list. Default: label, labels, fine_label or cls, else the only ClassLabel."
    )
    holdout: str = ""
    (
        "Share of each class of the training images to leave out and validate on, such as 10%, "
        "where there are no validation images: the same images in every command. 0 is none."
    )
    shuffle: str = "full"
    (
        "full: any image may come at any time. window:N: blocks of neighbouring images in a random "
        "order, and images moved within N places, so that reading from object storage or a disk "
        "that turns fetches what lies together; N is best many times the batch, such as "
        "window:16384."
    )
    bad_images: Literal["stop", "replace"] = "stop"
    (
        "What to do about an image that cannot be decoded: stop; or replace, which shows another "
        "image in its place, the same by any pipeline on any number of processes, and leaves it "
        "out of evaluations. May change when a run goes on."
    )
    exif: Exif = "ignore"
    (
        "Orientation in an image's EXIF data: ignore it, as torchvision does; or apply it, so that "
        "photographs of phones are upright. A .beton file is as --exif of its conversion made it."
    )
    alpha: Alpha = "drop"
    (
        "Transparent pixels: drop the transparency, as torchvision does, which shows the colours "
        "that are stored under it; or lay the image over white or black."
    )
    pipeline: PipelineSetting = "auto"
    (
        "How images become batches: compiled code in threads (native); PIL in worker processes "
        "(torchvision); FFCV; DALI; decoded once and kept on the device (memory); or ready tensors "
        "(synthetic). auto is the fastest that is installed and can read the data, memory if all "
        "images fit; a resumed run keeps its own."
    )
    workers: int = -1
    (
        "Loader processes (torchvision) or threads (native, ffcv, dali, memory; at least 1) of "
        "each rank; "
        "-1 is one for each core of the rank, 0 loads in the training process."
    )

    prefetch: int = 2
    """native, ffcv, dali: batches that are made ahead of the training step."""
    cache: str = ""
    (
        "Folder in which what is read of remote data is kept, for the next epoch and for other "
        "runs: on a disk of this machine, and this user's own. Default: nothing is kept."
    )
    cache_gb: float = 100.0
    """GB (10^9 bytes) that the cache holds at most; what was not used for longest makes room."""
    os_cache: bool = True
    (
        "ffcv: map the file and leave caching to the system; "
        "otherwise FFCV reads it into memory of its own, in each rank nearly as much as the file."
    )

    dali_hw_decoder_load: float = 0.9
    (
        "dali on a GPU: share of the images, 0 to 1, that goes to the GPU's JPEG engine; its cores "
        "decode the rest. DALI's default is 0.65, which favors latency; NVIDIA measured training "
        "1.8% faster at 0.9, and its MLPerf runs use 0.99. Measure yours: fastsiam bench sweep "
        "--over jpeg-engine --pipelines dali."
    )

    def __post_init__(self) -> None:
        place(self.data)
        if not share(self.holdout, "holdout"):
            object.__setattr__(self, "holdout", "")  # 0, 0% and nothing are one setting
        require(
            re.fullmatch(r"full|window:[1-9][0-9]*", self.shuffle) is not None,
            f"shuffle must be full, or window:N with N images, such as window:16384, not "
            f"{self.shuffle!r}",
        )
        require(
            self.bad_images in ("stop", "replace"),
            f"bad-images must be stop or replace, not {self.bad_images!r}",
        )
        check_image_rules(self.exif, self.alpha)
        known = get_args(PipelineSetting)
        require(
            self.pipeline in known,
            f"pipeline must be one of {', '.join(known)}, not {self.pipeline!r}",
        )
        require(
            0 <= self.dali_hw_decoder_load <= 1,
            f"dali-hw-decoder-load is a share, 0 to 1, not {self.dali_hw_decoder_load}",
        )
        require(self.cache_gb > 0, f"cache-gb must be above 0, not {self.cache_gb:g}")
        require(self.workers >= -1, f"workers must be -1 or more, not {self.workers}")
        require(self.prefetch >= 1, f"prefetch must be at least 1, not {self.prefetch}")

    @property
    def loads_images(self) -> bool:
        """Whether the pipeline loads images; ready tensors come from none."""
        return self.pipeline in ("auto", *get_args(ImagePipeline))

    @property
    def window(self) -> int:
        """Images of the window that the order is shuffled within; 0 is all."""
        return int(self.shuffle.partition(":")[2] or 0)

    @property
    def held_percent(self) -> float:
        """Percent of the training images that are held out; 0 is none."""
        return share(self.holdout, "holdout")

    @property
    def columns(self) -> ColumnNames:
        """Columns of a table that hold images and labels, where they are named."""
        return ColumnNames(self.image_column, self.label_column)

    def has_same_root(self, other: DataConfig) -> bool:
        """Tell whether other settings name the same place of the data, perhaps in another way."""
        return os.path.realpath(str(self.root)) == os.path.realpath(str(other.root))

    def at(self, data: str, columns: ColumnNames) -> DataConfig:
        """Return these settings for other data, whose columns may have other names.

        Args:
            data: where they are; "" is where these are.
            columns: their columns; "" takes this one's name if the data are the same, else none.
        """
        moved = replace(self, data=data or self.data)
        known = self.columns if self.has_same_root(moved) else AUTOMATIC
        return replace(
            moved,
            image_column=columns.image or known.image,
            label_column=columns.label or known.label,
        )

    @property
    def root(self) -> Path | Url:
        """Where the data are, with the default filled in."""
        return place(self.data or os.environ.get("FASTSIAM_DATA", "") or "data")
