"""The kNN classifier: how well do nearest neighbours of frozen features share a class?

The authors' monitor (issue 10 of their repository): pool5 features, l2-normalised, 200 neighbours,
temperature 0.2, the whole training set as the bank. The vote is Wu et al.'s (CVPR 2018,
section 3.4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fastsiam.distributed import gather_uneven

_CHUNK_BYTES = 2**28
"""Size of one block of similarities."""


@dataclass(frozen=True, slots=True)
class KnnResult:
    """Accuracy with the protocol that it depends on."""

    top1: float
    """Percent of the queries whose class wins the vote."""
    k: int
    """Neighbours that voted."""
    temperature: float
    """Of the votes' weights."""
    bank: int
    """Images in the bank."""

    def record(self) -> dict[str, float]:
        """Return the fields of a line in metrics.jsonl."""
        return {"top1": self.top1, "k": self.k, "temperature": self.temperature, "bank": self.bank}

    def __str__(self) -> str:
        """One line, protocol included."""
        return (
            f"kNN top-1 {self.top1:.2f}% (k {self.k}, T {self.temperature:g}, bank {self.bank:,})"
        )


@torch.inference_mode()
def knn_accuracy(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor,
    query_labels: Tensor,
    *,
    k: int,
    temperature: float,
    chunk: int | None = None,
) -> KnnResult:
    """Classify queries by their nearest neighbours in a bank; exact.

    With several ranks every tensor is this rank's share, and every rank gets the joint result. The
    bank stays where it is: each rank searches its share for all queries, then the candidates meet.

    Args:
        bank: (n, d) features, any floating type; normalised here.
        bank_labels: (n,) int64.
        queries: (m, d) features.
        query_labels: (m,) int64.
        k: neighbours; more than the bank holds means the whole bank.
        temperature: T of the weights exp(cosine similarity / T).
        chunk: queries compared at a time; by default as many as keep a block under 256 MiB.
    """
    bank, queries = _normalize(bank), gather_uneven(_normalize(queries))
    query_labels = gather_uneven(query_labels)
    total = int(gather_uneven(torch.tensor([len(bank)], device=bank.device)).sum())
    classes = 1 + int(gather_uneven(torch.cat([bank_labels, query_labels]).max().view(1)).max())
    k = min(k, total)
    chunk = chunk or max(1, _CHUNK_BYTES // (4 * total))  # the same on every rank
    correct = 0
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # TF32 would swap near neighbours
    try:
        for part, labels in zip(queries.split(chunk), query_labels.split(chunk), strict=True):
            similarity, nearest = (part @ bank.T).topk(min(k, len(bank)), dim=1)
            similarity, votes = _best_of_all_ranks(similarity, bank_labels[nearest], k)
            weights = (similarity / temperature).exp()
            scores = weights.new_zeros(len(part), classes).scatter_add_(1, votes, weights)
            correct += int((scores.argmax(1) == labels).sum())
    finally:
        torch.set_float32_matmul_precision(precision)
    return KnnResult(100 * correct / len(queries), k, temperature, total)


def _normalize(features: Tensor) -> Tensor:
    return F.normalize(features.float(), dim=1)


def _best_of_all_ranks(similarity: Tensor, labels: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Merge each rank's candidates, (m, up to k) each, into the k best of all."""
    similarity = gather_uneven(similarity.T.contiguous()).T
    labels = gather_uneven(labels.T.contiguous()).T
    best, at = similarity.topk(k, dim=1)
    return best, labels.gather(1, at)
