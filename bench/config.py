"""Settings of ``fastsiam bench``, from which the command line options are generated."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from fastsiam.bench.libraries import PEERS
from fastsiam.config import (
    METHOD_CONFIGS,
    OWN_BACKBONES,
    AugmentConfig,
    DataConfig,
    ImagePipeline,
    Pipeline,
    TrainConfig,
    require,
)
from fastsiam.config.convert import check_workers
from fastsiam.config.recipes import RECIPES
from fastsiam.config.setting import Config, check_name, setting
from fastsiam.config.urls import Url

Stored = Literal["original", "beton", "tar", "parquet", "short256", "pixels256"]
"""How images are stored: as files in a folder; the same bytes in one .beton, tar or uncompressed
parquet file; resized to a shorter side of 256 pixels; as raw pixels of that size."""
ORIGINAL: Stored = "original"
CONTAINERS: tuple[Stored, ...] = ("beton", "tar", "parquet")
"""Forms that store the original images' bytes in one file."""


def with_form(name: str, form: Stored) -> str:
    """Append the form in which the images are stored to a name, unless it is the original."""
    return name if form == ORIGINAL else f"{name}, {form}"


Over = Literal["workers", "batch", "crop", "quality", "prefetch", "jpeg-engine", "ranks"]
"""What a sweep varies: workers, batch size, side of a view, JPEG quality, prefetched batches,
percent of the images that the GPU's JPEG engine decodes, or ranks."""

_PLAIN = {"precision": "fp32", "channels_last": False, "compile": "off"}
AUTHORS, SYNC_BN = "authors", "syncbn"
"""Variants: the step of the paper authors' code, which is the baseline of the others; and the step
with synchronised BN on several ranks, which is compared with the same step without it."""
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "eager": {"compile": "off"},
    "fp32": {"precision": "fp32"},
    "fp16": {"precision": "fp16"},
    "nchw": {"channels_last": False},
    "recompute": {"activation_memory": 0.5},
    "cuda-graphs": {"cuda_graphs": True},
    "plain": _PLAIN,
    "plain-bf16": _PLAIN | {"precision": "bf16"},
    "plain-channels-last": _PLAIN | {"channels_last": True},
    "plain-compiled": _PLAIN | {"compile": "on"},
    SYNC_BN: {"sync_bn": True},
    AUTHORS: _PLAIN,
}
"""Variants of the training step: settings of ``NumericsConfig`` and ``StepConfig`` that differ from
the default. The default is compiled, channels last, and bfloat16 where the hardware supports it."""
ONLY_ON_GPU = ("fp16", "cuda-graphs")
"""Variants that need a GPU."""

