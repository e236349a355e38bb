"""Settings of ``fastsiam study``: at which scale the paper's experiments are run, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .setting import Config, setting

ScaleName = Literal["paper", "cifar", "cifar-small", "demo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig(Config):
    """Study: where its runs are."""

    scale: ScaleName = setting(
        "demo",
        "paper: ResNet-50 on ImageNet, linear evaluation; cifar: ResNet-18 on CIFAR-10, kNN; "
        "cifar-small: a narrow one on 10,000 of its images; demo: generated images.",
    )
    epochs: int = setting(0, "Epochs of the base recipe; 0: the scale's.", at_least=0)
    out: str = setting("runs/study", "Folder of all studies' runs.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRunConfig(StudyConfig):
    """Runs: which there are, and how they are executed."""

    data: str = setting("", "Images, as of train; demo generates its own.")
    seeds: int = setting(0, "Runs of each row; 0: 1 at scale paper, else 3.", at_least=0)
    linear: bool = setting(False, "Also evaluate linearly where kNN is the measure.")
    parallel: int = setting(1, "Largest number of runs side by side.", at_least=1)
    gpus: int = setting(1, "GPUs of each run, where there are any.", at_least=1)
    device: Literal["auto", "cuda", "cpu"] = setting("auto", "auto: the GPU if there is one.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyTableConfig(StudyConfig):
    """Table: of which results, and where it goes."""

    record: str = setting("", "Record, written by --json, to show instead of the runs.")
    json: str = setting("", "File to write the record to: rows, seeds, curves, machine.")
    picture: str = setting("", "PNG file to draw: curves over epochs, accuracies with intervals.")
    markdown: bool = setting(False, "Print Markdown.")
