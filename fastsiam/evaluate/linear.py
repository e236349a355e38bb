"""Linear evaluation: a linear classifier on frozen features, trained with labels.

The paper's protocol (appendix A): pool5 features of a frozen backbone in evaluation mode, LARS
with a batch of 4096, 90 epochs, a cosine schedule, momentum 0.9 and no weight decay. Its text has
the base rate 0.02, its code 0.1, scaled by batch / 256; a public replication measured 66.0 and 67.8
with these. So many rates are trained side by side, on the same features, in one pass over the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastsiam.config import OptimConfig
from fastsiam.distributed import Place, data_parallel, mean_across_ranks
from fastsiam.evaluate.accuracy import Accuracy
from fastsiam.training.optim import Lars, cosine


@dataclass(frozen=True, slots=True)
class HeadResult:
    """What one classifier got right."""

    lr: float
    """Its base rate."""
    top1: float
    """Percent of the validation images."""
    top5: float
    """Percent of the validation images."""
    images: int
    """Validation images, each counted once."""
    per_class: tuple[float | None, ...]
    """Top-1 of each class's images, in percent; None for a class without any."""

    def record(self) -> dict[str, Any]:
        """Return plain JSON values, without the classes."""
        return {"lr": self.lr, "top1": self.top1, "top5": self.top5}

    def __str__(self) -> str:
        """What it got right."""
        return f"top-1 {self.top1:.2f}%, top-5 {self.top5:.2f}%"


def count_heads(
    scores: Iterable[tuple[Tensor, Tensor]],
    rates: Sequence[float],
    *,
    classes: int,
    device: torch.device,
) -> list[HeadResult]:
    """Count what heads get right on the images of all ranks.

    Args:
        scores: batches of this rank's images, each once: scores (n, heads, classes), labels (n,).
        rates: base rate of each head.
        classes: how many there are.
        device: of the scores.
    """
    counts = [Accuracy(classes, device) for _ in rates]
    for of_heads, labels in scores:
        for count, own in zip(counts, of_heads.unbind(1), strict=True):
            count.add(own, labels)
    joint = [count.over_ranks() for count in counts]
    return [
        HeadResult(rate, count.top1, count.top5, count.images, count.per_class)
        for rate, count in zip(rates, joint, strict=True)
    ]


class Heads(nn.Module):
    """Linear classifiers side by side: (n, features) to (n, heads, classes).

    All start the same: weights from N(0, 0.01), biases 0, as the authors' do.
    """

    def __init__(self, heads: int, features: int, classes: int, *, seed: int) -> None:
        super().__init__()
        start = torch.randn(classes, features, generator=torch.Generator().manual_seed(seed)) / 100
        self.weight = nn.ParameterList(start.clone() for _ in range(heads))
        self.bias = nn.ParameterList(torch.zeros(classes) for _ in range(heads))

    def forward(self, features: Tensor) -> Tensor:
        """Return every head's scores."""
        scores = F.linear(features, torch.cat([*self.weight]), torch.cat([*self.bias]))
        return scores.view(len(features), len(self.weight), -1)

    def param_groups(self) -> list[dict[str, Any]]:
        """Return each head's parameters, for it has a rate of its own."""
        return [{"params": [w, b]} for w, b in zip(self.weight, self.bias, strict=True)]


class LinearTraining:
    """Trains heads, one for each base rate, an epoch at a time.

    No head sees another: the loss is a sum over heads, and LARS takes the norm of each parameter.

    Args:
        optim: batch, epochs and optimizer; the rate is that of ``rates``. LARS adapts all
            parameters, biases too, as the authors' does, and leaves a step whose weights or
            gradient are zero as it is.
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
        self._optim, self._rates, self._steps = optim, rates, steps_per_epoch
        self._classes, self._device = classes, place.device
        self.heads = Heads(len(rates), features, classes, seed=seed).to(place.device)
        self._model = data_parallel(self.heads, place, bucket_mb=25, same_buffers=True)
        groups = self.heads.param_groups()
        self.optimizer: torch.optim.Optimizer
        if optim.optimizer == "lars":
            self.optimizer = Lars(
                groups,
                lr=0.0,
                momentum=optim.momentum,
                weight_decay=optim.weight_decay,
                trust=optim.lars_trust,
                adapt_all=True,
            )
        else:
            self.optimizer = torch.optim.SGD(
                groups, lr=0.0, momentum=optim.momentum, weight_decay=optim.weight_decay
            )

    def epoch(self, number: int, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Train for an epoch.

        Args:
            number: of the epoch, from 0.
            batches: this rank's share of each batch.

        Returns:
            (heads,) mean losses over all ranks, on the device.
        """
        total = torch.zeros(len(self._rates), device=self._device)
        for step, (features, labels) in enumerate(batches, start=number * self._steps):
            for group, base in zip(self.optimizer.param_groups, self._rates, strict=True):
                peak = base * self._optim.batch / 256
                group["lr"] = cosine(peak, step, total=self._optim.epochs * self._steps)
            scores = self._model(features)
            losses = torch.stack([F.cross_entropy(own, labels) for own in scores.unbind(1)])
            self.optimizer.zero_grad()
            losses.sum().backward()
            self.optimizer.step()
            total += losses.detach()
        return mean_across_ranks(total / self._steps)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> list[HeadResult]:
        """Classify images with every head, those of all ranks together.

        Args:
            batches: this rank's images, each once: features and labels.
        """
        scores = ((self.heads(features.float()), labels) for features, labels in batches)
        return count_heads(scores, self._rates, classes=self._classes, device=self._device)

    def state(self) -> dict[str, Any]:
        """Return what ``load`` goes on from."""
        return {"heads": self.heads.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])
