"""kNN: equals float64 brute force for any chunks and ranks, and leaves the backbone unchanged."""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import fastsiam.evaluate.knn
from fastsiam.config import ModelConfig
from fastsiam.config.evaluate import KnnConfig
from fastsiam.errors import DataError
from fastsiam.evaluate.command import evaluate_knn, preflight
from fastsiam.evaluate.features import concat_batches, feature_batches
from fastsiam.evaluate.knn import _blocks, knn_accuracy, nearest, normalize
from fastsiam.methods import build_method
from fastsiam.run.log import read_metrics
from fastsiam.run.records import read_records
from fastsiam.views.batch import EvalBatch
from tests import processes, rank_jobs
from tests.conftest import write_images
from tests.rank_jobs import knn_problem
from tests.ranks import fastsiam_on_ranks
from tests.sources import jpeg, put
from tests.tables import dataset
from tests.train.runs import CPU as HERE


def ranked_classes(k: int, temperature: float) -> list[tuple[list[int], int]]:
    """Rank each query's classes with votes by float64 brute force; return them with its label."""
    bank, bank_labels, queries, labels = (t.numpy() for t in knn_problem())
    bank, queries = (
        x.astype(np.float64) / np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True)
        for x in (bank, queries)
    )
    rankings = []
    for query, label in zip(queries, labels.tolist(), strict=True):
        similarity = bank @ query
        votes = np.zeros(7)
        for i in np.argsort(-similarity, kind="stable")[:k]:
            votes[bank_labels[i]] += np.exp(similarity[i] / temperature)
        rankings.append(([int(c) for c in np.argsort(-votes) if votes[c] > 0], label))
    return rankings


def classify(votes: list[tuple[int, float]], *, part: int = 403) -> Any:
    bank, bank_labels, queries, labels = knn_problem()
    parts = zip(bank.split(part), bank_labels.split(part), strict=True)
    return knn_accuracy(parts, queries, labels, votes=votes, classes=7)


VOTES = [(1, 0.2), (20, 0.2), (20, 0.07), (200, 0.1), (403, 0.2)]


def test_accuracies_equal_brute_force_in_float64() -> None:
    for result, (k, temperature) in zip(classify(VOTES), VOTES, strict=True):
        expected = ranked_classes(k, temperature)
        top1 = [ranked[0] == label for ranked, label in expected]
        assert result.top1 == pytest.approx(100 * np.mean(top1), abs=1e-9)
        top5 = np.mean([label in ranked[:5] for ranked, label in expected])
        assert result.top5 == pytest.approx(100 * top5, abs=1e-9)
        for kind, accuracy in enumerate(result.per_class):
            of_class = [
                right for right, (_, label) in zip(top1, expected, strict=True) if label == kind
            ]
            assert accuracy == pytest.approx(100 * np.mean(of_class), abs=1e-9)
        assert 30 < result.top1 < 95  # neither chance nor certainty
        assert (result.k, result.temperature, result.bank) == (k, temperature, 403)
    assert classify([(1, 0.2)])[0].top5 == classify([(1, 0.2)])[0].top1  # only one class has votes


def test_result_is_independent_of_blocks_and_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = classify(VOTES)
    for block, part in ((1, 403), (7, 1), (100, 403), (1000, 11)):
        monkeypatch.setattr(fastsiam.evaluate.knn, "_BLOCK", block)
        assert classify(VOTES, part=part) == expected
    bank, bank_labels, queries, labels = knn_problem()
    scaled = knn_accuracy([(bank * 300, bank_labels)], queries / 70, labels, votes=VOTES, classes=7)
    assert scaled == expected
    monkeypatch.setattr(fastsiam.evaluate.knn, "_CHUNK_BYTES", 4 * 403 * 10)
    monkeypatch.setattr(fastsiam.evaluate.knn, "_BLOCK_BYTES", 4 * 24 * 10)
    with monkeypatch.context() as patch:
        blocks = Mock(wraps=_blocks)
        patch.setattr(fastsiam.evaluate.knn, "_blocks", blocks)
        assert classify(VOTES, part=4) == expected
    assert blocks.call_args.args[1] == 10  # few at a time: raw pixels are wide
    with pytest.raises(DataError, match="no training image can be decoded"):
        empty = torch.empty(0, bank.shape[1]), labels[:0]
        knn_accuracy([empty], queries, labels, votes=VOTES, classes=7)
    for vote in ((0, 0.2), (5, 0.0), (5, -1.0)):
        with pytest.raises(ValueError, match="k and T must be positive"):
            classify([vote])
    sharp, nearest, every = classify([(20, 0.001), (1, 0.2), (10_000, 0.2)])
    assert sharp.top1 == nearest.top1  # the nearest has all the weight
    assert every.k == 403 and "k 403, T 0.2, bank 403" in str(every)


