"""Linear evaluation: a linear classifier on frozen features, trained with labels.

The paper's protocol (appendix A): pool5 features of a frozen backbone in evaluation mode, LARS
with a batch of 4096, 90 epochs, a cosine schedule, momentum 0.9 and no weight decay. Its text has
the base rate 0.02, its code 0.1, scaled by batch / 256; a public replication measured 66.0 and 67.8
with these. So many rates are trained side by side, on the same features, in one pass over the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastsiam.config import OptimConfig
from fastsiam.distributed import Place, data_parallel
from fastsiam.evaluate.classifiers import HeadResult, Heads, HeadTraining, count_heads
from fastsiam.methods.optim import Lars


class LinearTraining(HeadTraining):
    """Trains heads on features, (n, features) of any floating type.

    LARS takes the norm of each parameter, so that heads stay apart. It adapts all parameters,
    biases too, as the authors' does, and leaves a step whose weights or gradient are zero as it is.

    Args:
        optim: batch, epochs and optimizer; the rate is that of ``rates``.
        rates: base rates, for a batch of 256.
        features: dimensions.
        classes: how many there are.
        steps_per_epoch: batches in an epoch.
        seed: of the first weights.
        place: this rank; every rank takes part.
    """

    def __init__(
        self,
        optim: OptimConfig,
        rates: Sequence[float],
        *,
        features: int,
        classes: int,
        steps_per_epoch: int,
        seed: int,
        place: Place,
    ) -> None:
        self.heads = Heads(len(rates), features, classes, seed=seed).to(place.device)
        super().__init__(
            self.heads,
            data_parallel(self.heads, place, same_buffers=True),
            _optimizer(optim, self.heads.param_groups()),
            optim=optim,
            rates=rates,
            classes=classes,
            steps_per_epoch=steps_per_epoch,
            dtype=torch.float32,
            place=place,
        )

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> list[HeadResult]:
        """Classify images with every head, those of all ranks together.

        Args:
            batches: this rank's images, each once: features and labels.
        """
        scores = ((self.heads(features.float()), labels) for features, labels in batches)
        return count_heads(scores, self.rates, classes=self.classes, device=self.device)

    @property
    def parts(self) -> dict[str, Any]:
        """The heads and the optimizer's momenta."""
        return {"heads": self.heads, "optimizer": self.optimizer}


def _optimizer(optim: OptimConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    momentum, weight_decay = optim.momentum, optim.weight_decay
    if optim.optimizer == "lars":
        return Lars(
            groups,
            lr=0.0,
            momentum=momentum,
            weight_decay=weight_decay,
            trust=optim.lars_trust,
            adapt_all=True,
        )
    return torch.optim.SGD(groups, lr=0.0, momentum=momentum, weight_decay=weight_decay)
