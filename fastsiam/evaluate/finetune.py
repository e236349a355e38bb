"""Fine-tuning: the whole network trained with labels, on few of them (low-shot) or on all.

SimSiam's paper has none; the conventions are SimCLR's (Chen et al. 2020, appendix B.5): SGD with
Nesterov momentum 0.9, rate 0.05 x batch / 256 without warm-up, no weight decay, random crops and
flips; 60 epochs on 1% of the labels, 30 on 10%. Its batch is 4096; ours is smaller.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fastsiam.config import NumericsConfig, OptimConfig
from fastsiam.distributed import Place, bn_group, data_parallel
from fastsiam.evaluate.classifiers import HeadResult, Heads, HeadTraining, count_heads
from fastsiam.evaluate.features import feature_batches
from fastsiam.methods.optim import with_momenta
from fastsiam.model.batch_norm import use_view_batch_norm
from fastsiam.views.batch import EvalBatch


class FineTuning(HeadTraining):
    """Trains a backbone, in place, and a linear classifier on top of it, on images (n, 3, S, S).

    Args:
        optim: batch, epochs, rate, momentum, weight decay.
        backbone: (N, 3, S, S) to (N, features).
        features: dimensions.
        classes: how many there are.
        steps_per_epoch: batches in an epoch.
        seed: of the classifier's first weights.
        dtype: autocast type.
        place: this rank; BN statistics are those of all ranks.
    """

    def __init__(
        self,
        optim: OptimConfig,
        backbone: nn.Module,
        *,
        features: int,
        classes: int,
        steps_per_epoch: int,
        seed: int,
        dtype: torch.dtype,
        place: Place,
    ) -> None:
        network = nn.Sequential(backbone, Heads(1, features, classes, seed=seed))
        network.to(place.device).to(memory_format=torch.channels_last)
        group = bn_group(place, NumericsConfig())
        if group is not None:
            use_view_batch_norm(network, group=group)
        sgd = torch.optim.SGD(
            network.parameters(),
            lr=0.0,
            momentum=optim.momentum,
            weight_decay=optim.weight_decay,
            nesterov=optim.momentum > 0,
            fused=True,
        )
        super().__init__(
            network,
            data_parallel(network, place, same_buffers=True),
            with_momenta(sgd),
            optim=optim,
            rates=[optim.lr],
            classes=classes,
            steps_per_epoch=steps_per_epoch,
            dtype=dtype,
            place=place,
        )

    def evaluate(self, batches: Iterable[EvalBatch]) -> list[HeadResult]:
        """Classify this rank's images, and those of all ranks together."""
        scores = feature_batches(self.network, batches, dtype=self.dtype)
        return count_heads(scores, self.rates, classes=self.classes, device=self.device)

    @property
    def parts(self) -> dict[str, Any]:
        """The network, the optimizer's momenta and the scale of fp16's gradients."""
        return {"network": self.network, "optimizer": self.optimizer, "scaler": self.scaler}
