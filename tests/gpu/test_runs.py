"""Complete runs on a GPU: training, resuming and evaluation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fastsiam.config import TrainConfig
from fastsiam.config.evaluate import FinetuneConfig, KnnConfig, LinearConfig
from fastsiam.distributed import Place
from fastsiam.evaluate.command import evaluate_finetuned, evaluate_knn, evaluate_linear
from fastsiam.run.log import read_metrics
from fastsiam.train.command import train_here
from tests.configs import with_settings

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_training_runs_and_resumes(
    precision: str, gpu: TrainConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    config = with_settings(gpu, precision=precision)
    train_here(with_settings(config, max_steps=5), "imagenet")
    run = train_here(config, "imagenet")
    steps = [line["step"] for line in read_metrics(run) if line["kind"] == "train"]
    assert steps == list(range(1, 13))
    assert "resuming after step 5" in capfd.readouterr().err


@pytest.mark.parametrize("pipeline", ["torchvision", pytest.param("dali", marks=pytest.mark.dali)])
def test_cuda_graphs_work_with_active_loader(
    pipeline: str, gpu: TrainConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    """Threads of workers and DALI could break a graph capture; the monitor also loads images."""
    config = with_settings(
        gpu, pipeline=pipeline, workers=1, compile="on", cuda_graphs=True, epochs=20, knn_every=5
    )
    lines = read_metrics(train_here(config, "imagenet"))
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 61))
    assert [line["epoch"] for line in lines if line["kind"] == "knn"] == [0, 5, 10, 15, 20]
    assert "torch.compile does not work" not in capfd.readouterr().err


@pytest.mark.parametrize("pipeline", ["torchvision", pytest.param("dali", marks=pytest.mark.dali)])
def test_knn_and_linear_match_cpu_and_finetuning_learns(pipeline: Any, gpu: TrainConfig) -> None:
    """kNN, linear evaluation and fine-tuning in float32. DALI's crops differ by about a level."""
    run = train_here(with_settings(gpu, max_steps=3, precision="fp32", tf32=False), "imagenet")
    places = [Place(0, 1, torch.device(device)) for device in ("cuda", "cpu")]
    shared: Any = {"workers": 0, "pipeline": pipeline, "precision": "fp32"}
    torch.backends.cudnn.allow_tf32 = False
    few = {"epochs": 3, "batch": 8, **shared}
    cases: list[tuple[Any, Any]] = [
        (evaluate_knn, KnnConfig(k=(1, 5), **shared)),
        (evaluate_linear, LinearConfig(lrs=(0.1, 10), cached=True, **few)),
        (evaluate_linear, LinearConfig(lrs=(0.1, 10), **few)),
    ]
    for evaluate, config in cases:
        there, here = (evaluate(run, config, place) for place in places)
        for one, other in zip(there.results, here.results, strict=True):
            assert one["top1"] == pytest.approx(other["top1"], abs=17)  # two of twelve images
        assert there.network.fingerprint == here.network.fingerprint
    for precision in ("fp32", "fp16"):  # with fp16 the scaler's first step is usually skipped
        finetune = FinetuneConfig(**few | {"precision": precision, "scale_min": 0.5, "lr": 3.0})
        record = evaluate_finetuned(run, replace(finetune, epochs=60), places[0])
        assert record.images_validated == 12 and record.best["top1"] > 60  # chance is 33
