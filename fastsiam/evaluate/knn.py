"""kNN classifier on frozen features, with exact search.

The defaults are those of the authors' monitor (issue 10 of their repository): l2-normalised pool5
features, 200 neighbours, temperature 0.2, and the entire training set as the bank. Votes are
weighted as by Wu et al. (CVPR 2018, section 3.4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fastsiam.config.setting import require
from fastsiam.distributed import gather_uneven, sum_across_ranks
from fastsiam.errors import DataError
from fastsiam.evaluate.accuracy import Accuracy
from fastsiam.evaluate.features import concat_batches, group_batches

_BLOCK = 65536
"""Maximum number of rows of the bank that are compared at a time."""
_BLOCK_BYTES = 2**29
"""Maximum size of these rows; it limits their number for wide features such as raw pixels."""
_CHUNK_BYTES = 2**28
"""Size of one block of similarities."""


@dataclass(frozen=True, slots=True)
class KnnResult:
    """kNN accuracy, with the protocol that it depends on."""

    top1: float
    """Percentage of queries whose class wins the vote."""
    top5: float
    """Percentage of queries whose class is among the five with the most votes."""
    k: int
    """Number of neighbours that vote."""
    temperature: float
    """Temperature of the votes' weights."""
    bank: int
    """Number of images in the bank."""
    per_class: tuple[float | None, ...] = ()
    """Top-1 accuracy of each class, in percent; None for a class without queries."""

    def record(self) -> dict[str, float]:
        """Return the fields of a line in metrics.jsonl."""
        return {
            "top1": self.top1,
            "k": self.k,
            "temperature": self.temperature,
            "bank": self.bank,
        }

    def __str__(self) -> str:
        """Format accuracy and protocol in one line."""
        return (
            f"kNN top-1 {self.top1:.2f}%, top-5 {self.top5:.2f}% "
            f"(k {self.k}, T {self.temperature:g}, bank {self.bank:,})"
        )


@torch.no_grad()
def nearest(
    queries: Tensor, bank: Iterable[tuple[Tensor, Tensor]], *, most: int
) -> tuple[Tensor, Tensor, int]:
    """Find the rows of a bank with the highest cosine similarity to each query, in one pass.

    Only the queries and their best matches so far are kept, so memory does not grow with the bank.

    The search is exact: similarities are float32 sums without TF32, which would swap near
    neighbours. Features stored as float16 or bfloat16 are compared as stored. Their cosines are off
    by at most 2**-10 or 2**-7 (for values in float16's normal range, 6e-5 to 65504), which can
    change the neighbours. Equally similar rows are in no particular order.

    Args:
        queries: (m, d) features, any floating type; normalised here.
        bank: parts of the bank: (n, d) features of any floating type on any device, normalised
            here, and (n,) int64 tags of the rows, such as labels or positions.
        most: number of neighbours to keep for each query.

    Returns:
        (m, up to ``most``) cosines in descending order, the tags of these rows, and the bank's
        number of rows.
    """
    queries, total = normalize(queries), 0
    similarity = queries.new_empty(len(queries), 0)
    tag = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    precision = torch.get_float32_matmul_precision()
    for rows, tags in _blocks(bank, max(1, min(_BLOCK, _BLOCK_BYTES // (4 * queries.shape[1])))):
        total += len(rows)
        rows, tags = normalize(rows.to(queries.device)), tags.to(queries.device)
        count = min(most, similarity.shape[1] + len(rows))
        chunk = max(1, _CHUNK_BYTES // max(1, 4 * len(rows)))
        best: list[tuple[Tensor, Tensor]] = []
        torch.set_float32_matmul_precision("highest")
        try:
            split = (x.split(chunk) for x in (queries, similarity, tag))
            for query_chunk, similarity_chunk, tag_chunk in zip(*split, strict=True):
                cosines, index = (query_chunk @ rows.T).topk(min(most, len(rows)), dim=1)
                cosines, order = torch.cat([similarity_chunk, cosines], dim=1).topk(count, dim=1)
                best.append((cosines, torch.cat([tag_chunk, tags[index]], dim=1).gather(1, order)))
        finally:
            torch.set_float32_matmul_precision(precision)
        similarity, tag = (torch.cat(parts) for parts in zip(*best, strict=True))
        del rows, tags  # free them before the next block is collected
    return similarity, tag, total


def _blocks(parts: Iterable[tuple[Tensor, Tensor]], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Regroup parts of any size, features and tags, into blocks of at most ``size`` rows."""
    for group in group_batches(parts, size):
        columns = concat_batches(group)
        group.clear()  # free the parts before the block is used
        yield from zip(*(x.split(size) for x in columns), strict=True)
        del columns


def knn_accuracy(
    bank: Iterable[tuple[Tensor, Tensor]],
    queries: Tensor,
    query_labels: Tensor,
    *,
    votes: Sequence[tuple[int, float]],
    classes: int,
) -> list[KnnResult]:
    """Classify queries by their nearest neighbours in a bank, exactly and in one pass.

    With several ranks, the arguments are this rank's share, and every rank gets the joint result.
    The bank is not moved: each rank searches its share for all queries, and the candidates of all
    ranks are then gathered.

    Args:
        bank: parts of the bank: (n, d) features, any floating type, and (n,) int64 labels.
        queries: (m, d) features.
        query_labels: (m,) int64.
        votes: pairs (k, T). The k nearest neighbours, or all if the bank has fewer, vote with the
            weights exp(cosine similarity / T).

    Returns:
        One result per pair, in the order of ``votes``.

    Raises:
        ValueError: a k or a T is not positive.
        DataError: the bank or the queries are empty on all ranks.
    """
    require(all(k > 0 and t > 0 for k, t in votes), f"k and T must be positive, not {votes}")
    query_labels = gather_uneven(query_labels)
    most = max(k for k, _ in votes)
    matches = nearest(gather_uneven(queries), bank, most=most)
    total = int(sum_across_ranks(torch.tensor([matches[2]], device=queries.device)))
    if not total:
        raise DataError("no training image can be decoded: check the data")
    counts = [Accuracy(classes, queries.device) for _ in votes]
    for start in range(0, len(query_labels), 4096):
        part = slice(start, start + 4096)
        similarity, labels = (gather_uneven(x[part].T.contiguous()).T for x in matches[:2])
        similarity, order = similarity.topk(min(most, similarity.shape[1]), dim=1)
        labels = labels.gather(1, order)
        for (k, temperature), count in zip(votes, counts, strict=True):
            # Subtract the maximum: with a small temperature, exp would overflow float32.
            weights = ((similarity[:, :k] - similarity[:, :1]) / temperature).exp()
            scores = weights.new_zeros(len(weights), classes)
            has_votes = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, labels[:, :k], True)
            scores.scatter_add_(1, labels[:, :k], weights)
            count.add(scores.masked_fill(~has_votes, -torch.inf), query_labels[part])
    return [
        KnnResult(count.top1, count.top5, min(k, total), temperature, total, count.per_class)
        for (k, temperature), count in zip(votes, counts, strict=True)
    ]


def normalize(features: Tensor) -> Tensor:
    """Normalise rows of any floating type to length 1, in float32."""
    return F.normalize(features.float(), dim=1)
