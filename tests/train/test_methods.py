"""A run of each method: its evaluation, export and model card, and initialisation from weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastsiam import __version__
from fastsiam.config import METHOD_CONFIGS, TrainConfig
from fastsiam.config.evaluate import FeaturesConfig, FinetuneConfig, KnnConfig, LinearConfig
from fastsiam.console import format_number
from fastsiam.environment import commit
from fastsiam.evaluate.command import evaluate_finetuned, evaluate_knn, evaluate_linear
from fastsiam.evaluate.feature_files import write_features
from fastsiam.interchange import load_pretrained
from fastsiam.train.command import preflight
from fastsiam.train.start import initial_weights
from tests.configs import flags, with_settings
from tests.conftest import import_or_skip, small_config, write_data
from tests.methods.variants import ALL_CASES
from tests.processes import fastsiam
from tests.tiers import rest_slow
from tests.train.runs import CPU, train_run

METHODS = ["byol", "mocov2", "swav, queue", "simclr", "default", "fastsiam 3"]
"""One variant of each method."""


def make_run_config(name: str, small: TrainConfig, **settings: Any) -> TrainConfig:
    return ALL_CASES[name].applied(small, max_steps=3, knn_every=0, **settings)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Train a run of a method once and return its folder."""
    folder = tmp_path_factory.mktemp("methods")
    data = write_data(folder / "data")
    return cache(
        lambda method: train_run(make_run_config(method, small_config(data, folder / method)))
    )


@pytest.mark.parametrize("method", rest_slow(METHODS))
def test_run_of_every_method_is_evaluated_and_exported(
    method: str, run_of: Callable[[str], Path], tmp_path: Path
) -> None:
    assert {ALL_CASES[name].method.name for name in METHODS} == set(METHOD_CONFIGS)
    run = run_of(method)
    knn = evaluate_knn(run, KnnConfig(workers=0, k=(3,)), CPU)
    heads = LinearConfig(cached=True, lrs=(0.1, 3), workers=0, batch=8, epochs=1)
    linear = evaluate_linear(run, heads, CPU)
    tuned = evaluate_finetuned(run, FinetuneConfig(workers=0, epochs=1, batch=8), CPU)
    assert all(0 <= record.results[0]["top1"] <= 100 for record in (knn, linear, tuned))
    out = tmp_path / "z.npy"
    write_features(run, FeaturesConfig(out=str(out), layer="projector", workers=0), CPU)
    assert np.load(out).shape == (24, 16)
    pretrained = load_pretrained(run)
    fastsiam("export", str(run), "--format", "plain", "--out", str(tmp_path / "w.pth"))
    card = (tmp_path / "w.pth.md").read_text()
    assert pretrained.config is not None
    settings = pretrained.config.model.method
    assert card.startswith(f"# ResNet-10, pre-trained with {settings.title}")
    assert settings.paper in card
    for name, value in settings.to_flags().items():
        text = {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
        text = text.removesuffix(".0")
        assert f"| {name.replace('_', ' ')} | {text} |" in card
    source = f", commit {commit()}" if commit() else ""  # none outside a git repository
    for text in (
        "| data | data, 24 images |",
        "| recipe | imagenet |",
        "| epochs | 1 of 4 |",
        f"Trained by fastsiam {__version__}{source}, torch {torch.__version__}. Written",
        "**linear** (24 images for training, 12 for validation, from data, batch 8, momentum 0.9, "
        "weight_decay 0, schedule cosine per step, seed 0, optimizer lars, "
        "lars_trust 0.001, rates [0.1, 3.0], epochs 1, cached yes, storage fp32)",
        f"| 0.1 | {format_number(linear.results[0]['top1'])} | 100 |",
    ):
        assert text in card, text
    assert str(run.parent) not in card and str(tmp_path) not in card
    again = load_pretrained(tmp_path / "w.pth")
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(again.network()(images), pretrained.network()(images))


def test_moco_warns_if_all_images_share_bn_statistics(
    small: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """MoCo warns if all images share BN statistics; not with two groups, or without BN."""
    half = small.optim.batch // 2
    without_bn = {"backbone": "convnext_tiny", "stem": "imagenet", "width": 64, "crop": 32}
    for settings, warns in (
        ({"sync_bn": False}, True),
        ({"sync_bn": False, "bn_images": half}, False),
        ({**without_bn, "eval_resize": 32}, False),
    ):
        config = with_settings(make_run_config("mocov2", small, **settings), max_steps=1)
        train_run(config, out=tmp_path / str(len(settings)))
        assert ("lets MoCo cheat" in capsys.readouterr().err) == warns


@pytest.mark.parametrize("method", rest_slow(METHODS, fast=2))
def test_init_loads_matching_parts_of_method(
    method: str, run_of: Callable[[str], Path], small: TrainConfig,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The same method loads all parts, others the backbone. The momentum encoder is a copy."""
    zero: dict[str, Any] = {"lr": 1e-30, "weight_decay": 0.0, "init": str(run_of(method))}
    state = load_pretrained(run_of(method)).state
    capsys.readouterr()
    again = load_pretrained(train_run(make_run_config(method, small, **zero))).state
    assert "randomly initialised: " not in capsys.readouterr().err
    target = {key for key in again if key.startswith("target.")}
    assert bool(target) == (method in ("byol", "mocov2"))
    for key, value in again.items():
        if "running" in key or "num_batches" in key or key in ("queue", "pushed"):
            continue
        new = {"target.0": "backbone", "target.1": "projector"}
        source = new[key[:8]] + key[8:] if key in target else key
        torch.testing.assert_close(value, state[source], msg=key)
    other = "mocov2" if method != "mocov2" else "byol"
    assert initial_weights(make_run_config(other, small, **zero))[1] == ("backbone",)


def test_timm_backbone_is_trained_and_exported(small: TrainConfig, tmp_path: Path) -> None:
    import_or_skip("timm")
    network = {"backbone": "timm/test_efficientnet", "stem": "imagenet", "width": 64}
    config = with_settings(small, **network, crop=32, eval_resize=32, epochs=1)
    fastsiam("train", *flags(config))
    out = tmp_path / "w.pth"
    export = ["export", config.run.out, "--format", "timm", "--out", str(out)]
    assert fastsiam(*export).stdout.splitlines()[1:] == [f"wrote {out}", f"wrote {out}.md"]
    fastsiam(*export, "--force")
    assert load_pretrained(out, backbone="timm/test_efficientnet").layout == "timm"
    with pytest.raises(ValueError, match="vit_b_16 needs images of 224 pixels"):
        preflight(with_settings(config, backbone="vit_b_16"), world=1)
    less = with_settings(config, activation_memory=0.5)
    with pytest.raises(ValueError, match="needs --compile on"):
        preflight(less, world=1)
    preflight(with_settings(less, compile="on"), world=1)
