"""kNN: equal to brute force in float64, blind to chunks and ranks, and harmless to the backbone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastsiam import checkpoint as checkpoints
from fastsiam.batch import EvalBatch
from fastsiam.config import DataConfig, ModelConfig, TrainConfig
from fastsiam.distributed import Place
from fastsiam.errors import DataError
from fastsiam.evaluate.features import backbone_features, pixel_features
from fastsiam.evaluate.knn import knn_accuracy
from fastsiam.methods import build_method
from fastsiam.run import evaluate_knn, train_here

from .conftest import write_images
from .rank_jobs import knn_problem


def brute_force(k: int, temperature: float) -> float:
    bank, bank_labels, queries, labels = (t.numpy() for t in knn_problem())
    bank, queries = (
        x.astype(np.float64) / np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True)
        for x in (bank, queries)
    )
    correct = 0
    for query, label in zip(queries, labels, strict=True):
        similarity = bank @ query
        votes = np.zeros(7)
        for i in np.argsort(-similarity, kind="stable")[:k]:
            votes[bank_labels[i]] += np.exp(similarity[i] / temperature)
        correct += votes.argmax() == label
    return 100 * float(correct) / len(labels)


@pytest.mark.parametrize(
    ("k", "temperature"), [(1, 0.2), (20, 0.2), (20, 0.07), (200, 0.1), (403, 0.2)]
)
def test_equals_brute_force_in_float64(k: int, temperature: float) -> None:
    result = knn_accuracy(*knn_problem(), k=k, temperature=temperature)
    assert result.top1 == pytest.approx(brute_force(k, temperature), abs=1e-9)
    assert 30 < result.top1 < 95  # neither chance nor certainty
    assert (result.k, result.temperature, result.bank) == (k, temperature, 403)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunks_do_not_matter(chunk: int) -> None:
    assert knn_accuracy(*knn_problem(), k=20, temperature=0.2, chunk=chunk) == knn_accuracy(
        *knn_problem(), k=20, temperature=0.2
    )


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_do_not_matter(world: int, ranks: Callable[[str, int], list[Any]]) -> None:
    alone = knn_accuracy(*knn_problem(), k=20, temperature=0.2).record()
    assert ranks("knn", world) == [alone] * world


def test_more_neighbours_than_the_bank_holds() -> None:
    result = knn_accuracy(*knn_problem(), k=10_000, temperature=0.2)
    assert result.k == 403 and "k 403, T 0.2, bank 403" in str(result)


def test_half_precision_features_and_their_scale() -> None:
    bank, bank_labels, queries, labels = knn_problem()
    full = knn_accuracy(bank, bank_labels, queries, labels, k=20, temperature=0.2)
    scaled = knn_accuracy(bank * 300, bank_labels, queries / 70, labels, k=20, temperature=0.2)
    assert scaled == full
    half = knn_accuracy(
        bank.bfloat16(), bank_labels, queries.bfloat16(), labels, k=20, temperature=0.2
    )
    assert half.top1 == pytest.approx(full.top1, abs=3)


def test_evaluation_leaves_the_backbone_as_it_was() -> None:
    backbone = build_method(ModelConfig(backbone="resnet10", width=4)).backbone.train()
    before = copy.deepcopy(backbone.state_dict())
    batches = [
        EvalBatch(torch.randn(4, 3, 32, 32) + 5, torch.arange(4), torch.arange(4)) for _ in range(3)
    ]
    features, labels = backbone_features(backbone, batches, dtype=torch.bfloat16)  # type: ignore[arg-type]
    assert (
        features.shape == (12, 32)
        and features.dtype == torch.float32
        and labels.tolist() == [0, 1, 2, 3] * 3
    )
    assert backbone.training and all(module.training for module in backbone.modules())
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())
    one_by_one = torch.cat([backbone_features(backbone, [b])[0] for b in batches])  # type: ignore[arg-type]
    assert torch.equal(one_by_one, backbone_features(backbone, batches)[0])  # type: ignore[arg-type]


def test_pixel_features_are_the_pixels() -> None:
    batch = EvalBatch(torch.randn(4, 3, 8, 8), torch.arange(4), torch.arange(4))
    features, _ = pixel_features([batch])  # type: ignore[arg-type]
    assert torch.equal(features, batch.image.reshape(4, -1))


def test_evaluation_of_a_run_with_baselines(small: TrainConfig) -> None:
    run = train_here(replace(small, optim=replace(small.optim, epochs=1)), "imagenet")
    place, state = Place(0, 1, torch.device("cpu")), checkpoints.load(run)
    results = evaluate_knn(state, place, baselines=True)
    assert list(results) == ["pixels", "untrained", "trained"]
    assert all(r.k == 5 and r.bank == 24 for r in results.values())
    from fastsiam.metrics import read_metrics

    knn = [line["top1"] for line in read_metrics(run) if line["kind"] == "knn"]
    assert results["untrained"].top1 == knn[0] and results["trained"].top1 == knn[-1]


def test_unlabelled_and_mismatched_data_are_refused(small: TrainConfig, tmp_path: Path) -> None:
    run = train_here(replace(small, run=replace(small.run, max_steps=1)), "imagenet")
    place, state = Place(0, 1, torch.device("cpu")), checkpoints.load(run)
    write_images(tmp_path / "other" / "train", classes=3)
    write_images(tmp_path / "other" / "val", classes=2)
    with pytest.raises(DataError, match="different class folders"):
        evaluate_knn(state, place, data=DataConfig(data=str(tmp_path / "other"), workers=0))
    for split in ("train", "val"):
        (tmp_path / "flat" / split).mkdir(parents=True)
        for path in (tmp_path / "other" / "train" / "class0").iterdir():
            (tmp_path / "flat" / split / path.name).symlink_to(path)
    with pytest.raises(DataError, match="kNN needs labels"):
        evaluate_knn(state, place, data=DataConfig(data=str(tmp_path / "flat"), workers=0))
