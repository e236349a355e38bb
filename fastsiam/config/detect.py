"""Settings of ``fastsiam eval detect``, which trains detectors on a run's backbone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from .evaluate import NetworkConfig
from .setting import require, setting
from .train import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectConfig(NetworkConfig):
    """Detection: data, detector and training, with the defaults of the paper's Table 5."""

    data: str = setting("", "Folder that contains the files of --task; required.")
    task: Literal["voc07", "voc0712", "coco"] = setting(
        "voc07",
        "voc07: VOC 2007 trainval; voc0712: VOC 2007 and 2012 trainval; both tested on VOC 2007 "
        "test. coco: COCO train2017 with masks, tested on val2017. --data is the folder that "
        "contains their files.",
    )
    detector: Literal["c4", "fpn"] = setting(
        "c4",
        "c4: the paper's design, built from torchvision's parts; fpn: torchvision's, with 1,000 "
        "proposals in training (its default: 2,000) and predictors initialised as in detectron2.",
    )
    trials: int = setting(
        5, "Detectors to train, with consecutive seeds (paper: 5 on VOC).", at_least=1
    )
    steps: int = setting(0, "Training steps. 0: 24,000 on VOC, 90,000 on COCO.", at_least=0)
    batch_size: int = setting(16, "Global batch size.", at_least=1)
    lr: float = setting(0.02, "Peak learning rate; it is not scaled by the batch size.", above=0)
    weight_decay: float = setting(0.0001, "Weight decay of all parameters except BN's.", at_least=0)
    warmup: int = setting(
        -1, "Steps of learning-rate warm-up. -1: 100 on VOC, 1,000 on COCO.", at_least=-1
    )
    short_side: str = setting(
        "",
        "Shorter side of the images in pixels, such as 600, or a range such as 480-800: training "
        "draws from it in steps of 32, tests use its maximum. Default: 480-800 on VOC, 640-800 on "
        "COCO.",
    )
    long_side: int = setting(1333, "Maximum longer side of the images in pixels.", at_least=1)
    rois: int = setting(512, "Number of proposals per image for training the box head.", at_least=1)
    precise_bn: int = setting(
        200, "Forward passes that average BN statistics before each test. 0: none.", at_least=0
    )
    precision: Literal["run", Precision] = setting(
        "fp32", "Autocast dtype, as for train; the protocol uses fp32. run: the run's."
    )
    seed: int = setting(
        0,
        "Seed of the first trial: weights, order, sizes, flips and boxes.",
        at_least=0,
        below=2**63,
    )
    resume: Literal["auto", "never"] = setting(
        "auto", "auto: resume the same evaluation if it was interrupted; never: start over."
    )

    def check(self) -> None:
        """Raise ``ValueError`` if settings contradict each other."""
        NetworkConfig.check(self)
        require(
            not self.sides or self.sides[-1] <= self.long_side,
            f"short-side ({self.short_side}) must be at most long-side ({self.long_side})",
        )
        require(
            self.batch_size % self.gpus == 0,
            f"batch-size {self.batch_size} is not divisible by {self.gpus} ranks",
        )

    @property
    def sides(self) -> tuple[int, ...]:
        """The shorter sides, in increasing order; empty for the task's default."""
        if not self.short_side:
            return ()
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", self.short_side)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        require(
            32 <= low <= high,
            f"short-side must be 600 or 480-800, at least 32, not {self.short_side!r}",
        )
        return tuple(dict.fromkeys((*range(low, high, 32), high)))
