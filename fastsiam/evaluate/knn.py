"""The kNN classifier: how well do nearest neighbours of frozen features share a class?

The authors' monitor (issue 10 of their repository): pool5 features, l2-normalised, 200 neighbours,
temperature 0.2, the whole training set as the bank. The vote is Wu et al.'s (CVPR 2018,
section 3.4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fastsiam.distributed import gather_uneven, sum_across_ranks
from fastsiam.evaluate.accuracy import Accuracy

_BLOCK = 65536
"""Rows of the bank that are compared at a time."""
_BLOCK_BYTES = 2**29
"""Size of so many rows, at most: raw pixels are wide."""
_CHUNK_BYTES = 2**28
"""Size of one block of similarities."""


@dataclass(frozen=True, slots=True)
class KnnResult:
    """Accuracy with the protocol that it depends on."""

    top1: float
    """Percent of the queries whose class wins the vote."""
    top5: float
    """Percent of the queries whose class is among the five with most votes."""
    k: int
    """Neighbours that voted."""
    temperature: float
    """Of the votes' weights."""
    bank: int
    """Images in the bank."""
    per_class: tuple[float | None, ...] = ()
    """Top-1 of each class's queries, in percent; None for a class without any."""

    def record(self) -> dict[str, float]:
        """Return the fields of a line in metrics.jsonl."""
        return {
            "top1": self.top1,
            "k": self.k,
            "temperature": self.temperature,
            "bank": self.bank,
        }

    def __str__(self) -> str:
        """One line, protocol included."""
        return (
            f"kNN top-1 {self.top1:.2f}%, top-5 {self.top5:.2f}% "
            f"(k {self.k}, T {self.temperature:g}, bank {self.bank:,})"
        )


@torch.no_grad()
def nearest(
    queries: Tensor, bank: Iterable[tuple[Tensor, Tensor]], *, most: int
) -> tuple[Tensor, Tensor, int]:
    """Find the most similar rows of a bank for each query while the bank streams by.

    Holds the queries and their best so far, never the bank: memory does not grow with it. Exact:
    similarities are float32 sums of the features as they are given, without TF32, which would swap
    near neighbours. Features stored as float16 or bfloat16 are compared as stored: a cosine is then
    off by at most 2**-10 or 2**-7 (of numbers that float16 can hold, 6e-5 to 65504), and so are the
    neighbours that it decides on. Rows that are equally similar come in no particular order.

    Args:
        queries: (m, d) features, any floating type; normalised here.
        bank: its parts: (n, d) features, any floating type and device, normalised here, and (n,)
            int64 tags that stand for the rows: labels or positions.
        most: neighbours to keep for each.

    Returns:
        (m, up to ``most``) cosines, the largest first, their tags, and the number of rows.
    """
    queries, seen = normalized(queries), 0
    similarity = queries.new_empty(len(queries), 0)
    tag = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    precision = torch.get_float32_matmul_precision()
    for rows, tags in _blocks(bank, max(1, min(_BLOCK, _BLOCK_BYTES // (4 * queries.shape[1])))):
        seen += len(rows)
        rows, tags = normalized(rows.to(queries.device)), tags.to(queries.device)
        keep = min(most, similarity.shape[1] + len(rows))
        chunk = max(1, _CHUNK_BYTES // (4 * len(rows)))
        best: list[tuple[Tensor, Tensor]] = []
        torch.set_float32_matmul_precision("highest")
        try:
            split = (x.split(chunk) for x in (queries, similarity, tag))
            for own, own_similarity, own_tag in zip(*split, strict=True):
                found, at = (own @ rows.T).topk(min(most, len(rows)), dim=1)
                found, place = torch.cat([own_similarity, found], dim=1).topk(keep, dim=1)
                best.append((found, torch.cat([own_tag, tags[at]], dim=1).gather(1, place)))
        finally:
            torch.set_float32_matmul_precision(precision)
        similarity, tag = (torch.cat(parts) for parts in zip(*best, strict=True))
        del rows, tags  # or they are held while the next block is collected
    return similarity, tag, seen


def _blocks(parts: Iterable[tuple[Tensor, Tensor]], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut features and tags that come in parts of any size into blocks of at most ``size`` rows."""
    parts = iter(parts)
    while True:
        waiting: list[tuple[Tensor, Tensor]] = []
        for part in parts:
            waiting.append(part)
            if sum(len(tags) for _, tags in waiting) >= size:
                break
        if not waiting:
            return
        one = len(waiting) == 1  # to join it would copy it
        joined = [x[0] if one else torch.cat(x) for x in zip(*waiting, strict=True)]
        waiting.clear()
        yield from zip(*(x.split(size) for x in joined), strict=True)
        del joined, part


def knn_accuracy(
    bank: Iterable[tuple[Tensor, Tensor]],
    queries: Tensor,
    query_labels: Tensor,
    *,
    votes: Sequence[tuple[int, float]],
    classes: int,
) -> list[KnnResult]:
    """Classify queries by their nearest neighbours in a bank; exact, in one pass over the bank.

    With several ranks everything is this rank's share, and every rank gets the joint result. The
    bank stays where it is: each rank searches its share for all queries, then the candidates meet.

    Args:
        bank: parts of the bank: (n, d) features, any floating type, and (n,) int64 labels.
        queries: (m, d) features.
        query_labels: (m,) int64.
        votes: pairs of k and T. k: neighbours that vote; more than the bank holds means the whole
            bank. T: temperature of the weights exp(cosine similarity / T).
        classes: how many there are.

    Returns:
        A result for each pair, in their order.
    """
    query_labels = gather_uneven(query_labels)
    most = max(k for k, _ in votes)
    found = nearest(gather_uneven(queries), bank, most=most)
    total = int(sum_across_ranks(torch.tensor([found[2]], device=queries.device)))
    counts = [Accuracy(classes, queries.device) for _ in votes]
    for start in range(0, len(query_labels), 4096):
        part = slice(start, start + 4096)
        similarity, labels = (gather_uneven(x[part].T.contiguous()).T for x in found[:2])
        similarity, best = similarity.topk(min(most, similarity.shape[1]), dim=1)
        labels = labels.gather(1, best)
        for (k, temperature), count in zip(votes, counts, strict=True):
            # Less the largest: a small temperature would leave float32's range.
            weights = ((similarity[:, :k] - similarity[:, :1]) / temperature).exp()
            scores = weights.new_zeros(len(weights), classes)
            voted = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, labels[:, :k], True)
            scores.scatter_add_(1, labels[:, :k], weights)
            count.add(scores.masked_fill(~voted, -torch.inf), query_labels[part])
    return [
        KnnResult(count.top1, count.top5, min(k, total), temperature, total, count.per_class)
        for (k, temperature), count in zip(votes, counts, strict=True)
    ]


def normalized(features: Tensor) -> Tensor:
    """Return rows of any floating type at length 1, in float32."""
    return F.normalize(features.float(), dim=1)
