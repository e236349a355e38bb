"""Classification accuracy: top-1, top-5 and per class."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsiam.distributed import sum_across_ranks
from fastsiam.errors import DataError


class Accuracy:
    """Accuracy, accumulated over batches on the device without synchronising with the host."""

    def __init__(self, classes: int, device: torch.device) -> None:
        self._counts = torch.zeros(3, classes, dtype=torch.int64, device=device)
        """(3, classes): number of images, of top-1 hits and of top-5 hits."""

    def add(self, scores: Tensor, labels: Tensor) -> None:
        """Add a batch.

        Args:
            scores: (n, classes), higher is more likely; -inf excludes a class.
            labels: (n,) int64.
        """
        top_scores, top_classes = scores.topk(min(5, scores.shape[1]), dim=1)
        hits = (top_classes == labels[:, None]) & (top_scores > -torch.inf)
        counts = torch.stack([torch.ones_like(hits[:, 0]), hits[:, 0], hits.any(1)]).long()
        self._counts.scatter_add_(1, labels.expand(3, -1), counts)

    def over_ranks(self) -> Accuracy:
        """Return the accuracy over all ranks, each of which has counted different images."""
        total = Accuracy(self._counts.shape[1], self._counts.device)
        total._counts = sum_across_ranks(self._counts)
        return total

    def __str__(self) -> str:
        """Format top-1 and top-5 for display."""
        return f"top-1 {self.top1:.2f}%, top-5 {self.top5:.2f}%"

    @property
    def images(self) -> int:
        """Number of images counted."""
        return int(self._counts[0].sum())

    @property
    def top1(self) -> float:
        """Percentage of images whose class has the highest score."""
        return self._percent(1)

    @property
    def top5(self) -> float:
        """Percentage of images whose class is among the five highest scores."""
        return self._percent(2)

    def _percent(self, row: int) -> float:
        if not self.images:
            raise DataError("no validation image can be decoded: check the data")
        return 100 * int(self._counts[row].sum()) / self.images

    @property
    def per_class(self) -> tuple[float | None, ...]:
        """Top-1 accuracy of each class, in percent; None for a class without images."""
        counts = zip(*self._counts.tolist(), strict=True)
        return tuple(100 * hits / images if images else None for images, hits, _ in counts)
