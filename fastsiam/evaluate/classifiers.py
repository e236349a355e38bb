"""Linear classifiers on features, and how they are trained: what all training with labels shares.

Linear evaluation trains several side by side on frozen features, fine-tuning one with the backbone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastsiam.config import OptimConfig
from fastsiam.distributed import Place, mean_across_ranks
from fastsiam.evaluate.accuracy import Accuracy
from fastsiam.methods.optim import cosine
from fastsiam.model.numerics import autocast


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


class HeadTraining(ABC):
    """Trains heads, one for each base rate, and perhaps what is below them, an epoch at a time.

    No head sees another: the loss is a sum over heads. Rates follow a cosine per step.

    Args:
        network: what is trained: inputs to (n, heads, classes).
        model: the same, wrapped for several ranks.
        optimizer: of its parameters; group g has rate g, or there is one group and one rate.
        optim: batch and epochs.
        rates: base rates of the heads, for a batch of 256.
        classes: how many there are.
        steps_per_epoch: batches in an epoch.
        dtype: autocast type.
        place: this rank; every rank takes part.
    """

    def __init__(
        self,
        network: nn.Module,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        optim: OptimConfig,
        rates: Sequence[float],
        classes: int,
        steps_per_epoch: int,
        dtype: torch.dtype,
        place: Place,
    ) -> None:
        self.network, self.optimizer = network, optimizer
        self.rates, self.classes, self.device, self.dtype = rates, classes, place.device, dtype
        self._model, self._steps = model, steps_per_epoch
        self._total = optim.epochs * steps_per_epoch
        self._peaks = [rate * optim.batch / 256 for rate in rates]
        self.scaler = torch.amp.GradScaler(place.device.type, enabled=dtype == torch.float16)

    def epoch(self, number: int, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Train for an epoch.

        Args:
            number: of the epoch, from 0.
            batches: this rank's share of each batch: inputs and labels (n,).

        Returns:
            (heads,) mean losses over all ranks, on the device.
        """
        self.network.train()
        total = torch.zeros(len(self.rates), device=self.device)
        for step, (inputs, labels) in enumerate(batches, start=number * self._steps):
            for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
                group["lr"] = cosine(peak, step, total=self._total)
            with autocast(self.device, self.dtype):
                scores = self._model(inputs)
            losses = torch.stack([F.cross_entropy(o, labels) for o in scores.float().unbind(1)])
            self.optimizer.zero_grad()
            self.scaler.scale(losses.sum()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            total += losses.detach()
        return mean_across_ranks(total / self._steps)

    @abstractmethod
    def evaluate(self, batches: Any) -> list[HeadResult]:
        """Classify this rank's validation images with every head; count those of all ranks."""

    @property
    @abstractmethod
    def parts(self) -> dict[str, Any]:
        """What the state consists of, by the names that it has in files."""

    def state(self) -> dict[str, Any]:
        """Return what ``load`` continues from."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
