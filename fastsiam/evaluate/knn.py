"""The kNN classifier: how well do nearest neighbours of frozen features share a class?

The authors' monitor (issue 10 of their repository): pool5 features, l2-normalised, 200 neighbours,
temperature 0.2, the whole training set as the bank. The vote is Wu et al.'s (CVPR 2018,
section 3.4).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


class Nearest:
    """The most similar rows of a bank to each query, found while the bank streams by.

    Holds the queries and their best so far, never the bank: memory does not grow with it. Exact:
    similarities are float32 sums of the features as they are given, without TF32, which would swap
    near neighbours. Features stored as float16 or bfloat16 are compared as stored: a cosine is then
    off by at most 2**-10 or 2**-7 (of numbers that float16 can hold, 6e-5 to 65504), and so are the
    neighbours that it decides on. Rows that are equally similar come in no particular order.

    Args:
        queries: (m, d) features, any floating type; normalised here.
        most: neighbours to keep for each.
        block: rows of the bank that are compared at a time.
    """

    def __init__(self, queries: Tensor, *, most: int, block: int = _BLOCK) -> None:
        self._queries, self._most = normalized(queries), most
        self._block = max(1, min(block, _BLOCK_BYTES // (4 * queries.shape[1])))
        m, device = len(queries), queries.device
        self.similarity = torch.empty(m, 0, device=device)
        """(m, up to ``most``) cosines, the largest first, of the rows that were seen."""
        self.tag = torch.empty(m, 0, dtype=torch.int64, device=device)
        """(m, up to ``most``) their tags."""
        self.seen = 0
        """Rows of the bank that were added."""
        self._waiting: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def add(self, features: Tensor, tags: Tensor) -> None:
        """Compare further rows of the bank, sooner or later.

        Args:
            features: (n, d), any floating type and device; normalised here.
            tags: (n,) int64 that stand for the rows: labels or positions.
        """
        self.seen += len(features)
        self._waiting.append((features, tags))
        if sum(len(tags) for _, tags in self._waiting) >= self._block:
            self.finish()

    @torch.no_grad()
    def finish(self) -> Nearest:
        """Compare what is still waiting."""
        if self._waiting:
            one = len(self._waiting) == 1  # to join it would copy it
            waiting = zip(*self._waiting, strict=True)
            joined = [parts[0] if one else torch.cat(parts) for parts in waiting]
            self._waiting.clear()
            for rows, tags in zip(*(x.split(self._block) for x in joined), strict=True):
                self._merge(rows, tags)
        return self

    def _merge(self, rows: Tensor, tags: Tensor) -> None:
        rows, tags = normalized(rows.to(self._queries.device)), tags.to(self._queries.device)
        keep = min(self._most, self.similarity.shape[1] + len(rows))
        chunk = max(1, _CHUNK_BYTES // (4 * len(rows)))
        similarity = self.similarity.new_empty(len(self._queries), keep)
        tag = self.tag.new_empty(len(self._queries), keep)
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            for start in range(0, len(self._queries), chunk):
                own = slice(start, start + chunk)
                found, at = (self._queries[own] @ rows.T).topk(min(self._most, len(rows)), dim=1)
                found = torch.cat([self.similarity[own], found], dim=1)
                tagged = torch.cat([self.tag[own], tags[at]], dim=1)
                similarity[own], best = found.topk(keep, dim=1)
                tag[own] = tagged.gather(1, best)
        finally:
            torch.set_float32_matmul_precision(precision)
        self.similarity, self.tag = similarity, tag

    def joined(self, part: slice) -> tuple[Tensor, Tensor]:
        """Merge what all ranks found for some of the queries, which are the same on every rank.

        Returns:
            Similarities and tags, (rows of ``part``, up to ``most``), the most similar first.
        """
        similarity = gather_uneven(self.similarity[part].T.contiguous()).T
        tag = gather_uneven(self.tag[part].T.contiguous()).T
        best, at = similarity.topk(min(self._most, similarity.shape[1]), dim=1)
        return best, tag.gather(1, at)


def knn_accuracy(
    bank: Iterable[tuple[Tensor, Tensor]],
    queries: Tensor,
    query_labels: Tensor,
    *,
    votes: Sequence[tuple[int, float]],
    classes: int,
    block: int = _BLOCK,
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
        block: rows of the bank that are compared at a time.

    Returns:
        A result for each pair, in their order.
    """
    query_labels = gather_uneven(query_labels)
    nearest = Nearest(gather_uneven(queries), most=max(k for k, _ in votes), block=block)
    for features, labels in bank:
        nearest.add(features, labels)
    total = int(sum_across_ranks(torch.tensor([nearest.finish().seen], device=queries.device)))
    counts = [Accuracy(classes, queries.device) for _ in votes]
    for start in range(0, len(query_labels), 4096):
        part = slice(start, start + 4096)
        similarity, labels = nearest.joined(part)
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
