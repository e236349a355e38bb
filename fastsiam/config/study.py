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
        "paper: ResNet-50 on ImageNet, 100 epochs, linear evaluation; cifar: ResNet-18 on "
        "CIFAR-10, 200 epochs; cifar-small: a narrow one on 10,000 of its images, 6 epochs; demo: "
        "images that it makes itself, 12 epochs. The last three are measured by kNN.",
    )
    epochs: int = setting(
        0,
        "Epochs of the base recipe instead of the scale's; such runs have a folder of their own.",
        at_least=0,
    )
    out: str = setting("runs/study", "Folder of all studies' runs.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRunConfig(StudyConfig):
    """Runs: which there are, and how they are done."""

    data: str = setting(
        "", "Images, as of train; default: $FASTSIAM_DATA, else ./data. demo makes its own."
    )
    seeds: int = setting(
        0,
        "Runs of each row, with the seeds 0, 1, ...; 0 is the scale's own: paper 1, the others 3.",
        at_least=0,
    )
    linear: bool = setting(
        False,
        "A linear evaluation after each run at scales measured by kNN too, in a column of its own: "
        "at demo and cifar-small on cached features, which takes a minute or so.",
    )
    parallel: int = setting(
        1,
        "Runs side by side, at most as many as there are. On a CPU they share the cores: with "
        "another number a run that was begun continues, but not to the bit.",
        at_least=1,
    )
    gpus: int = setting(
        1,
        "GPUs of each run, where there are any. Runs side by side have GPUs of their own, or "
        "share them if there are too few.",
        at_least=1,
    )
    device: Literal["auto", "cuda", "cpu"] = setting("auto", "auto takes the GPU if there is one.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyTableConfig(StudyConfig):
    """Table: of which figures, and where they go."""

    record: str = setting("", "Show this file, which --json wrote, not the runs.")
    json: str = setting(
        "",
        "Also write the record that pictures and pages are made of: rows, seeds, curves, machine.",
    )
    picture: str = setting(
        "",
        "Also draw a picture into this .png: curves over epochs, accuracies with their intervals.",
    )
    markdown: bool = setting(False, "Print Markdown.")
