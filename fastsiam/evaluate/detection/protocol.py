"""Protocol and results of Table 5 in the SimSiam paper, and how settings differ from the protocol.

The paper follows MoCo's public code, which uses detectron2 (Wu et al.) with the settings in
detection/configs of facebookresearch/moco: batch 16, rate 0.02, linear warm-up, two drops to a
tenth, weight decay 1e-4 on all parameters except BN's, SyncBN everywhere, no frozen layers.
docs/transfer.md names the source of each number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fastsiam.config.detect import DetectConfig
from fastsiam.config.setting import as_text
from fastsiam.config.views import IMAGENET_MEAN, IMAGENET_STD

from .datasets import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Schedule of the training of a detector."""

    steps: int
    drops: tuple[int, ...]
    """Steps at which the learning rate drops to a tenth."""
    warmup: int
    """Steps in which the learning rate grows linearly from a thousandth of its value."""
    sides: tuple[int, ...]
    """Shorter sides of the images, in pixels: training draws one of them, tests use the largest."""

    def rate(self, base: float, step: int) -> float:
        """Return the learning rate of a step; steps count from 0."""
        rate = base * 0.1 ** sum(step >= drop for drop in self.drops)
        if step >= self.warmup:
            return rate
        return rate * (0.001 + 0.999 * step / self.warmup)


_VOC = Schedule(steps=24_000, drops=(18_000, 22_000), warmup=100, sides=tuple(range(480, 801, 32)))
PROTOCOL: dict[Task, Schedule] = {
    "voc07": _VOC,
    "voc0712": _VOC,
    "coco": Schedule(
        steps=90_000, drops=(60_000, 80_000), warmup=1_000, sides=tuple(range(640, 801, 32))
    ),
}

NAMES = {"c4": "C4 of torchvision's parts", "fpn": "FPN of torchvision"}
"""Names of the detectors in records and messages."""

FIGURES = ("AP50", "AP", "AP75")

_TABLE_5 = """
    scratch              35.9 16.8 13.0   60.2 33.8 33.1   44.0 26.4 27.8   46.9 29.3 30.8
    ImageNet supervised  74.4 42.4 42.7   81.3 53.5 58.8   58.2 38.2 41.2   54.7 33.3 35.2
    SimCLR               75.9 46.8 50.1   81.8 55.5 61.4   57.7 37.9 40.9   54.6 33.3 35.3
    MoCo v2              77.1 48.5 52.5   82.3 57.0 63.3   58.8 39.2 42.5   55.5 34.3 36.6
    BYOL                 77.1 47.0 49.9   81.4 55.3 61.1   57.8 37.9 40.9   54.3 33.2 35.0
    SwAV                 75.5 46.5 49.6   81.5 55.4 61.4   57.6 37.6 40.3   54.2 33.1 35.1
    SimSiam, base        75.5 47.0 50.2   82.0 56.4 62.8   57.5 37.9 40.9   54.2 33.2 35.2
    SimSiam, optimal     77.3 48.5 52.5   82.4 57.0 63.7   59.3 39.2 42.1   56.0 34.4 36.7
"""


_ROWS = [re.split("  +", line.strip()) for line in _TABLE_5.strip().splitlines()]

PAPER: dict[str, dict[str, tuple[float, ...]]] = {
    task: {row[0]: tuple(map(float, row[column].split())) for row in _ROWS}
    for column, task in enumerate(("voc07", "voc0712", "coco", "coco masks"), start=1)
}
"""AP50, AP and AP75 from Table 5: ResNet-50, 200 epochs on ImageNet. The other methods are
reproductions by the paper's authors."""

_PAPERS_NETWORK = {
    "backbone": "resnet50",
    "stem": "imagenet",
    "width": 64,
    "BN statistics": "of all ranks",
    "precision": "float32",
    "mean": as_text(IMAGENET_MEAN),
    "std": as_text(IMAGENET_STD),
}
"""The paper's network, the scope of BN statistics in training, the autocast type, and the
statistics of the colours."""


def schedule_of(config: DetectConfig) -> Schedule:
    """Return the schedule for these settings; its drops are scaled with the number of steps."""
    default = PROTOCOL[config.task]
    steps = config.steps or default.steps
    return Schedule(
        steps=steps,
        drops=tuple(round(drop * steps / default.steps) for drop in default.drops),
        warmup=min(default.warmup if config.warmup < 0 else config.warmup, steps),
        sides=config.sides or default.sides,
    )


def protocol_of(config: DetectConfig) -> dict[str, Any]:
    """Return the settings that results depend on, for a record."""
    schedule = schedule_of(config)
    return {
        "task": config.task,
        "detector": NAMES[config.detector],
        "steps": schedule.steps,
        "drops": list(schedule.drops),
        "warmup": schedule.warmup,
        "batch": config.batch_size,
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "sides": [schedule.sides[0], schedule.sides[-1]],
        "long_side": config.long_side,
        "rois": config.rois,
        "precise_bn": config.precise_bn,
        "seed": config.seed,
        "trials": config.trials,
    }


def differences(config: DetectConfig, network: dict[str, Any]) -> list[str]:
    """List the settings that differ from the paper's protocol, each with the protocol's value.

    Args:
        network: values that replace those of ``_PAPERS_NETWORK``.
    """
    trials = 1 if config.task == "coco" else DetectConfig().trials
    paper_config = DetectConfig(task=config.task, trials=trials, seed=config.seed)
    expected = protocol_of(paper_config) | _PAPERS_NETWORK
    actual = protocol_of(config) | _PAPERS_NETWORK | network
    return [
        f"{name.replace('_', ' ')} {_text(actual[name])} (not {_text(value)})"
        for name, value in expected.items()
        if actual[name] != value and name != "drops"  # drops are scaled with the steps
    ]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def papers_rows(task: str) -> str:
    """Format the rows of Table 5 for a task in one line.

    Args:
        task: a key of ``PAPER``.
    """
    rows = [
        f"{name} {' / '.join(f'{value:.1f}' for value in row)}" for name, row in PAPER[task].items()
    ]
    return f"Table 5, {task} ({', '.join(FIGURES)}; ResNet-50, 200 epochs): {'; '.join(rows)}"
