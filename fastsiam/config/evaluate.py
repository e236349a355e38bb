"""Settings of the evaluations; fastsiam/cli/options.py makes their command lines out of these."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

from .checks import require, share
from .data import Alpha, Exif, ImagePipeline
from .model import Stem
from .nodes import NodesConfig
from .setting import setting
from .train import Precision

Storage = Literal["fp32", "fp16", "bf16"]

_PAPERS_BATCH = 4096
"""Of linear evaluation with LARS."""
_LARS_STEPS = 2000
"""With fewer of that batch LARS hardly leaves its start; ImageNet gives 28,080."""
_RATES_FOR_LITTLE = "0.1,0.3,1,3,10,30"
"""Base rates for SGD on few images: which is best depends on how many, and on the features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig(NodesConfig):
    """Images and network: what is evaluated, and where."""

    data: str = setting(
        "", "Data as of train, with a validation split where there is one; default: the run's."
    )
    image_column: str = setting(
        "", "Column of the images, as of train; default: the run's, for the run's own data."
    )
    label_column: str = setting(
        "", "Column of the labels, as of train; default: the run's, for the run's own data."
    )
    holdout: str = setting(
        "",
        "Share of each class to validate on, as of train; 0: nothing. Default: the run's, if the "
        "data are the run's own.",
    )
    bad_images: Literal["run", "stop", "replace"] = setting(
        "run",
        "What to do about an image that cannot be decoded, as of train; run is as the run had it, "
        "stop for other files. replace leaves it out, and in training with labels on random crops "
        "shows another in its place.",
    )
    exif: Literal["run", Exif] = setting(
        "run", "EXIF orientation, as of train; run is as the run had it, ignore for other files."
    )
    alpha: Literal["run", Alpha] = setting(
        "run", "Transparent pixels, as of train; run is as the run had it, drop for other files."
    )
    pipeline: Literal["run", "auto", ImagePipeline] = setting(
        "run",
        "How images are loaded, as of train; run is as the run had it, auto for other files. "
        "auto is never memory, which would decode all images before the first.",
    )
    workers: int = setting(
        -1,
        "Loader processes or threads of each rank; -1 is one for each core of the rank.",
        at_least=-1,
    )
    backbone: str = setting(
        "",
        "Network of a file that is no run's and whose names do not tell: "
        "one of torchvision's, or timm/NAME.",
    )
    stem: str = setting(
        "",
        "First layers of a ResNet in such a file, as of train, for weights do not tell the "
        "padding: imagenet, cifar, cifar-pad2, cifar-no-relu.",
    )
    untrained: bool = setting(
        False, "Evaluate the same network untrained, with fresh weights of the run's seed."
    )
    crop: int = setting(
        0,
        "Side of the central crop, in pixels; default: the run's, for other files 224 (CIFAR: 32).",
        at_least=0,
    )
    resize: int = setting(
        0,
        "Shorter side before that crop; default: the run's, for other crops as 0 of eval-resize.",
        at_least=0,
    )
    mean: tuple[float, float, float] | None = setting(
        None,
        "Mean of each channel that normalisation subtracts; default: the run's, else ImageNet's.",
    )
    std: tuple[float, float, float] | None = setting(
        None, "Standard deviation that it divides by; default: the run's, else ImageNet's.", above=0
    )
    precision: Literal["run", Precision] = setting(
        "run", "Autocast type of the network; run is as the run had it, auto for other files."
    )
    feature_batch: int = setting(
        256, "Images that go through the network at a time on each rank.", at_least=1
    )
    gpus: int = setting(
        1, "GPUs of this machine, one process each; with --device cpu, CPU processes.", at_least=1
    )
    device: Literal["auto", "cuda", "cpu"] = setting("auto", "auto takes the GPU if there is one.")
    json: str = setting("", "Write the record there too; it also goes into the run's eval folder.")

    def check(self) -> None:
        """Refuse settings that contradict each other."""
        NodesConfig.check(self)
        share(self.holdout, "holdout")
        stems = get_args(Stem)
        require(
            not self.stem or self.stem in stems,
            f"stem must be one of {', '.join(stems)}, not {self.stem!r}",
        )
        require(
            not (self.crop and self.resize) or self.resize >= self.crop,
            f"resize ({self.resize}) must be at least crop ({self.crop})",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KnnConfig(EvalConfig):
    """Classifier: kNN, all combinations of k and temperature in one pass."""

    k: str = setting(
        "",
        "Neighbours that vote, one number or several: 10,20,100,200. Default: the run's, else 200.",
    )
    temperature: str = setting(
        "",
        "T of the votes' weights exp(similarity / T), one or several: .07,.1,.2. "
        "Default: the run's, else 0.2.",
    )
    baselines: bool = setting(
        False, "Also the untrained network and the raw pixels, for comparison."
    )
    per_class: bool = setting(False, "Print the accuracy of every class; the record always has it.")

    def check(self) -> None:
        """Refuse values that no type or range tells."""
        EvalConfig.check(self)
        require(all(k >= 1 for k in self.ks), f"k must be at least 1, not {self.k}")
        require(
            all(t > 0 for t in self.temperatures),
            f"temperature must be above 0, not {self.temperature}",
        )

    @property
    def ks(self) -> list[int]:
        """The numbers of neighbours; none means the run's."""
        return [int(k) for k in numbers(self.k, "k", whole=True)]

    @property
    def temperatures(self) -> list[float]:
        """The temperatures; none means the run's."""
        return numbers(self.temperature, "temperature")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelConfig(EvalConfig):
    """Training with labels: on which images, and how."""

    percent: float = setting(
        100.0,
        "Share of the training images, in percent, that are trained on, the same of every class "
        "(at least one image): 1 and 10 are what low-shot evaluation takes.",
        above=0,
        at_most=100,
    )
    subset: str = setting(
        "", "File with the names of the training images to use, one a line, such as SimCLR's lists."
    )
    scale_min: float = setting(
        0.08,
        "Smallest crop of a training image, as a share of its area; it may be flipped, too.",
        above=0,
        at_most=1,
    )
    momentum: float = setting(0.9, "Momentum of the steps.", at_least=0, below=1)
    weight_decay: float = setting(0.0, "Weight decay.", at_least=0)
    eval_every: int = setting(
        10,
        "Epochs between validations; the last epoch is what counts, and 0 validates it alone.",
        at_least=0,
    )
    seed: int = setting(
        0,
        "Seed of the subset, of the classifier's first weights, of the images' order and crops.",
        at_least=0,
    )
    resume: Literal["auto", "never"] = setting(
        "auto",
        "auto continues where the same evaluation of the same run's network was interrupted.",
    )

    def check(self) -> None:
        """Refuse settings that contradict each other."""
        EvalConfig.check(self)
        require(not (self.subset and self.percent < 100), "give --subset or --percent, not both")

    @property
    def global_batch(self) -> int:
        """Images of a step over all ranks, with the default filled in."""
        raise NotImplementedError

    def settled(self, images: int) -> Self:
        """Return the settings with what depends on the number of training images filled in."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearConfig(LabelConfig):
    """Classifier: linear; the defaults are the paper's and its code's, where data are enough."""

    optimizer: Literal["auto", "lars", "sgd"] = setting(
        "auto",
        "lars as in the paper, or sgd, which it names as an alternative with --lrs 30 --batch 256. "
        "auto is lars if images x epochs are 2,000 steps of 4096 or more, or if --lrs are given; "
        "else sgd with several rates, for so few steps of lars hardly leave the start.",
    )
    lrs: str = setting(
        "",
        "Base rates for a batch of 256, scaled by batch / 256; several (.02,.05,.1,.2) train as "
        "many classifiers at once. Default: 0.1 for lars (the authors' code; the paper's text "
        "says 0.02), 30 for sgd, 0.1,0.3,1,3,10,30 where auto is sgd.",
    )
    batch: int = setting(
        0,
        "Global batch; at most the training images. Default: 4096 for lars, 256 for sgd (where "
        "auto is sgd, down to 16 for eight steps an epoch).",
        at_least=0,
    )
    epochs: int = setting(90, "Passes over the training images; the cosine ends here.", at_least=1)
    lars_trust: float = setting(0.001, "Trust coefficient of lars; there is no clipping.", above=0)
    cached: bool = setting(
        False,
        "Compute the features of one central crop of each training image once, and train on these: "
        "minutes, not hours, but no augmentation.",
    )
    storage: Storage = setting(
        "fp32", "How --cached keeps features: fp16 and bf16 take half of the memory."
    )

    def check(self) -> None:
        """Refuse settings that contradict each other."""
        LabelConfig.check(self)
        require(all(lr > 0 for lr in self.rates), f"lrs must be above 0, not {self.lrs}")
        require(len(set(self.rates)) == len(self.rates), f"lrs has a rate twice: {self.lrs}")
        require(
            self.cached or self.storage == "fp32", "storage is for --cached: nothing else is kept"
        )

    @property
    def rates(self) -> list[float]:
        """The base rates."""
        return numbers(self.lrs, "lrs") or [30.0 if self.optimizer == "sgd" else 0.1]

    @property
    def global_batch(self) -> int:
        """Images of a step over all ranks, with the default filled in."""
        return self.batch or (256 if self.optimizer == "sgd" else _PAPERS_BATCH)

    def settled(self, images: int) -> Self:
        """Return the settings with what "auto" means for so many training images."""
        if self.optimizer != "auto":
            return self
        if self.lrs or not self.little_for_lars(images):
            return replace(self, optimizer="lars")
        batch = self.batch or _batch_for_little(images)
        return replace(self, optimizer="sgd", lrs=_RATES_FOR_LITTLE, batch=batch)

    def little_for_lars(self, images: int) -> bool:
        """Tell whether so many training images leave LARS near its start.

        What it moves a weight by, relative to the weight, is the sum of its rates, which are scaled
        by the batch: images x epochs count, whatever the batch is.
        """
        return images * self.epochs < _LARS_STEPS * _PAPERS_BATCH

    def why_settled(self, images: int) -> str:
        """Say what "auto" means for so many training images, and why; empty if all is given."""
        if self.optimizer != "auto":
            return ""
        seen = f"{images:,} images x {self.epochs} epochs"
        if not self.little_for_lars(images):
            return f"LARS, the paper's: {seen} are enough for it"
        if self.lrs:
            return "LARS, the paper's, for rates are given; for rates of SGD: --optimizer sgd"
        return (
            f"SGD with several rates, not the paper's LARS: {seen} are "
            f"{images * self.epochs // _PAPERS_BATCH:,} steps of {_PAPERS_BATCH}, and LARS takes "
            f"{_LARS_STEPS:,} to leave its start (--optimizer lars has it all the same)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneConfig(LabelConfig):
    """Fine-tuning: of the whole network; SimCLR's defaults (appendix B.5), except for the batch."""

    lr: float = setting(0.05, "Rate for a batch of 256, scaled by batch / 256.", above=0)
    batch: int = setting(
        256, "Global batch (SimCLR: 4096); at most the training images.", at_least=2
    )
    epochs: int = setting(
        0, "Passes over the training images. Default: 60 on up to 1% of them, else 30.", at_least=0
    )

    @property
    def global_batch(self) -> int:
        """Images of a step over all ranks."""
        return self.batch


@dataclass(frozen=True, slots=True, kw_only=True)
class FeaturesConfig(EvalConfig):
    """Features: which, and the file that they go to."""

    out: str = setting(
        "features.npy",
        "File to write: .npy (with names and labels in a .npy.csv beside it) or .parquet.",
    )
    split: Literal["auto", "train", "val"] = setting(
        "auto",
        "Which images. auto: all training images, those that --holdout holds out included. train: "
        "without these. val: the held-out images, or the validation images. With a holdout a "
        "column split says train or val of each image. A folder without splits is train.",
    )
    layer: Literal["backbone", "projector"] = setting(
        "backbone",
        "Pooled features of the backbone (pool5), or the projections that the loss compares.",
    )
    force: bool = setting(False, "Overwrite files that are there.")

    def check(self) -> None:
        """Refuse values that no type or range tells."""
        EvalConfig.check(self)
        require(
            self.out.endswith((".npy", ".parquet")),
            f"out must end in .npy or .parquet, not {self.out!r}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighboursConfig(EvalConfig):
    """Picture: of images and what is nearest to them."""

    out: str = setting("neighbours.png", "Picture to write.")
    images: int = setting(
        8,
        "Query images, spread over the validation images (without a validation split: over the "
        "training images).",
        at_least=1,
    )
    k: int = setting(8, "Neighbours of each, out of the training images.", at_least=1)
    seed: int = setting(0, "Chooses the queries.", at_least=0)


def _batch_for_little(images: int) -> int:
    """Return a batch that leaves eight steps an epoch, for images that fill none are left out."""
    return next(batch for batch in (256, 128, 64, 32, 16) if batch * 8 <= images or batch == 16)


def numbers(text: str, name: str, *, whole: bool = False) -> list[float]:
    """Read numbers separated by commas; ``ValueError`` names the option that they are of."""
    try:
        found = [int(part) if whole else float(part) for part in text.split(",") if text]
    except ValueError:
        found = [math.nan]
    if not all(map(math.isfinite, found)):
        kind = "whole numbers" if whole else "numbers"
        raise ValueError(f"{name} takes {kind} separated by commas, not {text!r}")
    return found