_LISTS: dict[str, Collection[str]] = {
    "pipelines": get_args(ImagePipeline),
    "variants": VARIANTS,
    "peers": PEERS,
    "methods": METHOD_CONFIGS,
}
"""Settings of ``BenchConfig`` that are lists of names, and the names that each accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig(Config):
    """Settings of a benchmark: what to measure, on which images, and how often."""

    data: str = setting(
        "",
        "Images to measure with, as for train. Default: $FASTSIAM_DATA, else ./data, "
        "else generated images that resemble ImageNet's.",
    )
    image_column: str = setting("", "Column with the images, as for train.")
    label_column: str = setting("", "Column with the labels, as for train.")
    images: int = setting(
        0,
        "Images per repeat, spread evenly over the data (repeated if there are fewer). "
        "0: a number that takes a few seconds to load.",
        at_least=0,
    )
    recipe: str = setting(
        "imagenet",
        "Recipe whose augmentation and model to measure, such as imagenet, cifar10 or demo.",
    )
    crop: int = setting(0, "Side of a view in pixels. 0: the recipe's.", at_least=0)
    backbone: str = setting("", "Encoder. Default: the recipe's.")
    batch: int = setting(
        0,
        "Batch size per rank. 0: for loading, 256 on a GPU and 64 on a CPU; for training, what "
        "fits on the GPU or takes a CPU about half a second.",
        at_least=0,
    )
    pipelines: tuple[ImagePipeline, ...] = setting(
        (),
        "Pipelines to measure, comma-separated. Default: all that can run here. torchvision is "
        "always measured.",
    )
    stored: tuple[Stored, ...] = setting(
        (ORIGINAL,),
        "Forms in which the images are stored, comma-separated: original (files in a folder), "
        "beton, tar, parquet (uncompressed), short256 (shorter side of 256 pixels), pixels256 "
        "(the same as raw pixels). torchvision always reads original files; ffcv reads original "
        "images from a .beton file.",
    )
    variants: tuple[str, ...] = setting(
        (),
        "Variants of the training step, comma-separated: default (compiled, bf16, channels last); "
        "default with one change: eager, fp32, fp16, nchw, recompute, cuda-graphs, syncbn; plain "
        "(fp32, NCHW, not compiled); plain with one change: plain-bf16, plain-channels-last, "
        "plain-compiled; authors (as in the paper authors' code). Default: all that can run here.",
    )
    peers: tuple[str, ...] = setting(
        (), "Other libraries to measure, comma-separated. Default: all that are installed."
    )
    methods: tuple[str, ...] = setting(
        (),
        "Methods to measure, comma-separated. Default: all that can be compared with lightly's.",
    )
    over: Over = setting(
        "workers",
        "Setting to vary. crop: side of a view in pixels; quality: JPEG quality; prefetch: number "
        "of prefetched batches; jpeg-engine: percentage of the images that dali decodes on the "
        "GPU's JPEG engine.",
    )
    values: tuple[int, ...] = setting(
        (), "Values to measure, such as 1,2,4. Default: depends on setting and machine.", at_least=0
    )
    workers: int = setting(-1, "Loader processes or threads. -1: one per core.", at_least=-1)
    latencies: tuple[int, ...] = setting(
        (0, 20, 100),
        "Milliseconds to add to each request to object storage, comma-separated.",
        at_least=0,
    )
    repeats: int = setting(
        0,
        "Number of timed repeats after a warm-up. 0: 3 for bench all, otherwise 5.",
        at_least=0,
    )
    device: Literal["auto", "cuda", "cpu"] = setting(
        "auto", "Device for views and training. auto: the GPU if there is one."
    )
    json: str = setting("", "File to write the records to.")

    def check(self) -> None:
        """Check that names are known and numbers are valid."""
        check_name("recipe", self.recipe, RECIPES)
        check_name("backbone", self.backbone, ("", *OWN_BACKBONES))
        require(self.batch != 1, "batch must be at least 2 (BN needs two samples)")
        check_workers(self.workers)
        for option, known_names in _LISTS.items():
            for name in getattr(self, option):
                check_name(f"name in {option}", name, known_names)
        largest = max(self.values, default=0)
        require(
            self.over not in ("jpeg-engine", "quality") or largest <= 100,
            f"values of {self.over} are at most 100, not {largest}",
        )
        require(
            self.over == "jpeg-engine" or 0 not in self.values, "values must be at least 1, not 0"
        )
        _ = self.train  # runs the checks of the recipe's settings

    @property
    def pipeline_names(self) -> tuple[Pipeline, ...]:
        """The pipelines to measure: first the baseline, which is always included."""
        from fastsiam.pipelines.backends import BASELINE

        return tuple(dict.fromkeys((BASELINE, *self.names("pipelines"))))

    def names(self, option: str) -> tuple[Any, ...]:
        """Return the selected names of a list setting, such as ``peers``; by default all names."""
        names: tuple[str, ...] = getattr(self, option)
        return names or tuple(_LISTS[option])

    @property
    def train(self) -> TrainConfig:
        """The recipe, with the crop and the backbone of these settings."""
        changes = {"crop": self.crop, "backbone": self.backbone}
        overrides = {name: value for name, value in changes.items() if value}
        return TrainConfig.from_flags(RECIPES[self.recipe]().to_flags() | overrides)

    @property
    def augment(self) -> AugmentConfig:
        """The recipe's augmentation."""
        return self.train.augment

    @property
    def root(self) -> Path | Url:
        """Location of the images, with the default filled in; it might not exist."""
        return DataConfig(data=self.data).root


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuConfig(Config):
    """Settings of the stages on a GPU."""

    minutes: float = setting(
        9.0, "Time limit in minutes. The next call runs the stages that are left.", above=0
    )
    data: str = setting(
        "",
        "ImageNet images to measure with, as for train. Default: $FASTSIAM_DATA, else ./data in "
        "the checkout, else generated images.",
    )
    cifar10: str = setting(
        "",
        "CIFAR-10 images to train on, as for train. Default: the demo's images, on which the "
        "accuracy means nothing.",
    )
    out: str = setting(
        "",
        "Folder for the page, records and logs. A later call resumes from its contents. "
        "Default: $OUT/gpu if OUT is set, else runs/gpu.",
    )
    again: tuple[str, ...] = setting((), "Finished stages to run again, comma-separated.")
    device: Literal["auto", "cuda", "cpu"] = setting(
        "auto",
        "auto: the GPU if there is one. On a CPU, all stages are small, to try out the command.",
    )

    @property
    def folder(self) -> Path:
        """The folder for the results, with the default filled in."""
        return Path(self.out or Path(os.environ.get("OUT") or "runs", "gpu")).absolute()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadlineConfig(Config):
    """Settings of the runs and their goal."""

    data: str = setting("", "CIFAR-10, as for train. Default: $FASTSIAM_DATA, else ./data.")
    minutes: float = setting(9.0, "Time limit in minutes. The next call resumes.", above=0)
    goal: float = setting(
        90.0, "kNN top-1 accuracy in percent at which a method stops.", above=0, at_most=100
    )
    only: tuple[Literal["fastsiam", "simsiam"], ...] = setting(
        ("fastsiam", "simsiam"), "Methods to train in turn, comma-separated."
    )
    knn_every: int = setting(5, "Epochs between two kNN evaluations.", at_least=1)
    epochs: int = setting(0, "Epochs of the schedule. 0: the recipe's.", at_least=0)
    width: int = setting(0, "Channels of the backbone's first stage. 0: the recipe's.", at_least=0)
    seed: int = setting(0, "Seed of both runs.")
    cuda_graphs: bool = setting(
        True,
        "On a GPU, replay each step as a CUDA graph, because launching its kernels takes longer "
        "than running them.",
    )
    device: Literal["auto", "cuda", "cpu"] = setting("auto", "auto: the GPU if there is one.")
    out: str = setting("runs/headline", "Folder for the runs, the record and the picture.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakConfig(Config):
    """Settings of the runs and their faults."""

    minutes: float = setting(
        120.0, "Minutes to train for; the last pair of runs may take longer.", above=0
    )
    seed: int = setting(0, "Seed of the faults, their times, and the runs.", at_least=0)
    ranks: int = setting(4, "Processes of each run, on the CPU.", at_least=2, at_most=12)
    pipelines: tuple[Pipeline, ...] = setting(
        (), "Pipelines to train with in turn, comma-separated. Default: all that are installed."
    )
    seconds: float = setting(120.0, "Approximate seconds of an undisturbed run.", above=0)
    every: float = setting(25.0, "Mean seconds between two faults.", above=0)
    out: str = setting("runs/soak.json", "File for the record.")

    @property
    def names(self) -> tuple[Pipeline, ...]:
        """The pipelines to train with, in the order in which runs use them."""
        from fastsiam.pipelines.backends import BACKENDS

        installed = (name for name, backend in BACKENDS.items() if backend.installed)
        return self.pipelines or tuple(installed)
