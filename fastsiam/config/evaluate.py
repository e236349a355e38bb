"""Settings of the evaluations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from .data import Alpha, Exif, ImagePipeline, share
from .model import Stem
from .run import NodesConfig
from .setting import require, setting
from .train import Precision

Storage = Literal["fp32", "fp16", "bf16"]

_PAPERS_BATCH = 4096
"""Batch size of the paper's linear evaluation with LARS."""
_LARS_STEPS = 2000
"""With fewer steps of this batch size, LARS hardly changes the weights; ImageNet has 28,080."""
_RATES_FOR_LITTLE = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Base rates for SGD on few images; the best one depends on their number and the features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig(NodesConfig):
    """Network: what to evaluate, and on which data."""

    data: str = setting(
        "", "Data, as for train, with a validation split where there is one. Default: the run's."
    )
    workers: int = setting(
        -1, "Loader threads (torchvision: processes) of each rank; -1: one per core.", at_least=-1
    )
    backbone: str = setting(
        "", "Network of a file whose names do not tell: one of torchvision's, or timm/NAME."
    )
    stem: Literal["", Stem] = setting(
        "", "First layers of a ResNet in such a file, as for train: weights do not tell."
    )
    untrained: bool = setting(
        False, "Evaluate the same network with random weights of the run's seed."
    )
    mean: tuple[float, float, float] | None = setting(
        None,
        "Mean of each channel that normalisation subtracts. Default: the run's, else ImageNet's.",
    )
    std: tuple[float, float, float] | None = setting(
        None,
        "Standard deviation that normalisation divides by. Default: the run's, else ImageNet's.",
        above=0,
    )
    precision: Literal["run", Precision] = setting(
        "run", "Autocast type, as for train. run: as the run (auto for other files)."
    )
    json: str = setting(
        "", "Also write the record to this file; the run's eval folder always has it."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig(NetworkConfig):
    """Images: how to read them, by default as the run did (for weights files: as train does)."""

    image_column: str = setting("", "Column with the images. Default: the run's, for its own data.")
    label_column: str = setting("", "Column with the labels. Default: the run's, for its own data.")
    holdout: str = setting(
        "",
        "Share of each class to validate on, as for train; 0: none. Default: the run's, for its "
        "own data.",
    )
    bad_images: Literal["run", "stop", "replace"] = setting(
        "run",
        "If an image cannot be decoded: stop, or replace, which leaves it out, or shows another "
        "one in training. run: as the run (stop for other files).",
    )
    exif: Literal["run", Exif] = setting(
        "run", "EXIF orientation, as for train. run: as the run (ignore for other files)."
    )
    alpha: Literal["run", Alpha] = setting(
        "run", "Transparent pixels, as for train. run: as the run (drop for other files)."
    )
    pipeline: Literal["run", "auto", ImagePipeline] = setting(
        "run",
        "Pipeline, as for train. run: as the run (auto for other files). auto is never memory, "
        "which would decode all images first.",
    )
    crop: int = setting(
        0, "Side of the central crop. Default: the run's, else 224 (CIFAR: 32).", at_least=0
    )
    resize: int = setting(
        0,
        "Shorter side in pixels before the central crop. Default: the run's; with another --crop "
        "as for eval_resize=0 of train.",
        at_least=0,
    )
    feature_batch: int = setting(
        256, "Images that go through the network at a time on each rank.", at_least=1
    )

    def check(self) -> None:
        """Check the nodes, the holdout and the image sizes."""
        NodesConfig.check(self)
        share(self.holdout, "holdout")
        require(
            not (self.crop and self.resize) or self.resize >= self.crop,
            f"resize ({self.resize}) must be at least crop ({self.crop})",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KnnConfig(EvalConfig):
    """Classifier: kNN, with all combinations of k and temperature in one pass."""

    k: tuple[int, ...] = setting(
        (), "Neighbours that vote; several as 10,20,200. Default: the run's, else 200.", at_least=1
    )
    temperature: tuple[float, ...] = setting(
        (),
        "T of the votes' weights exp(similarity / T); several as 0.07,0.2. Default: the run's, "
        "else 0.2.",
        above=0,
    )
    baselines: bool = setting(False, "Also evaluate the untrained network and the raw pixels.")
    per_class: bool = setting(False, "Print the accuracy of every class; the record always has it.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelConfig(EvalConfig):
    """Training with labels: images, optimizer and seed."""

    percent: float = setting(
        100.0,
        "Percentage of each class's training images to use, at least one image; low-shot "
        "evaluations use 1 and 10.",
        above=0,
        at_most=100,
    )
    subset: str = setting(
        "", "File with the names of the training images to use, one on each line."
    )
    scale_min: float = setting(
        0.08, "Smallest area of a random crop, as a share of the image's area.", above=0, at_most=1
    )
    momentum: float = setting(0.9, "Momentum of the optimizer.", at_least=0, below=1)
    weight_decay: float = setting(0.0, "Weight decay.", at_least=0)
    eval_every: int = setting(
        10, "Epochs between validations; 0: only after the last epoch.", at_least=0
    )
    seed: int = setting(
        0, "Seed of the subset, the classifier's weights, the order and the crops.", at_least=0
    )
    resume: Literal["auto", "never"] = setting(
        "auto", "auto: resume the same evaluation if it was interrupted; never: start over."
    )

    def check(self) -> None:
        """Raise ``ValueError`` if settings contradict each other."""
        EvalConfig.check(self)
        require(not (self.subset and self.percent < 100), "give --subset or --percent, not both")

    @property
    def global_batch(self) -> int:
        """Images per step over all ranks, with the default filled in."""
        raise NotImplementedError

    def settled(self, images: int) -> Self:
        """Resolve the settings that depend on the number of training images."""
        return self

    def protocol(self) -> dict[str, Any]:
        """Return the resolved settings that identify the evaluation in its record."""
        return {
            "batch": self.global_batch,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
            "schedule": "cosine per step",
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearConfig(LabelConfig):
    """Classifier: linear, with the defaults of the paper's authors if there are enough images."""

    optimizer: Literal["auto", "lars", "sgd"] = setting(
        "auto",
        "lars as in the paper, or sgd, its alternative with --lrs 30 --batch 256. auto: lars if "
        "--lrs is given or images x epochs make 2,000 steps of 4096; else sgd with several rates, "
        "because so few steps of lars hardly change the weights.",
    )
    lrs: tuple[float, ...] = setting(
        (),
        "Learning rates for a batch of 256, scaled by batch / 256; several (0.02,0.05,0.1) train "
        "one classifier each. Default: 0.1 for lars (the authors' code; the paper's text says "
        "0.02), 30 for sgd, 0.1,0.3,1,3,10,30 where auto chooses sgd.",
        above=0,
    )
    batch: int = setting(
        0,
        "Global batch size. Default: 4096 for lars, 256 for sgd (16 to 256 where auto chooses "
        "sgd).",
        at_least=0,
    )
    epochs: int = setting(
        90, "Passes over the training images, the length of the cosine.", at_least=1
    )
    lars_trust: float = setting(0.001, "Trust coefficient of lars; there is no clipping.", above=0)
    cached: bool = setting(
        False,
        "Train on features of one central crop of each image, computed once: minutes instead of "
        "hours, but without augmentation.",
    )
    storage: Storage = setting(
        "fp32", "Type in which --cached keeps features; fp16 and bf16 halve the memory."
    )

    def check(self) -> None:
        """Raise ``ValueError`` if settings contradict each other."""
        LabelConfig.check(self)
        require(
            self.cached or self.storage == "fp32", "storage is for --cached: nothing else is kept"
        )
        require(len(set(self.lrs)) == len(self.lrs), f"lrs has a rate twice: {self.lrs}")

    @property
    def rates(self) -> list[float]:
        """Base learning rates, with the default filled in."""
        return list(self.lrs) or [30.0 if self.optimizer == "sgd" else 0.1]

    @property
    def global_batch(self) -> int:
        """Images per step over all ranks, with the default filled in."""
        return self.batch or (256 if self.optimizer == "sgd" else _PAPERS_BATCH)

    def settled(self, images: int) -> Self:
        """Resolve "auto" for this number of training images."""
        if self.optimizer != "auto":
            return self
        # The relative change of a weight by LARS depends on the sum of the rates, which scale with
        # the batch size. So only images x epochs matters.
        if self.lrs or images * self.epochs >= _LARS_STEPS * _PAPERS_BATCH:
            return replace(self, optimizer="lars")
        batch = self.batch or _batch_for_little(images)
        return replace(self, optimizer="sgd", lrs=_RATES_FOR_LITTLE, batch=batch)

    def protocol(self) -> dict[str, Any]:
        """Return the resolved settings that identify the evaluation in its record."""
        return LabelConfig.protocol(self) | {
            "optimizer": self.optimizer,
            "lars_trust": self.lars_trust if self.optimizer == "lars" else None,
            "rates": self.rates,
            "epochs": self.epochs,
            "cached": self.cached,
            "storage": self.storage if self.cached else None,
            "scale_min": None if self.cached else self.scale_min,
        }

    def why_settled(self, images: int) -> str:
        """Explain the choice of "auto" for this number of images; "" if it is not used."""
        if self.optimizer != "auto":
            return ""
        why = "--lrs is given"
        if not self.lrs:
            steps = images * self.epochs // _PAPERS_BATCH
            why = (
                f"{images:,} images x {self.epochs} epochs are {steps:,} steps of {_PAPERS_BATCH}, "
                f"and LARS takes {_LARS_STEPS:,}"
            )
        return f"{self.settled(images).optimizer.upper()}: {why} (see --optimizer)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneConfig(LabelConfig):
    """Fine-tuning: the entire network, with SimCLR's defaults (appendix B.5) except the batch."""

    lr: float = setting(0.05, "Learning rate for a batch of 256, scaled by batch / 256.", above=0)
    batch: int = setting(
        256, "Global batch size (SimCLR: 4096), at most the number of training images.", at_least=2
    )
    epochs: int = setting(
        0, "Passes over the training images. Default: 60 on up to 1% of them, else 30.", at_least=0
    )

    @property
    def global_batch(self) -> int:
        """Images per step over all ranks."""
        return self.batch

    def protocol(self) -> dict[str, Any]:
        """Return the resolved settings that identify the evaluation in its record."""
        return LabelConfig.protocol(self) | {
            "optimizer": "sgd, Nesterov",
            "lr": self.lr,
            "epochs": self.epochs,
            "scale_min": self.scale_min,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FeaturesConfig(EvalConfig):
    """Features: which ones to write, and the output file."""

    out: str = setting(
        "features.npy",
        "File to write: .npy (with names and labels in a .npy.csv beside it) or .parquet.",
    )
    split: Literal["auto", "train", "val"] = setting(
        "auto",
        "auto: all training images, with held-out ones; train: those that are not held out; val: "
        "held-out ones, or the validation images. With a holdout, a column split tells them "
        "apart. A folder without splits is train.",
    )
    layer: Literal["backbone", "projector"] = setting(
        "backbone",
        "Pooled features of the backbone (pool5), or projections, which the loss compares.",
    )
    force: bool = setting(False, "Overwrite existing files.")

    def check(self) -> None:
        """Check the file name extension."""
        EvalConfig.check(self)
        require(
            self.out.endswith((".npy", ".parquet")),
            f"out must end in .npy or .parquet, not {self.out!r}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighboursConfig(EvalConfig):
    """Picture: images and their nearest neighbours."""

    out: str = setting("neighbours.png", "Picture to write, such as a .png file.")
    images: int = setting(
        8,
        "Query images, spread over the validation images (without any: the training images).",
        at_least=1,
    )
    k: int = setting(8, "Neighbours of each query, out of the training images.", at_least=1)
    seed: int = setting(0, "Seed of the choice of queries.", at_least=0)


def _batch_for_little(images: int) -> int:
    """Return the largest batch size, 256 to 16, with at least eight full steps per epoch."""
    return next(batch for batch in (256, 128, 64, 32, 16) if batch * 8 <= images or batch == 16)
