"""Settings of the data: where the images are, and by which pipeline they are loaded."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from fastsiam.config.urls import Url, place

from .checks import require, share
from .setting import Config, setting

ImagePipeline = Literal["torchvision", "native", "ffcv", "dali", "memory"]
"""Pipelines that load images; ``fastsiam.pipelines.backends`` has what each can do."""
Pipeline = Literal[ImagePipeline, "synthetic"]
PipelineSetting = Literal["auto", Pipeline]
"""One by name, or the one that ``fastsiam.pipelines.automatic`` chooses for the images."""


Exif = Literal["ignore", "apply"]
Alpha = Literal["drop", "white", "black"]


class ColumnNames(NamedTuple):
    """Columns of a table that hold the images and their labels; "" lets types and names decide."""

    image: str = ""
    label: str = ""


AUTOMATIC = ColumnNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(Config):
    """Data: where the images are and how they are loaded."""

    data: str = setting(
        "",
        "Converted folder or .beton file, .tar or .parquet file, folder of images, of tars or of "
        "Hugging Face's datasets (saved to disk, or parquet), with train/ beside val/ or test/ or "
        "without; a list of image files (.csv or .parquet with a column path); tars, .beton and "
        ".parquet also by an address: s3://, gs://, az:// or https://. Several --data are trained "
        "on as a mixture; the first is evaluated. Default: $FASTSIAM_DATA, else ./data.",
    )
    mixed_with: tuple[str, ...] = setting(
        (), "The other data sets of a mixture: all --data but the first.", option=False
    )
    weights: str = setting(
        "",
        "Share of each data set of a mixture in every epoch, such as 0.7,0.3, in any unit. "
        "Default: its number of images.",
    )
    image_column: str = setting(
        "",
        "Column that holds the images of parquet or Arrow data, or the paths of a list. "
        "Default: found by type and name; path in a list.",
    )
    label_column: str = setting(
        "",
        "Column that holds the labels, integers or names of classes, of parquet or Arrow data or "
        "of a list. Default: label, labels, fine_label or cls, else the only ClassLabel.",
    )
    holdout: str = setting(
        "",
        "Share of each class of the training images to leave out and validate on, such as 10%, "
        "where there are no validation images: the same images in every command. 0: nothing.",
    )
    shuffle: str = setting(
        "full",
        "full: any image may come at any time. window:N: blocks of neighbouring images in a random "
        "order, and images moved within N places, so that reading from object storage or a disk "
        "that turns fetches what lies together; N is best many times the batch, such as "
        "window:16384.",
    )
    bad_images: Literal["stop", "replace"] = setting(
        "stop",
        "What to do about an image that cannot be decoded: stop; or replace, which shows another "
        "image in its place, the same by any pipeline on any number of processes, and leaves it "
        "out of evaluations. May change when a run continues.",
    )
    exif: Exif = setting(
        "ignore",
        "Orientation in an image's EXIF data: ignore it, as torchvision does; or apply it, so that "
        "photographs of phones are upright. A .beton file is as --exif of its conversion made it.",
    )
    alpha: Alpha = setting(
        "drop",
        "Transparent pixels: drop the transparency, as torchvision does, which shows the colours "
        "that are stored under it; or lay the image over white or black.",
    )
    pipeline: PipelineSetting = setting(
        "auto",
        "How images become batches: compiled code in threads (native); PIL in worker processes "
        "(torchvision); FFCV; DALI; decoded once and kept on the device (memory); or ready tensors "
        "(synthetic). auto is the fastest that is installed and can read the data, memory if all "
        "images fit; a resumed run keeps its own.",
    )
    workers: int | str = setting(
        -1,
        "Loader processes (torchvision) or threads (native, ffcv, dali, memory; at least 1) of "
        "each rank; -1 is one for each core of the rank, 0 loads in the training process. auto "
        "(native, ffcv): the fewest threads that do not slow training down, found by timing the "
        "first hundred batches.",
    )
    prefetch: int = setting(
        2, "native, ffcv, dali: batches that are made ahead of the training step.", at_least=1
    )
    cache: str = setting(
        "",
        "Folder in which what is read of remote data is kept, for the next epoch and for other "
        "runs: on a disk of this machine, and this user's own. Default: nothing is kept.",
    )
    cache_gb: float = setting(
        100.0,
        "GB (10^9 bytes) that the cache holds at most; what was not used for longest makes room.",
        above=0,
    )
    os_cache: bool = setting(
        True,
        "ffcv: map the file and leave caching to the system; "
        "otherwise FFCV reads it into memory of its own, in each rank nearly as much as the file.",
        option=False,
    )

    dali_hw_decoder_load: float = setting(
        0.9,
        "dali on a GPU: share of the images, 0 to 1, that goes to the GPU's JPEG engine; its cores "
        "decode the rest. DALI's default is 0.65, which favors latency; NVIDIA measured training "
        "1.8% faster at 0.9, and its MLPerf runs use 0.99. Measure yours: fastsiam bench sweep "
        "--over jpeg-engine --pipelines dali.",
        at_least=0,
        at_most=1,
        option=False,
    )

    def check(self) -> None:
        """Refuse values that no type or range tells."""
        with contextlib.suppress(ValueError):
            object.__setattr__(self, "workers", int(self.workers))
        require(
            self.workers == "auto" or (isinstance(self.workers, int) and self.workers >= -1),
            f"workers must be auto or at least -1, not {self.workers}",
        )
        object.__setattr__(self, "mixed_with", tuple(self.mixed_with))
        places = self.places
        shares = self.shares
        require(
            not shares or (len(shares) == len(places) > 1 and all(0 < x < inf for x in shares)),
            f"weights are one number above 0 for each --data of a mixture, not {self.weights!r} "
            f"for {len(places)}",
        )
        if not share(self.holdout, "holdout"):
            object.__setattr__(self, "holdout", "")  # 0, 0% and nothing are one setting
        require(
            re.fullmatch(r"full|window:[1-9][0-9]*", self.shuffle) is not None,
            f"shuffle must be full, or window:N with N images, such as window:16384, not "
            f"{self.shuffle!r}",
        )

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
        """Percent of the training images that are held out; 0 if nothing is."""
        return share(self.holdout, "holdout")

    @property
    def columns(self) -> ColumnNames:
        """Columns of a table that hold images and labels, where they are named."""
        return ColumnNames(self.image_column, self.label_column)

    def has_same_root(self, other: DataConfig) -> bool:
        """Tell whether other settings name the same place of the data, perhaps in another way."""
        own, others = ([os.path.realpath(str(x)) for x in y.places] for y in (self, other))
        return own == others

    def at(self, data: str, columns: ColumnNames) -> DataConfig:
        """Return these settings for other data, whose columns may have other names.

        Args:
            data: where they are; "" is where these are.
            columns: their columns; "" takes this one's name if the data are the same, else none.
        """
        moved = replace(self, data=data, mixed_with=(), weights="") if data else self
        known = self.columns if self.has_same_root(moved) else AUTOMATIC
        return replace(
            moved,
            image_column=columns.image or known.image,
            label_column=columns.label or known.label,
        )

    @property
    def root(self) -> Path | Url:
        """Where the data are, with the default filled in; of a mixture, its first data set."""
        return self.places[0]

    @property
    def places(self) -> tuple[Path | Url, ...]:
        """Where all data sets of a mixture are, or the one."""
        first = self.data or os.environ.get("FASTSIAM_DATA", "") or "data"
        return tuple(place(one) for one in (first, *self.mixed_with))

    @property
    def parts(self) -> tuple[DataConfig, ...]:
        """The settings of each data set of a mixture, or these."""
        each = (self.data, *self.mixed_with)
        return tuple(replace(self, data=one, mixed_with=(), weights="") for one in each)

    @property
    def shares(self) -> tuple[float, ...]:
        """The weights of the data sets of a mixture, in any unit; empty if none are given."""
        try:
            return tuple(float(weight) for weight in self.weights.split(",") if self.weights)
        except ValueError:
            raise ValueError(
                f"weights are numbers, such as 0.7,0.3, not {self.weights!r}"
            ) from None
