"""The kNN classifier on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fastsiam.evaluate.knn import Nearest, knn_accuracy
from tests.rank_jobs import knn_problem

pytestmark = pytest.mark.gpu


def test_knn_is_exact_on_a_gpu() -> None:
    bank, labels, queries, truth = knn_problem()
    votes = [(1, 0.2), (20, 0.07), (403, 0.1)]
    results = [
        knn_accuracy(
            [(bank.to(device), labels.to(device))],
            queries.to(device),
            truth.to(device),
            votes=votes,
            classes=7,
            block=64,
        )
        for device in ("cuda", "cpu")
    ]
    assert results[0] == results[1]


def test_knn_at_real_size() -> None:
    """CIFAR-10's numbers in batches as the monitor's, against float64 on the CPU for some queries.

    Neighbours whose cosines differ by less than float32 tells may swap: they are compared by their
    cosines, and the votes by what the neighbours that were found weigh in float64.
    """
    generator = torch.Generator().manual_seed(0)
    k, temperature, classes, sample = 200, 0.2, 10, 200
    centres = torch.randn(classes, 512, generator=generator)
    sides = []
    for images in (50_000, 10_000):
        labels = torch.randint(0, classes, (images,), generator=generator)
        noise = torch.randn(images, 512, generator=generator)
        sides.append((centres[labels] + 6 * noise, labels))
    (bank, labels), (queries, truth) = sides

    nearest = Nearest(queries.cuda(), most=k)
    for features, rows in zip(
        bank.cuda().split(1024), torch.arange(50_000).split(1024), strict=True
    ):
        nearest.add(features, rows.cuda())
    found = nearest.finish().tag[:sample].cpu()
    exact = F.normalize(queries[:sample].double(), dim=1) @ F.normalize(bank.double(), dim=1).T
    best = exact.topk(k, dim=1).values
    torch.testing.assert_close(exact.gather(1, found), best, atol=1e-6, rtol=0)
    assert all(len(row.unique()) == k for row in found)

    (result,) = knn_accuracy(
        zip(bank.cuda().split(1024), labels.cuda().split(1024), strict=True),
        queries.cuda(),
        truth.cuda(),
        votes=[(k, temperature)],
        classes=classes,
    )
    scores = torch.zeros(10_000, classes, dtype=torch.float64)
    tags, cosines = nearest.tag.cpu(), nearest.similarity.double().cpu()
    scores.scatter_add_(1, labels[tags], (cosines / temperature).exp())
    top1 = 100 * (scores.argmax(1) == truth).double().mean().item()
    assert result.top1 == pytest.approx(top1, abs=0.03)  # three queries whose votes are even
    assert result.bank == 50_000 and 20 < result.top1 < 99.9, "a problem that says nothing"
