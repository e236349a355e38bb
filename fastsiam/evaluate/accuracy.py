"""Counting what a classifier gets right: top-1, top-5, and of each class."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsiam.distributed import sum_across_ranks


class Accuracy:
    """Counts over batches, on the scores' device: adding never makes the host wait."""

    def __init__(self, classes: int, device: torch.device) -> None:
        self._counts = torch.zeros(3, classes, dtype=torch.int64, device=device)
        """Of each class: images, those that are right, and those that are right in five."""

    def add(self, scores: Tensor, labels: Tensor) -> None:
        """Count a batch.

        Args:
            scores: (n, classes), the larger the likelier; -inf is no candidate at all.
            labels: (n,) int64.
        """
        best, at = scores.topk(min(5, scores.shape[1]), dim=1)
        five = (at == labels[:, None]) & (best > -torch.inf)
        counted = torch.stack([torch.ones_like(five[:, 0]), five[:, 0], five.any(1)]).long()
        self._counts.scatter_add_(1, labels.expand(3, -1), counted)

    def over_ranks(self) -> Accuracy:
        """Return the sum of all ranks' counts, each of which counted images of its own."""
        total = Accuracy(self._counts.shape[1], self._counts.device)
        total._counts = sum_across_ranks(self._counts)
        return total

    def __str__(self) -> str:
        """Its accuracies in words."""
        return f"top-1 {self.top1:.2f}%, top-5 {self.top5:.2f}%"

    @property
    def images(self) -> int:
        """Images that were counted."""
        return int(self._counts[0].sum())

    @property
    def top1(self) -> float:
        """Percent of the images whose class has the highest score."""
        return 100 * int(self._counts[1].sum()) / self.images

    @property
    def top5(self) -> float:
        """Percent of the images whose class is among the five highest scores."""
        return 100 * int(self._counts[2].sum()) / self.images

    @property
    def per_class(self) -> tuple[float | None, ...]:
        """Top-1 of each class's images, in percent; None for a class without any."""
        counts = zip(*self._counts.tolist(), strict=True)
        return tuple(100 * right / images if images else None for images, right, _ in counts)
