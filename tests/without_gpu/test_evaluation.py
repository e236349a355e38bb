"""Evaluation on a fake GPU: the host waits only for the final counts."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from fastsiam.config.evaluate import FinetuneConfig, LinearConfig
from fastsiam.distributed import Place
from fastsiam.evaluate.accuracy import Accuracy
from fastsiam.evaluate.features import concat_batches, feature_batches, frozen_output
from fastsiam.evaluate.knn import nearest
from fastsiam.evaluate.supervised import SupervisedTraining
from fastsiam.methods import build_method
from fastsiam.train.metrics import gram, rank_of_gram, z_std
from fastsiam.views.batch import EvalBatch
from tests.configs import TINY

from .fake_gpu import CUDA, Gpu

PLACE, CLASSES = Place(0, 1, CUDA), 7


def batches(dtype: torch.dtype) -> list[EvalBatch]:
    images = torch.empty(8, 16, 16, 3, device=CUDA, dtype=dtype).permute(0, 3, 1, 2)
    numbers = torch.zeros(8, device=CUDA, dtype=torch.int64)
    return [EvalBatch(images, numbers, numbers)] * 3


def test_features_and_neighbours_never_synchronise(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastsiam.evaluate.knn._BLOCK", 10)
    dtype = torch.bfloat16
    backbone = build_method(TINY).backbone.to(CUDA).to(memory_format=torch.channels_last)
    eval_batches = batches(dtype)
    with gpu.watched():
        features, labels, _ = concat_batches(
            feature_batches(backbone, eval_batches, dtype=dtype, device=CUDA)
        )
        parts = feature_batches(backbone, eval_batches, dtype=dtype, device=CUDA)
        bank = ((x.to(dtype), of) for x, of, _ in parts)
        similarity, tags, seen = nearest(features, bank, most=5)
        counts = Accuracy(CLASSES, CUDA)
        counts.add(similarity, labels)
        spread, rank = z_std(features.to(dtype)), rank_of_gram(gram(features.to(dtype)))
    assert features.shape == (24, backbone.features) and features.dtype == torch.float32
    assert similarity.shape == tags.shape == (24, 5) and seen == 24
    assert (similarity.dtype, tags.dtype) == (torch.float32, torch.int64)
    assert spread.shape == rank.shape == () and spread.is_cuda and rank.is_cuda


def test_evaluation_disables_and_restores_cudnn_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, which has a single shape, keeps autotuning: each batch restores the switch."""
    seen = []

    def network(image: torch.Tensor) -> torch.Tensor:
        seen.append(torch.backends.cudnn.benchmark)
        return image.flatten(1)

    for before in (True, False):
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
        frozen_output(cast(torch.nn.Module, network), torch.zeros(2, 3, 4, 4), dtype=torch.float32)
        assert torch.backends.cudnn.benchmark == before
    assert seen == [False, False]


@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
def test_linear_training_never_synchronises(optimizer: Any, gpu: Gpu) -> None:
    """Train heads with three learning rates."""
    training = SupervisedTraining(
        LinearConfig(optimizer=optimizer, batch=8, epochs=2, lrs=(0.1, 1, 10)),
        features=12, classes=CLASSES, steps_per_epoch=3, place=PLACE,
    )  # fmt: skip
    features = torch.empty(8, 12, device=CUDA), batches(torch.float32)[0].label
    with gpu.watched():
        for step in range(3):
            losses = training.step(step, features)
    assert losses.shape == (3,) and losses.is_cuda and not gpu.on_the_host()
    assert all(p.is_cuda and p.dtype == torch.float32 for p in training.network.parameters())


def test_fine_tuning_never_synchronises(gpu: Gpu) -> None:
    """Take steps of the entire network with fp16's scaler, and compute scores."""
    dtype = torch.float16
    training = SupervisedTraining(
        FinetuneConfig(batch=8, epochs=2), build_method(TINY).backbone, features=32,
        classes=CLASSES, steps_per_epoch=3, dtype=dtype, place=PLACE,
    )  # fmt: skip
    eval_batches = batches(dtype)
    assert training.scaler.is_enabled()
    for epoch in range(2):
        with gpu.watched():
            for step, batch in enumerate(eval_batches, start=3 * epoch):
                losses = training.step(step, (batch.image, batch.label))
            scores = list(feature_batches(training.network, eval_batches, dtype=dtype, device=CUDA))
        assert losses.shape == (1,) and not gpu.on_the_host()
        assert [tuple(logits.shape) for logits, *_ in scores] == [(8, 1, CLASSES)] * 3
    for tensor in training.network.state_dict().values():
        assert tensor.is_cuda
        assert tensor.dim() < 4 or tensor.is_contiguous(memory_format=torch.channels_last)
