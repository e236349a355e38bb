"""Settings and recipes of FastSiam."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import CIFAR10, IMAGENET, Changes
from .simsiam import SimSiamConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FastSiamConfig(SimSiamConfig):
    """FastSiam: SimSiam's heads and loss, for any number of views."""

    name: ClassVar[str] = "fastsiam"
    title: ClassVar[str] = "FastSiam"
    builder: ClassVar[str] = "fastsiam.methods.simsiam_variants:build_fastsiam"
    paper: ClassVar[str] = (
        "Pototzky, Sultan and Schmidt-Thieme, FastSiam: Resource-Efficient Self-supervised "
        "Learning on a Single GPU, GCPR 2022"
    )
    recipes: ClassVar[dict[str, Changes]] = {
        # Batch, epochs and views are from the FastSiam paper, the rest is SimSiam's.
        "fastsiam": IMAGENET
        | {"method": "fastsiam", "views": 4, "epochs": 25, "batch": 32, "knn_every": 5},
        # Views, batch, epochs, heads, rate (0.06 at this batch) and weight decay are from lightly's
        # benchmark, which reports 90.6% kNN accuracy. The rest is SimSiam's CIFAR-10 recipe: mean
        # and std (lightly uses ImageNet's), and a projector output without scale and offset (--set
        # output_affine=true adds them).
        "fastsiam_cifar10": CIFAR10
        | {
            "method": "fastsiam", "views": 4, "predictor_lr": "cosine",
            "epochs": 200, "batch": 128, "lr": 0.12,
        },
    }  # fmt: skip

    def check_views(self, views: int) -> None:
        """Accept any number of views; ``TrainConfig`` requires at least two."""
