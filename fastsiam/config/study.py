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
        "paper: ResNet-50 on ImageNet, 100 epochs, linear evaluation; the others by kNN. cifar: "
        "ResNet-18 on CIFAR-10, 200 epochs; cifar-small: a narrow one on 10,000 of its images, 6 "
        "epochs; demo: generated images, 12 epochs.",
    )
    epochs: int = setting(
        0, "Epochs of the base recipe, in a folder of their own; 0: the scale's.", at_least=0
    )
    out: str = setting("runs/study", "Folder of all studies' runs.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRunConfig(StudyConfig):
    """Runs: images, number of seeds, and devices."""

    data: str = setting(
        "", "Images, as for train; demo generates its own. Default: $FASTSIAM_DATA, else ./data."
    )
    seeds: int = setting(
        0, "Runs of each row, with seeds from 0 on; 0: 1 at scale paper, else 3.", at_least=0
    )
    linear: bool = setting(
        False,
        "Also evaluate linearly, in a column of its own, at scales measured by kNN: at demo and "
        "cifar-small on cached features, in about a minute.",
    )
    parallel: int = setting(
        1,
        "Largest number of runs side by side. On a CPU they share the cores: resumed with another "
        "number, a run is not the same to the bit.",
        at_least=1,
    )
    gpus: int = setting(
        1, "GPUs of each run; runs side by side share them if there are too few.", at_least=1
    )
    device: Literal["auto", "cuda", "cpu"] = setting(
        "auto", "auto: the GPU if there is one, else the CPU."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyTableConfig(StudyConfig):
    """Table: source of the results, and output files."""

    record: str = setting("", "Show this record, written by --json, instead of the runs.")
    json: str = setting("", "Also write a record of rows, seeds, curves and machine to this file.")
    picture: str = setting(
        "", "Also draw a .png: curves over epochs, accuracies with confidence intervals."
    )
    markdown: bool = setting(False, "Print the table as Markdown.")

    def check_given(self, given: Collection[str]) -> None:
        """Raise if a record is combined with settings that choose runs."""
        for name in settings_of(StudyConfig):
            require(
                not self.record or name not in given,
                f"--record and --{name} exclude each other: a record shows the runs it was made of",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyDetectConfig(StudyConfig):
    """Rows: networks to compare, and the search for the learning rate."""

    lrs: tuple[float, ...] = setting(
        (0.01, 0.02, 0.04),
        "Learning rates to try on each network with one trial; the one with the highest AP is "
        "used for all trials.",
        above=0,
    )
    supervised: str = setting(
        "",
        "Weights trained with labels, for the row of that name: torchvision's resnet50, for "
        "instance.",
    )

    def check(self) -> None:
        """Check that there is at least one learning rate, and no duplicate."""
        require(0 < len(self.lrs) == len(set(self.lrs)), "lrs must be rates, each once")
