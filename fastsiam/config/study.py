"""Settings of ``fastsiam study``, which repeats the paper's experiments at several scales."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from .setting import Config, require, setting, settings_of

ScaleName = Literal["paper", "cifar", "cifar-small", "demo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig(Config):
    """Study: scale and folder of its runs."""

    scale: ScaleName = setting(
        "demo",
        "paper: ResNet-50 on ImageNet, 100 epochs, measured by linear evaluation; the other scales "
        "by kNN. cifar: ResNet-18 on CIFAR-10, 200 epochs. cifar-small: a narrow ResNet-18 on "
        "10,000 of these images, 6 epochs. demo: generated images, 12 epochs.",
    )
    epochs: int = setting(
        0, "Epochs of the base recipe; the runs get a separate folder. 0: the scale's.", at_least=0
    )
    out: str = setting("runs/study", "Folder for the runs of all studies.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRunConfig(StudyConfig):
    """Runs: images, number of seeds, and devices."""

    data: str = setting(
        "", "Images, as for train; demo generates its own. Default: $FASTSIAM_DATA, else ./data."
    )
    seeds: int = setting(
        0,
        "Number of runs per row (seeds 0, 1, ...). 0: 10 at scale demo, 1 at paper, else 3.",
        at_least=0,
    )
    linear: bool = setting(
        False,
        "At scales measured by kNN, also run linear evaluation and show it in a separate column. "
        "demo and cifar-small use cached features, which takes about a minute.",
    )
    parallel: int = setting(
        1,
        "Maximum number of concurrent runs. On a CPU they share the cores, and a run that is "
        "resumed with another number is not bit-identical.",
        at_least=1,
    )
    gpus: int = setting(
        1, "GPUs per run; concurrent runs share GPUs if there are too few.", at_least=1
    )
    device: Literal["auto", "cuda", "cpu"] = setting(
        "auto", "auto: the GPU if there is one, else the CPU."
    )

    def check_given(self, given: Collection[str]) -> None:
        """Raise if images are given at the scale that generates its own."""
        require(
            self.scale != "demo" or not self.data or "data" not in given,
            "--scale demo generates its own images: leave out --data, or pass another --scale",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyTableConfig(StudyConfig):
    """Table: source of the results, and output files."""

    record: str = setting("", "Show this record, written by --json, instead of the runs.")
    json: str = setting(
        "", "Also write a record with rows, seeds, curves and machine to this file."
    )
    picture: str = setting(
        "", "Also draw curves and accuracies with confidence intervals to this .png file."
    )
    markdown: bool = setting(False, "Print the table as Markdown.")

    def check_given(self, given: Collection[str]) -> None:
        """Raise if a record is combined with settings that choose runs."""
        for name in settings_of(StudyConfig):
            require(
                not self.record or name not in given,
                f"--record and --{name} cannot be combined: a record shows its own runs",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyDetectConfig(StudyConfig):
    """Rows: networks to compare, and the search for the learning rate."""

    lrs: tuple[float, ...] = setting(
        (0.01, 0.02, 0.04),
        "Learning rates to try on each network, with one trial per rate. All trials use the rate "
        "with the highest AP.",
        above=0,
    )
    supervised: str = setting(
        "",
        "Weights trained with labels, such as torchvision's resnet50, for the row ImageNet "
        "supervised.",
    )

    def check(self) -> None:
        """Check that there is at least one learning rate, and no duplicate."""
        require(
            0 < len(self.lrs) == len(set(self.lrs)), "lrs must be learning rates without duplicates"
        )
