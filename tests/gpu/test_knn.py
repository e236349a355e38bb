"""The kNN classifier on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fastsiam.evaluate.knn import knn_accuracy, nearest
from tests.rank_jobs import knn_problem

pytestmark = pytest.mark.gpu


def test_knn_accuracy_on_gpu_equals_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastsiam.evaluate.knn._BLOCK", 64)
    bank, labels, queries, truth = knn_problem()
    votes = [(1, 0.2), (20, 0.07), (403, 0.1)]
    results = [
        knn_accuracy(
            [(bank.to(device), labels.to(device))],
            queries.to(device),
            truth.to(device),
            votes=votes,
            classes=7,
        )
        for device in ("cuda", "cpu")
    ]
    assert results[0] == results[1]


def test_neighbours_match_float64_at_cifar10_size() -> None:
    """A problem of CIFAR-10's size in the monitor's batches; a sample is checked with float64.

    Neighbours with cosines that are equal in float32 may swap, so cosines are compared.
    """
    generator = torch.Generator().manual_seed(0)
    k, sample = 200, 200
    bank, queries = (torch.randn(images, 512, generator=generator) for images in (50_000, 10_000))
    parts = zip(bank.cuda().split(1024), torch.arange(50_000).cuda().split(1024), strict=True)
    neighbours = nearest(queries.cuda(), parts, most=k)[1][:sample].cpu()
    exact = F.normalize(queries[:sample].double(), dim=1) @ F.normalize(bank.double(), dim=1).T
    best = exact.topk(k, dim=1).values
    torch.testing.assert_close(exact.gather(1, neighbours), best, atol=1e-6, rtol=0)
    assert all(len(row.unique()) == k for row in neighbours)
