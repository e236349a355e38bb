"""What ``fastsiam bench`` can be asked for: the command line's options are made of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from fastsiam.bench.lightly import NAMES
from fastsiam.bench.peers import PEERS
from fastsiam.bench.variants import VARIANTS
from fastsiam.config import (
    OWN_BACKBONES,
    AugmentConfig,
    ColumnNames,
    DataConfig,
    ImagePipeline,
    Pipeline,
    TrainConfig,
    require,
)
from fastsiam.config.recipes import RECIPES
from fastsiam.urls import Url

Stored = Literal["original", "beton", "tar", "parquet", "short256", "pixels256"]
"""How the images are stored: as files of a folder; the same in one .beton, tar or uncompressed
parquet file; with a shorter side of 256; as pixels of that size."""
ORIGINAL: Stored = "original"
CONTAINERS: tuple[Stored, ...] = ("beton", "tar", "parquet")
"""Forms with the original images' bytes."""

Over = Literal["workers", "batch", "crop", "quality", "prefetch", "jpeg-engine", "ranks"]
"""What a sweep varies: workers, images of a batch, side of a view, JPEG quality, batches made
ahead, percent of the images for the GPU's JPEG engine, processes."""

PIPELINES: tuple[Pipeline, ...] = get_args(ImagePipeline)
SOAKED: tuple[Pipeline, ...] = (*PIPELINES, "synthetic")
"""What ``fastsiam bench soak`` has runs with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """What is measured, on which images and how often."""

    data: str = ""
    (
        "Images to measure with, as of train. Default: $FASTSIAM_DATA, else ./data, "
        "else images that are made for it and resemble ImageNet's."
    )
    image_column: str = ""
    """Column that holds the images, as of train."""
    label_column: str = ""
    """Column that holds the labels, as of train."""
    images: int = 0
    (
        "Images of one repeat, taken evenly from the data (several times, if it holds fewer); "
        "0 chooses as many as take seconds."
    )
    recipe: str = "imagenet"
    """Recipe whose augmentation and model are measured: imagenet, cifar10 or demo."""
    crop: int = 0
    """Side of a view in pixels; 0 is the recipe's."""
    backbone: str = ""
    """Encoder; default: the recipe's."""
    batch: int = 0
    (
        "Images of a batch, of each rank. 0 chooses: 256 on a GPU; on a CPU 64 for what loads "
        "and what takes about half a second for what trains."
    )
    pipelines: str = ""
    """Pipelines, as a,b. Default: all that can run here. torchvision's is always measured."""
    stored: str = "original"
    (
        "How the images are stored, as a,b: original (files of a folder), beton, tar, parquet "
        "(uncompressed), short256 (shorter side 256 pixels), pixels256 (that, not as JPEGs). "
        "torchvision reads originals, and ffcv reads them from a .beton."
    )
    variants: str = ""
    (
        "Ways to take a training step, as a,b: default (compiled, bf16, channels last); without "
        "one lever: eager, fp32, fp16, nchw; with one more: recompute, cuda-graphs, syncbn; with "
        "none, or one alone: plain, plain-bf16, plain-channels-last, plain-compiled; or authors, "
        "the authors' setting. Default: all that can run here."
    )
    peers: str = ""
    """Other libraries to measure with, as a,b. Default: all that are installed."""
    methods: str = ""
    """Methods to measure, as a,b. Default: all that are measured beside lightly's."""
    over: Over = "workers"
    (
        "What is varied: prefetch is batches made ahead, jpeg-engine the percentage of images that "
        "dali gives the GPU's JPEG engine."
    )
    values: str = ""
    """Its values, as 1,2,4. Default: some that make sense here."""
    workers: int = -1
    """Processes or threads that load; -1 is one for each core."""
    latencies: str = "0,20,100"
    """Milliseconds that are added to each request of object storage, as a,b."""
    repeats: int = 5
    """How often each thing is timed, in turns, after a first time that does not count."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where views shall lie and training runs; auto takes the GPU if there is one."""
    json: str = ""
    """File to write the records into."""

    def __post_init__(self) -> None:
        require(
            self.recipe in RECIPES,
            f"unknown recipe {self.recipe!r}; there are {', '.join(RECIPES)}",
        )
        for name in ("images", "crop", "batch"):
            value = getattr(self, name)
            require(value >= 0, f"{name} must be 0 or more, not {value}")
        require(self.batch != 1, "batch must be at least 2 (BN needs two samples)")
        require(self.repeats >= 1, f"repeats must be at least 1, not {self.repeats}")
        require(
            self.workers == -1 or self.workers >= 1,
            f"workers must be -1 or at least 1, not {self.workers}",
        )
        for field, known in (
            ("pipelines", PIPELINES),
            ("stored", get_args(Stored)),
            ("variants", VARIANTS),
            ("peers", PEERS),
            ("methods", NAMES),
        ):
            for name in getattr(self, field).split(","):
                require(
                    name in known or not getattr(self, field),
                    f"{field} are some of {', '.join(known)}, not {name!r}",
                )
        for value in self.latencies.split(","):
            require(value.isdigit(), f"latencies are ms such as 0,20,100, not {self.latencies!r}")
        for value in self.values.split(",") if self.values else ():
            require(
                value.isdigit() and (int(value) > 0 or self.over == "jpeg-engine"),
                f"values are whole numbers such as 1,2,4, not {self.values!r}",
            )
            require(
                self.over != "jpeg-engine" or int(value) <= 100,
                f"values of jpeg-engine are percentages, 0 to 100, not {self.values!r}",
            )
        require(
            not self.backbone or self.backbone in OWN_BACKBONES,
            f"backbone is one of {', '.join(OWN_BACKBONES)}, not {self.backbone!r}",
        )
        _ = self.train  # refuses what the recipe's own settings refuse

    @property
    def pipeline_names(self) -> tuple[Pipeline, ...]:
        """The pipelines, the baseline first, which is always measured."""
        from fastsiam.pipelines.backends import BASELINE

        names: Any = self.pipelines.split(",") if self.pipelines else PIPELINES
        return (BASELINE, *(name for name in names if name != BASELINE))

    @property
    def variant_names(self) -> tuple[str, ...]:
        """The ways to take a training step."""
        return tuple(self.variants.split(",")) if self.variants else tuple(VARIANTS)

    @property
    def peer_names(self) -> tuple[str, ...]:
        """The other libraries."""
        return tuple(self.peers.split(",")) if self.peers else tuple(PEERS)

    @property
    def forms(self) -> tuple[Stored, ...]:
        """The forms in which images are stored."""
        return tuple(self.stored.split(","))  # type: ignore[arg-type]

    @property
    def train(self) -> TrainConfig:
        """The recipe, with what is asked for in its place."""
        config = RECIPES[self.recipe]()
        augment, model = config.augment, config.model
        if self.crop:
            augment = augment.changed(crop=self.crop)
        if self.backbone:
            model = replace(model, backbone=self.backbone)
        return replace(config, augment=augment, model=model)

    @property
    def augment(self) -> AugmentConfig:
        """How images become views."""
        return self.train.augment

    @property
    def columns(self) -> ColumnNames:
        """Columns of a table that hold images and labels, where they are named."""
        return ColumnNames(self.image_column, self.label_column)

    @property
    def root(self) -> Path | Url:
        """The data's place, with the default filled in; it may not be there."""
        return DataConfig(data=self.data).root


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuConfig:
    """What ``fastsiam bench gpu`` may use, and where it keeps what it finds."""

    minutes: float = 9.0
    """Time to use. What is not done then is left for another call."""
    data: str = ""
    """ImageNet's images to measure with, as of train. Default: images made for it."""
    cifar10: str = ""
    """CIFAR-10 to train on, as of train. Default: the demo's images, whose kNN says nothing."""
    out: str = ""
    (
        "Folder for the page, records and logs. A later call goes on from what it finds there. "
        "Default: $OUT/gpu if OUT is set, else runs/gpu."
    )
    again: str = ""
    """Stages to do anew although they are done, as a,b."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto takes the GPU if there is one; a CPU does it all at a small size, for trying out."""

    def __post_init__(self) -> None:
        require(self.minutes > 0, f"minutes must be above 0, not {self.minutes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakConfig:
    """How long ``fastsiam bench soak`` hurts runs, and which."""

    minutes: float = 120.0
    """Time for all of it; the last run is not cut off."""
    seed: int = 0
    """Of the faults and their moments, and of the runs."""
    ranks: int = 4
    """Processes of each run, on the CPU."""
    pipelines: str = ""
    """Pipelines that runs have in turn, as a,b. Default: all that are installed."""
    seconds: float = 120.0
    """About how long a run takes that nobody disturbs."""
    every: float = 25.0
    """Seconds between two faults, in the mean."""
    out: str = "bench/results/soak/soak.json"
    """File for the record."""

    def __post_init__(self) -> None:
        for name in ("minutes", "seconds", "every"):
            value = getattr(self, name)
            require(value > 0, f"{name} must be above 0, not {value}")
        require(self.ranks >= 2, f"ranks must be 2 or more, not {self.ranks}")
        for name in self.pipelines.split(",") if self.pipelines else ():
            require(name in SOAKED, f"pipelines are some of {', '.join(SOAKED)}, not {name!r}")

    @property
    def names(self) -> tuple[Pipeline, ...]:
        """The pipelines in turn."""
        from fastsiam.pipelines.backends import BACKENDS

        names: Any = self.pipelines.split(",") if self.pipelines else SOAKED
        return tuple(name for name in names if BACKENDS[name].installed)
