"""What ``fastsiam bench`` can be asked for: the command line's options are made of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from fastsiam.config import (
    OWN_BACKBONES,
    AugmentConfig,
    DataConfig,
    Pipeline,
    TrainConfig,
    require,
)
from fastsiam.config.recipes import RECIPES

Stored = Literal["original", "short256", "pixels256"]
"""How the images are stored: as they are; with a shorter side of 256; as pixels of that size."""

Over = Literal["workers", "batch", "crop", "quality", "ranks"]
"""What a sweep varies: workers, images of a batch, side of a view, JPEG quality, processes."""

VARIANTS = (
    "default", "eager", "views-apart", "fp32", "fp16", "nchw", "memory-returned", "recompute",
    "cuda-graphs", "plain", "plain-bf16", "plain-channels-last", "plain-compiled",
    "plain-keeping-memory", "syncbn", "authors",
)  # fmt: skip
PEERS = ("lightly", "torchvision-v2", "albumentations", "kornia", "dali-solo-learn", "ffcv-plain")

PIPELINES: tuple[Pipeline, ...] = tuple(p for p in get_args(Pipeline) if p != "synthetic")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """What is measured, on which images and how often."""

    data: str = ""
    (
        "Images to measure with, as of train. Default: $FASTSIAM_DATA, else ./data, "
        "else images that are made for it and resemble ImageNet's."
    )
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
        "How the images are stored for ffcv, dali and memory, as a,b: original, short256 "
        "(shorter side 256 pixels), pixels256 (that, not as JPEGs). torchvision reads originals."
    )
    variants: str = ""
    (
        "Ways to take a training step, as a,b: default (compiled, bf16, channels last); without "
        "one lever: eager, views-apart, fp32, fp16, nchw, memory-returned; with one more: "
        "recompute, cuda-graphs, syncbn; with none, or one alone: plain, plain-bf16, "
        "plain-channels-last, plain-compiled, plain-keeping-memory; or authors, the authors' "
        "setting. Default: all that can run here."
    )
    peers: str = ""
    """Other libraries to measure with, as a,b. Default: all that are installed."""
    over: Over = "workers"
    """What is varied."""
    values: str = ""
    """Its values, as 1,2,4. Default: some that make sense here."""
    workers: int = -1
    """Processes or threads that load; -1 is one for each core."""
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
        ):
            for name in getattr(self, field).split(","):
                require(
                    name in known or not getattr(self, field),
                    f"{field} are some of {', '.join(known)}, not {name!r}",
                )
        for value in self.values.split(",") if self.values else ():
            require(
                value.isdigit() and int(value) > 0,
                f"values are whole numbers such as 1,2,4, not {self.values!r}",
            )
        require(
            not self.backbone or self.backbone in OWN_BACKBONES,
            f"backbone is one of {', '.join(OWN_BACKBONES)}, not {self.backbone!r}",
        )
        _ = self.train  # refuses what the recipe's own settings refuse

    @property
    def pipeline_names(self) -> tuple[Pipeline, ...]:
        """The pipelines, torchvision's first."""
        names: Any = self.pipelines.split(",") if self.pipelines else PIPELINES
        return ("torchvision", *(name for name in names if name != "torchvision"))

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
        monitor = replace(config.monitor, eval_resize=max(config.monitor.eval_resize, augment.crop))
        return replace(config, augment=augment, model=model, monitor=monitor)

    @property
    def augment(self) -> AugmentConfig:
        """How images become views."""
        return self.train.augment

    @property
    def root(self) -> Path:
        """The data's place, with the default filled in; it may not be there."""
        return DataConfig(data=self.data).root


_COMMON = ("repeats", "device", "json")
_IMAGES = ("data", "images", "recipe", "crop", "batch", "workers")

FIELDS: dict[str, tuple[str, ...]] = {
    "machine": _COMMON,
    "decode": (*_IMAGES, "stored", *_COMMON),
    "loader": (*_IMAGES, "pipelines", "stored", *_COMMON),
    "photometric": ("recipe", "crop", "batch", *_COMMON),
    "step": ("recipe", "crop", "backbone", "batch", "variants", *_COMMON),
    "train": (*_IMAGES, "backbone", "pipelines", "stored", *_COMMON),
    "convert": ("data", "images", "workers", *_COMMON),
    "startup": (*_IMAGES, "pipelines", *_COMMON),
    "peers": (*_IMAGES, "peers", "pipelines", *_COMMON),
    "knn": _COMMON,
    "sweep": ("over", "values", *_IMAGES, "pipelines", *_COMMON),
    "all": (*_IMAGES, "backbone", "pipelines", "stored", "variants", *_COMMON),
}
"""The settings that each case depends on."""

CASES: dict[str, str] = {
    "all": "What tells most in few minutes: loader, photometric, train, step.",
    "loader": "Each pipeline, to uint8 crops and to finished views, beside bare decoding.",
    "decode": "Decoders on the same bytes, and nothing else: the ceiling of a loader.",
    "photometric": "Jitter, gray, blur and normalisation of crops that are ready.",
    "step": "The training step on ready tensors, in several ways, and in the authors' setting.",
    "train": "Training end to end by each pipeline, beside ready tensors: the ceiling.",
    "convert": "fastsiam convert beside cp and FFCV's writer.",
    "startup": "Time to the first batch in a new process, first and later epochs, cold and warm.",
    "sweep": "Scaling: workers, batch, side of a view, JPEG quality or ranks.",
    "peers": "Other libraries that make two views, on the same images.",
    "knn": "The kNN classifier beside lightly's, on the same features.",
    "machine": "What the machine does at most: copies and matrix products.",
}
"""The commands that measure, and their help."""
