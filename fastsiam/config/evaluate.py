"""Settings of the evaluations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from fastsiam.console import format_count

from .data import Alpha, Exif, ImagePipeline, parse_holdout
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
        "", "Data, as for train, with the validation split if there is one. Default: the run's."
    )
    workers: int = setting(
        -1, "Loader threads per rank (torchvision: processes). -1: one per core.", at_least=-1
    )
    backbone: str = setting(
        "",
        "Network of a weights file, if the names in it do not identify it: one of torchvision's, "
        "or timm/NAME.",
    )
    stem: Literal["", Stem] = setting(
        "",
        "First layers of a ResNet in such a file, as for train; the weights do not identify them.",
    )
    untrained: bool = setting(
        False, "Evaluate the same network with random weights, drawn with the run's seed."
    )
    mean: tuple[float, float, float] | None = setting(
        None,
        "Per-channel mean that normalisation subtracts. Default: the run's, else ImageNet's.",
    )
    std: tuple[float, float, float] | None = setting(
        None,
        "Per-channel standard deviation that normalisation divides by. Default: the run's, else "
        "ImageNet's.",
        above=0,
    )
    precision: Literal["run", Precision] = setting(
        "run", "Autocast dtype, as for train. run: the run's (for weights files: auto)."
    )
    json: str = setting(
        "",
        "Write the record to this file. Evaluations of a run also write theirs to its eval folder.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig(NetworkConfig):
    """Images: how to read them. By default as in the run, for weights files as in train."""

    image_column: str = setting("", "Image column. Default: the run's, if its data are used.")
    label_column: str = setting("", "Label column. Default: the run's, if its data are used.")
    holdout: str = setting(
        "",
        "Share of each class to hold out for validation, as for train. 0: none. Default: the "
        "run's, if its data are used.",
    )
    bad_images: Literal["run", "stop", "replace"] = setting(
        "run",
        "What to do if an image cannot be decoded. stop: exit with an error. replace: skip it, or "
        "use another one in training. run: as in the run (for weights files: stop).",
    )
    exif: Literal["run", Exif] = setting(
        "run", "EXIF orientation, as for train. run: as in the run (for weights files: ignore)."
    )
    alpha: Literal["run", Alpha] = setting(
        "run", "Transparent pixels, as for train. run: as in the run (for weights files: drop)."
    )
    pipeline: Literal["run", "auto", ImagePipeline] = setting(
        "run",
        "Pipeline, as for train. run: the run's (for weights files: auto). auto never chooses "
        "memory, which would decode all images first.",
    )
    crop: int = setting(
        0,
        "Side of the central crop in pixels. Default: the run's, else 224 (CIFAR: 32).",
        at_least=0,
    )
    resize: int = setting(
        0,
        "Shorter side in pixels before the central crop. Default: the run's, or with another "
        "--crop as for eval_resize=0 in train.",
        at_least=0,
    )
    feature_batch: int = setting(256, "Batch size per rank for computing features.", at_least=1)

    def check(self) -> None:
        """Check the nodes, the holdout and the image sizes."""
        NodesConfig.check(self)
        parse_holdout(self.holdout)
        require(
            not (self.crop and self.resize) or self.resize >= self.crop,
            f"resize ({self.resize}) must be at least crop ({self.crop})",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KnnConfig(EvalConfig):
    """Classifier: kNN, with all combinations of k and temperature in one pass."""

    k: tuple[int, ...] = setting(
        (), "Number of neighbours, or several: 10,20,200. Default: the run's, else 200.", at_least=1
    )
    temperature: tuple[float, ...] = setting(
        (),
        "Temperature T of the vote weights exp(similarity / T), or several: 0.07,0.2. Default: the "
        "run's, else 0.2.",
        above=0,
    )
    baselines: bool = setting(
        False,
        "Also evaluate the untrained network and the raw pixels. The pixels of all validation "
        "images are held in memory: 60 GB for ImageNet.",
    )
    per_class: bool = setting(
        False, "Print the accuracy of each class; it is always in the record."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelConfig(EvalConfig):
    """Training with labels: images, optimizer and seed."""

    percent: float = setting(
        100.0,
        "Percentage of each class's training images to use, at least one image per class. "
        "Low-shot evaluations use 1 and 10.",
        above=0,
        at_most=100,
    )
    subset: str = setting("", "File with the names of the training images to use, one per line.")
    scale_min: float = setting(
        0.08, "Minimum area of a random crop, as a share of the image's area.", above=0, at_most=1
    )
    momentum: float = setting(0.9, "Momentum of the optimizer.", at_least=0, below=1)
    weight_decay: float = setting(0.0, "Weight decay.", at_least=0)
    eval_every: int = setting(
        10, "Epochs between validations; 0: only after the last epoch.", at_least=0
    )
    seed: int = setting(
        0,
        "Seed of the subset, the initial weights, the image order and the crops.",
        at_least=0,
        below=2**63,
    )
    resume: Literal["auto", "never"] = setting(
        "auto", "auto: resume the same evaluation if it was interrupted; never: start over."
    )

    def check(self) -> None:
        """Raise ``ValueError`` if settings contradict each other."""
        EvalConfig.check(self)
        require(not (self.subset and self.percent < 100), "give --subset or --percent, not both")

    def with_defaults(self, images: int) -> Self:
        """Resolve the settings whose default depends on others or on the number of images."""
        return self

    def protocol(self) -> dict[str, Any]:
        """Return the resolved settings that identify the evaluation in its record."""
        return {
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
            "schedule": "cosine per step",
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearConfig(LabelConfig):
    """Classifier: linear, with the paper authors' defaults if there are enough images."""

    optimizer: Literal["auto", "lars", "sgd"] = setting(
        "auto",
        "lars: as in the paper. sgd: the paper's alternative, with --lrs 30 --batch 256. auto: "
        "lars if --lrs is given or images x epochs are enough for 2,000 steps of batch 4096; else "
        "sgd with several rates, because so few steps of lars hardly change the weights.",
    )
    lrs: tuple[float, ...] = setting(
        (),
        "Learning rate for a batch of 256, scaled by batch / 256. Several (0.02,0.05,0.1) train "
        "one classifier each. Default: 0.1 for lars (from the authors' code; the paper says 0.02), "
        "30 for sgd, 0.1,0.3,1,3,10,30 if auto chooses sgd.",
        above=0,
    )
    batch: int = setting(
        0,
        "Global batch size. Default: 4096 for lars, 256 for sgd (16 to 256 if auto chooses sgd).",
        at_least=0,
    )
    epochs: int = setting(
        90, "Number of epochs, and length of the cosine schedule of the rate.", at_least=1
    )
    lars_trust: float = setting(0.001, "Trust coefficient of lars, without clipping.", above=0)
    cached: bool = setting(
        False,
        "Train on features of one central crop per image, computed once. This takes minutes "
        "instead of hours, but there is no augmentation.",
    )
    storage: Storage = setting(
        "fp32", "Dtype of the features that --cached stores; fp16 and bf16 halve the memory."
    )

    def check(self) -> None:
        """Raise ``ValueError`` if settings contradict each other."""
        LabelConfig.check(self)
        require(
            self.cached or self.storage == "fp32",
            "storage needs --cached: otherwise no features are stored",
        )
        require(len(set(self.lrs)) == len(self.lrs), f"lrs has a duplicate rate: {self.lrs}")

    def with_defaults(self, images: int) -> Self:
        """Resolve optimizer, rates and batch size for this number of training images."""
        optimizer, lrs, batch = self.optimizer, self.lrs, self.batch
        if optimizer == "auto":
            # The relative change of a weight by LARS depends on the sum of the rates, which scale
            # with the batch size. So only images x epochs matters.
            if lrs or images * self.epochs >= _LARS_STEPS * _PAPERS_BATCH:
                optimizer = "lars"
            else:
                optimizer, lrs = "sgd", _RATES_FOR_LITTLE
                batch = batch or _batch_for_little(images)
        default_rate, default_batch = (30.0, 256) if optimizer == "sgd" else (0.1, _PAPERS_BATCH)
        return replace(
            self, optimizer=optimizer, lrs=lrs or (default_rate,), batch=batch or default_batch
        )

    def protocol(self) -> dict[str, Any]:
        """Return the resolved settings that identify the evaluation in its record."""
        return {
            "batch": self.batch,
            **LabelConfig.protocol(self),
            "optimizer": self.optimizer,
            "lars_trust": self.lars_trust if self.optimizer == "lars" else None,
            "rates": list(self.lrs),
            "epochs": self.epochs,
            "cached": self.cached,
            "storage": self.storage if self.cached else None,
            "scale_min": None if self.cached else self.scale_min,
        }

    def explain_auto(self, images: int) -> str:
        """Explain the choice of "auto" for this number of images; "" if it is not used."""
        if self.optimizer != "auto":
            return ""
        reason = "--lrs is given" if self.lrs else self._lars_steps(images)
        return f"{self.with_defaults(images).optimizer.upper()}: {reason} (see --optimizer)"

    def lars_warning(self, images: int) -> str:
        """Warn if LARS is used with too few steps for this number of images; "" otherwise."""
        is_enough = images * self.epochs >= _LARS_STEPS * _PAPERS_BATCH
        if is_enough or self.with_defaults(images).optimizer != "lars":
            return ""
        return (
            f"{self._lars_steps(images)}: it hardly changes the weights, so accuracies will be "
            "far too low; pass --optimizer sgd"
        )

    def _lars_steps(self, images: int) -> str:
        steps = images * self.epochs // _PAPERS_BATCH
        return (
            f"{images:,} images x {format_count(self.epochs, 'epoch')} are {steps:,} steps "
            f"of {_PAPERS_BATCH}, and LARS needs {_LARS_STEPS:,}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneConfig(LabelConfig):
    """Fine-tuning: entire network, SimCLR's defaults (appendix B.5) except the batch."""

    lr: float = setting(0.05, "Learning rate for a batch of 256, scaled by batch / 256.", above=0)
    batch: int = setting(
        256, "Global batch size (SimCLR: 4096), at most the number of training images.", at_least=2
    )
    epochs: int = setting(
        0,
        "Epochs. Default: 60 with --percent up to 1, or a --subset of up to 2% of the training "
        "images; else 30.",
        at_least=0,
    )

    def protocol(self) -> dict[str, Any]:
        """Return the resolved settings that identify the evaluation in its record."""
        return {
            "batch": self.batch,
            **LabelConfig.protocol(self),
            "optimizer": "sgd, Nesterov" if self.momentum else "sgd",
            "lr": self.lr,
            "epochs": self.epochs,
            "scale_min": self.scale_min,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FeaturesConfig(EvalConfig):
    """Features: which ones to write, and the output file."""

    out: str = setting(
        "features.npy",
        "File to write: .npy (with names and labels in a .npy.csv next to it) or .parquet.",
    )
    split: Literal["auto", "train", "val"] = setting(
        "auto",
        "auto: all training images, including held-out ones. train: without held-out ones. val: "
        "the held-out images, or the validation images. With a holdout, the file has a column "
        "split. A folder without splits counts as train.",
    )
    layer: Literal["backbone", "projector"] = setting(
        "backbone",
        "backbone: its pooled features (pool5). projector: projections, which the loss compares.",
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

    out: str = setting("neighbours.png", "Picture file to write, such as a .png.")
    images: int = setting(
        8,
        "Query images, drawn at random from the validation images, or from the training images "
        "if there is no validation split.",
        at_least=1,
    )
    k: int = setting(8, "Nearest training images to draw for each query.", at_least=1)
    seed: int = setting(0, "Seed for choosing the queries.", at_least=0)


def _batch_for_little(images: int) -> int:
    """Return the largest of 256, 128, ... 16 that gives eight full steps per epoch, or 16."""
    return next(batch for batch in (256, 128, 64, 32, 16) if batch * 8 <= images or batch == 16)
