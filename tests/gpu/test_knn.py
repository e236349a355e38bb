"""The kNN classifier on a GPU."""

from __future__ import annotations

import pytest

from fastsiam.evaluate.knn import knn_accuracy
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