def test_ranks_give_result_of_one_process(ranks: Callable[[str, int], list[Any]]) -> None:
    """All ranks use rank 0's BN statistics, which are those in checkpoints."""
    alone = [result.record() for result in classify(rank_jobs.VOTES)]
    assert ranks("knn", 2) == [(alone, [0.0, 0.0])] * 2


def test_memory_is_independent_of_bank_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two blocks of the bank are alive at a time, of those two also the parts."""
    monkeypatch.setattr(fastsiam.evaluate.knn, "_BLOCK", 100)
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    blocks: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def normalize_and_note(rows: torch.Tensor) -> torch.Tensor:
        rows = normalize(rows)
        blocks.add(rows)
        assert len(blocks) <= 3  # one is the queries
        return rows

    monkeypatch.setattr(fastsiam.evaluate.knn, "normalize", normalize_and_note)

    def bank() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for start in range(0, 1000, 50):
            part = torch.randn(50, 4)
            alive.add(part)
            assert len(alive) <= 4
            yield part, torch.arange(start, start + 50)

    _, tags, seen = nearest(torch.randn(10, 4), bank(), most=3)
    assert seen == 1000 and tags.shape == (10, 3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2**-10), (torch.bfloat16, 2**-7)])
def test_half_precision_neighbours_are_within_tolerance(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every neighbour's cosine is at least the true k-th largest, minus the tolerance."""
    monkeypatch.setattr(fastsiam.evaluate.knn, "_BLOCK", 999)
    generator = torch.Generator().manual_seed(0)
    bank, queries = (torch.randn(n, 64, generator=generator) for n in (5000, 50))
    cosines = normalize(queries).double() @ normalize(bank).double().T
    exact = cosines.sort(descending=True)
    parts = [(bank.to(dtype), torch.arange(len(bank)))]
    similarity, tags, _ = nearest(queries.to(dtype), parts, most=20)
    exact_similarity = cosines.gather(1, tags)
    assert (exact_similarity >= exact.values[:, 19:20] - 2 * tolerance).all()
    assert (similarity - exact_similarity).abs().max() < tolerance
    assert (tags != exact.indices[:, :20]).any()  # not exact, so the tolerance is tested


def test_extracting_features_keeps_backbone_state() -> None:
    backbone = build_method(ModelConfig(backbone="resnet10", width=4)).backbone.train()
    before = copy.deepcopy(backbone.state_dict())
    four = torch.arange(4)
    batches = [EvalBatch(torch.randn(4, 3, 32, 32) + 5, four, four) for _ in range(3)]
    settings: dict[str, Any] = {"dtype": torch.bfloat16, "device": HERE.device}
    features, labels, _ = concat_batches(feature_batches(backbone, batches, **settings))
    assert features.shape == (12, 32) and features.dtype == torch.float32
    assert labels.tolist() == [0, 1, 2, 3] * 3
    nothing = next(feature_batches(backbone, [], **settings))  # all images of a rank are bad
    assert [x.shape for x in nothing] == [(0, 32), (0,), (0,)]
    assert all(module.training for module in backbone.modules())
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())


