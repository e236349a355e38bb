"""Settings of ``fastsiam eval detect``: a detector on a run's network."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from .checks import require
from .evaluate import EvalConfig
from .setting import setting
from .train import Precision

NOT_OF_DETECTION = {
    "image_column", "label_column", "holdout", "bad_images", "exif", "alpha", "pipeline", "crop",
    "resize", "feature_batch",
}  # fmt: skip
"""Settings of the other evaluations, which cut their images alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectConfig(EvalConfig):
    """Detection: which data, which detector, and how it is trained; Table 5's unless said."""

    task: Literal["voc07", "voc0712", "coco"] = setting(
        "voc07",
        "VOC 2007 trainval, VOC 2007 and 2012 trainval, both tested on 2007 test; or COCO "
        "train2017, tested on val2017, with masks. --data is the folder of their files.",
    )
    detector: Literal["c4", "fpn"] = setting(
        "c4", "c4 is the paper's design, of torchvision's parts; fpn is torchvision's."
    )
    trials: int = setting(
        5,
        "Detectors trained one after the other, each with the next seed (the paper: 5 on VOC).",
        at_least=1,
    )
    steps: int = setting(
        0,
        "Steps of training, drops at the same shares. Default: 24,000 on VOC, 90,000 on COCO.",
        at_least=0,
    )
    batch_size: int = setting(16, "Global batch.", at_least=1)
    lr: float = setting(0.02, "Rate; it is not scaled by the batch.", above=0)
    weight_decay: float = setting(0.0001, "Weight decay of all but BN.", at_least=0)
    warmup: int = setting(-1, "Steps of the warm-up; -1 is 100 on VOC, 1,000 on COCO.", at_least=-1)
    short_side: str = setting(
        "",
        "Shorter side of the images in pixels: 480-800 draws one of each 32nd, 600 is one alone; "
        "the largest is tested at. Default: 480-800 on VOC, 640-800 on COCO.",
    )
    long_side: int = setting(1333, "Most pixels of the longer side.", at_least=1)
    rois: int = setting(
        512, "Proposed boxes of an image that the box head is trained on.", at_least=1
    )
    precise_bn: int = setting(
        200,
        "Steps without training that average BN statistics before each test; 0 skips this.",
        at_least=0,
    )
    precision: Literal["run", Precision] = setting(
        "fp32", "Autocast type; the protocol's is fp32. run is as the run had it."
    )
    seed: int = setting(
        0,
        "Seed of the first trial: of first weights, order, sizes, flips and sampled boxes.",
        at_least=0,
    )
    resume: Literal["auto", "never"] = setting(
        "auto",
        "auto continues where the same evaluation of the same run's network was interrupted.",
    )

    def check(self) -> None:
        """Refuse settings that contradict each other."""
        EvalConfig.check(self)
        require(
            not self.sides or self.sides[-1] <= self.long_side,
            f"short-side ({self.short_side}) must not be above long-side ({self.long_side})",
        )
        require(
            self.batch_size % self.gpus == 0,
            f"batch-size {self.batch_size} cannot be shared equally by {self.gpus} ranks",
        )

    @property
    def sides(self) -> tuple[int, ...]:
        """The shorter sides, in rising order; none means the protocol's."""
        if not self.short_side:
            return ()
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", self.short_side)
        require(match is not None, f"short-side is such as 480-800 or 600, not {self.short_side!r}")
        assert match is not None
        low, high = int(match[1]), int(match[2] or match[1])
        require(32 <= low <= high, f"short-side begins at 32 and rises, not {self.short_side}")
        return tuple(dict.fromkeys((*range(low, high, 32), high)))
