"""Speed of the kNN classifier, compared with lightly's on the same features.

The features are generated: points around a centre for each class, with the sizes of CIFAR-10 on a
ResNet-18, and of a part of ImageNet on a ResNet-50.

Both classify all queries with k = 200 and T = 0.1. lightly takes the queries in batches of 256,
like its ``KNNClassifier``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastsiam.bench.measurements import Record, Row
from fastsiam.bench.runner import Task, compare
from fastsiam.bench.session import Session
from fastsiam.evaluate.knn import knn_accuracy

_SIZES = {
    "CIFAR-10": {"bank": 50_000, "queries": 10_000, "dim": 512, "classes": 10},
    "ImageNet, a part": {"bank": 100_000, "queries": 2_000, "dim": 2048, "classes": 1000},
}
K, TEMPERATURE = 200, 0.1


def measure(session: Session) -> list[Record]:
    """Measure fastsiam's and lightly's classifier on each set of features."""
    records = []
    for title, size in _SIZES.items():
        rows = (
            Row(
                case="knn",
                name=f"{name}, {title}",
                build=partial(build_knn, name=name, device=session.device, **size),
                baseline=("lightly", f"lightly, {title}"),
                in_the_clock="normalising, search and vote; features are on the device",
                config={"k": K, "temperature": TEMPERATURE, "device": session.device, **size},
            )
            for name in ("fastsiam", "lightly")
        )
        records += compare(session, rows)
    return records


def build_knn(*, name: str, device: str, bank: int, queries: int, dim: int, classes: int) -> Task:
    """Build a task that classifies queries with fastsiam's or lightly's classifier."""
    bank_features, labels = _features(bank, dim, classes, seed=1)
    query_features, truth = _features(queries, dim, classes, seed=2)
    bank_features, labels, query_features, truth = (
        x.to(device) for x in (bank_features, labels, query_features, truth)
    )
    facts: dict[str, Any] = {}

    def run_fastsiam() -> None:
        (result,) = knn_accuracy(
            [(bank_features, labels)],
            query_features,
            truth,
            votes=[(K, TEMPERATURE)],
            classes=classes,
        )
        facts["top1"] = result.top1

    def run_lightly() -> None:
        from lightly.utils.benchmarking import knn_predict

        columns, correct = F.normalize(bank_features, dim=1).t().contiguous(), 0
        for part, part_truth in zip(query_features.split(256), truth.split(256), strict=True):
            predicted = knn_predict(
                F.normalize(part, dim=1), columns, labels, classes, K, TEMPERATURE
            )
            correct += int((predicted[:, 0] == part_truth).sum())
        facts["top1"] = 100 * correct / queries

    return Task(run_fastsiam if name == "fastsiam" else run_lightly, queries, lambda: facts)


def _features(count: int, dim: int, classes: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Generate points around the classes' centres, scattered enough to misclassify some."""
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=generator)
    noise = torch.randn(count, dim, generator=generator)
    return centres[labels] + 4 * noise, labels