def test_baselines_are_evaluated_for_every_protocol(run: Path) -> None:
    config = KnnConfig(baselines=True, workers=0, device="cpu", k=(5, 3), temperature=(0.2, 0.07))
    record = evaluate_knn(run, config, HERE)
    assert [(r["features"], r["k"], r["temperature"]) for r in record.results] == [
        (kind, k, t)
        for kind in ("pixels", "untrained", "trained")
        for k in (5, 3)
        for t in (0.2, 0.07)
    ]
    assert (record.data.train, record.data.val, record.data.classes) == (24, 12, 3)
    knn = [line["top1"] for line in read_metrics(run) if line["kind"] == "knn"]
    assert record.first_with("untrained")["top1"] == knn[0]
    assert record.first_with("trained")["top1"] == knn[-1]
    assert set(record.per_class) == {"class0", "class1", "class2"}
    assert np.mean(list(record.per_class.values())) == pytest.approx(
        record.first_with("trained")["top1"]
    )
    (path,) = (run / "eval").glob("knn-epoch1-*.json")
    assert json.loads(path.read_text()) == json.loads(json.dumps(record.to_dict()))
    assert read_records(run) == [record]
    alone = evaluate_knn(run, replace(config, baselines=False, untrained=True), HERE)
    assert alone.results[0]["top1"] == knn[0] and len(list((run / "eval").iterdir())) == 2


@pytest.mark.parametrize("words", [["knn", "--k", "5"], ["linear", "--cached", "--epochs", "2"]])
def test_rank_may_have_only_bad_images(words: list[str], run: Path, tmp_path: Path) -> None:
    """The first of two ranks has only bad validation images; without any the error is one line."""
    data, flags = tmp_path / "data", ["--bad-images", "replace", "--device", "cpu"]
    write_images(data / "train", classes=2, each=8)
    files = sorted(write_images(data / "val", classes=2, each=4, seed=1).rglob("*.jpg"))
    flags += ["--data", str(data), "--workers", "0", "--gpus"]
    for path in files[:4]:
        path.write_bytes(b"no image")
    two = fastsiam_on_ranks(2, "eval", *words, str(run), *flags, "2")[0].stdout
    assert two == processes.fastsiam("eval", *words, str(run), *flags, "1").stdout
    assert "top-1" in two
    for path in files[4:]:
        path.write_bytes(b"no image")
    for result in fastsiam_on_ranks(2, "eval", *words, str(run), *flags, "2", code=1):
        assert "error: no validation image can be decoded" in result.stderr
        assert "Traceback" not in result.stderr


def test_more_processes_than_images_are_rejected(run: Path, tmp_path: Path) -> None:
    for split, each in (("train", 4), ("val", 1)):
        write_images(tmp_path / "few" / split, classes=3, each=each)
    config = KnnConfig(data=str(tmp_path / "few"), workers=0, gpus=4, device="cpu")
    with pytest.raises(DataError, match=r"val .* has 3 val images, too few for 4 processes: run"):
        preflight(run, config)
    preflight(run, replace(config, gpus=3))


def test_validation_split_may_lack_highest_label(run: Path, tmp_path: Path) -> None:
    """In tables with numeric labels, a split has classes up to its own highest label."""

    def write(split: str, labels: list[int]) -> None:
        rows = dataset([(jpeg(label), None, label) for label in labels], classes=())
        rows.to_parquet(tmp_path / f"{split}.parquet")

    write("train", [0, 1, 2] * 4)
    write("val", [0, 1])
    record = evaluate_knn(run, KnnConfig(data=str(tmp_path), workers=0), HERE)
    assert record.per_class["2"] is None and record.data.val == 2
    write("val", [0, 3])
    with pytest.raises(DataError, match="different classes: 3 only in validation"):
        evaluate_knn(run, KnnConfig(data=str(tmp_path), workers=0), HERE)


@pytest.mark.parametrize(
    ("train", "val", "message"),
    [
        (["a", "b", "c"], ["a", "b"], r"different classes: c only in training$"),
        (["a", "b"], ["a", *"0123"], r"b only in training; 0, 1, 2 and 1 more only in validation$"),
        ([""], [""], "images has no labels, which this evaluation needs"),
        (["a", "b"], [""], r"the validation images of .*images have no labels: sort"),
    ],
    ids=["missing class", "different classes", "no labels", "no validation labels"],
)
def test_unlabelled_and_mismatched_data_are_rejected(
    train: list[str], val: list[str], message: str, run: Path, tmp_path: Path
) -> None:
    for split, classes in (("train", train), ("val", val)):
        for name in classes:
            put(tmp_path / "images" / split / name / "0.jpg", jpeg(0))
    with pytest.raises(DataError, match=message):
        evaluate_knn(run, KnnConfig(data=str(tmp_path / "images"), workers=0), HERE)
