"""Fine-tuning: the whole network trained with labels, on few of them (low-shot) or on all.

SimSiam's paper has none; the conventions are SimCLR's (Chen et al. 2020, appendix B.5): SGD with
Nesterov momentum 0.9, rate 0.05 x batch / 256 without warm-up, no weight decay, random crops and
flips; 60 epochs on 1% of the labels, 30 on 10%. Its batch is 4096; ours is smaller.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastsiam.config import NumericsConfig, OptimConfig
from fastsiam.distributed import Place, bn_group, data_parallel, mean_across_ranks
from fastsiam.evaluate.features import feature_batches
from fastsiam.evaluate.linear import HeadResult, Heads, count_heads
from fastsiam.model.batch_norm import use_view_batch_norm
from fastsiam.training.optim import cosine, peak_lr, with_momenta
from fastsiam.views.batch import EvalBatch


class FineTuning:
    """Trains a backbone, in place, and a linear classifier on top of it.

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
        self._optim, self._steps, self._dtype = optim, steps_per_epoch, dtype
        self._device, self._classes = place.device, classes
        self.network = nn.Sequential(backbone, Heads(1, features, classes, seed=seed))
        self.network.to(place.device).to(memory_format=torch.channels_last)
        group = bn_group(place, NumericsConfig())
        if group is not None:
            use_view_batch_norm(self.network, group=group)
        self._model = data_parallel(self.network, place, bucket_mb=25, same_buffers=True)
        sgd = torch.optim.SGD(
            self.network.parameters(),
            lr=0.0,
            momentum=optim.momentum,
            weight_decay=optim.weight_decay,
            nesterov=optim.momentum > 0,
            fused=True,
        )
        self.optimizer = with_momenta(sgd)
        self._scaler = torch.amp.GradScaler(place.device.type, enabled=dtype == torch.float16)

    def epoch(self, number: int, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Train for an epoch on images (n, 3, S, S) and labels (n,); return the mean loss, (1,)."""
        self.network.train()
        total = torch.zeros(1, device=self._device)
        for step, (image, labels) in enumerate(batches, start=number * self._steps):
            steps = self._optim.epochs * self._steps
            self.optimizer.param_groups[0]["lr"] = cosine(peak_lr(self._optim), step, total=steps)
            with torch.autocast(
                self._device.type, dtype=self._dtype, enabled=self._dtype != torch.float32
            ):
                scores = self._model(image)[:, 0]
            loss = F.cross_entropy(scores.float(), labels)
            self.optimizer.zero_grad()
            self._scaler.scale(loss).backward()
            self._scaler.step(self.optimizer)
            self._scaler.update()
            total += loss.detach()
        return mean_across_ranks(total / self._steps)

    def evaluate(self, batches: Iterable[EvalBatch]) -> list[HeadResult]:
        """Classify this rank's images, and those of all ranks together."""
        scores = feature_batches(self.network, batches, dtype=self._dtype)
        return count_heads(scores, [self._optim.lr], classes=self._classes, device=self._device)

    def state(self) -> dict[str, Any]:
        """Return what ``load`` goes on from."""
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])
