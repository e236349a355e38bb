"""``bench lightly``: training with lightly's modules on the same data, settings and network."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

from fastsiam.config import METHOD_CONFIGS, AugmentConfig, TrainConfig
from fastsiam.config.evaluate import KnnConfig
from fastsiam.config.methods.mocov2 import MoCoV2Config
from fastsiam.config.recipes import RECIPES
from fastsiam.errors import BackendError, DeviceError, FastSiamError
from fastsiam.evaluate.command import evaluate_knn
from fastsiam.interchange import load_pretrained
from tests.bench.sample_records import bench
from tests.configs import with_settings
from tests.conftest import import_or_skip, write_images
from tests.tiers import rest_slow
from tests.train.runs import CPU

import_or_skip("lightly", "peers", allow_module_level=True)

METHODS = ["simsiam", "mocov2", "fastsiam", "simclr", "byol", "swav"]
SMALL = {
    "simsiam": ["--loader", "fastsiam"],
    "mocov2": ["--set", "queue=32", "--no-sync-bn", "--bn-images", "4"],
    "swav": ["--set", "prototypes=20", "--set", "queue=16", "--set", "queue_from=0.5"],
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """24 training and 24 validation images of two classes."""
    for split in ("train", "val"):
        write_images(tmp_path / "data" / split, classes=2, each=12, side=40)
    return tmp_path / "data"


@pytest.mark.parametrize("method", rest_slow(METHODS))
def test_weights_of_lightly_run_are_evaluated(method: str, data: Path, tmp_path: Path) -> None:
    """The kNN monitor is that of ``train`` and agrees with ``eval knn`` on the saved weights."""
    out = tmp_path / "out"
    result = bench(
        "lightly", "--recipe", "demo", "--method", method, "--data", str(data), "--out", str(out),
        "--width", "4", "--epochs", "2", "--batch", "8", "--seed", "3", "--workers", "0",
        "--device", "cpu", "--set", "knn_k=5", *SMALL.get(method, []),
    )  # fmt: skip
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["method"] == method and summary["images"] == 24 and summary["steps"] == 6
    assert summary["loader"] == ("fastsiam" if method == "simsiam" else "lightly")
    assert min(summary[x] for x in ("seconds", "cpu_seconds", "images_per_second")) > 0
    assert [one["epoch"] for one in summary["knn"]] == [0, 2] and summary["knn"][0]["seconds"] == 0
    assert summary["knn"][1]["seconds"] == summary["seconds"] and len(summary["losses"]) == 2
    record = json.loads((out / "result.json").read_text())
    assert record["losses"] == summary["losses"] and record["recipe"] == "demo"
    assert TrainConfig.from_dict(record["config"]).model.method.name == method
    trained = load_pretrained(out / "backbone.pt")
    assert (trained.model.backbone, trained.model.width, trained.epoch) == ("resnet10", 4, 2.0)
    assert trained.input is not None and trained.input.crop == 32
    moved = trained.state["backbone.bn1.running_mean"]
    assert moved.shape == (4,) and moved.abs().max() > 0
    knn_record = evaluate_knn(out / "backbone.pt", KnnConfig(data=str(data), k=(5,)), CPU)
    assert summary["knn"][-1]["top1"] == knn_record.results[0]["top1"]


def test_missing_gpu_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastsiam.bench import lightly

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(DeviceError, match="--device cuda: torch finds no GPU"):
        lightly.train(
            with_settings(RECIPES["demo"](), device="cuda", out=str(tmp_path / "out")), "demo"
        )


def test_stopped_lightly_run_resumes(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees the same images, with the same losses and weights, momentum encoder and queue."""
    from fastsiam.bench import lightly

    demo, method = RECIPES["demo"](), MoCoV2Config(queue=32)
    config = with_settings(
        replace(demo, model=replace(demo.model, method=method)),
        data=data, width=4, epochs=3, batch=8, workers=0, device="cpu", knn_every=1, seed=2**40,
        out=tmp_path / "whole",
    )  # fmt: skip
    reference = lightly.train(config, "demo")
    config = with_settings(config, out=tmp_path / "stopped")
    real = lightly._train_epoch

    def stopped(step: Any, batches: Any, epoch: int, seed: int) -> float:
        if epoch == 2:
            raise KeyboardInterrupt
        return real(step, batches, epoch, seed)

    monkeypatch.setattr(lightly, "_train_epoch", stopped)
    with pytest.raises(KeyboardInterrupt):
        lightly.train(config, "demo")
    monkeypatch.undo()
    with pytest.raises(FastSiamError, match=r"other settings \(lr: .* -> .*\): pass another --out"):
        lightly.train(with_settings(config, lr=0.123), "demo")
    with pytest.raises(FastSiamError, match=r"other settings \(loader: lightly -> fastsiam\)"):
        lightly.train(config, "demo", loader="fastsiam")
    full = Mock(side_effect=FastSiamError("the disk is full"))
    monkeypatch.setattr(lightly, "write_json", full)
    with pytest.raises(FastSiamError, match="the disk is full"):
        lightly.train(config, "demo")
    monkeypatch.undo()
    monkeypatch.setattr(lightly, "_train_epoch", None)  # all epochs are trained
    resumed = lightly.train(config, "demo")
    assert resumed["losses"] == reference["losses"] and len(reference["losses"]) == 3
    assert [one["top1"] for one in resumed["knn"]] == [one["top1"] for one in reference["knn"]]
    states = [load_pretrained(Path(one["weights"])).state for one in (reference, resumed)]
    for name, weight in states[0].items():
        assert torch.equal(weight, states[1][name]), name
    assert {x.name for x in (tmp_path / "stopped").iterdir()} == {"backbone.pt", "result.json"}


def test_finished_lightly_run_is_not_repeated(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not replaced by a run with other settings, another loader or other images either."""
    from fastsiam.bench import lightly

    config = with_settings(
        RECIPES["demo"](), data=data, width=4, epochs=1, batch=8, workers=0, device="cpu",
        knn_every=0, out=tmp_path / "out",
    )  # fmt: skip
    result = lightly.train(config, "demo")
    record = (tmp_path / "out" / "result.json").read_bytes()
    monkeypatch.setattr(lightly, "_train_epochs", None)
    assert lightly.train(config, "demo") == result
    assert "is already trained" in capsys.readouterr().err
    for changes, loader, line in (
        ({"lr": 0.123}, "lightly", "lr: .* -> 0.123"),
        ({}, "fastsiam", "loader: lightly -> fastsiam"),
        ({"data": data / "val"}, "lightly", "data: .*data -> .*val"),
    ):
        with pytest.raises(FastSiamError, match=rf"other settings \({line}\): pass another --out"):
            lightly.train(with_settings(config, **changes), "demo", loader=loader)
    assert (tmp_path / "out" / "result.json").read_bytes() == record


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("simsiam", {"stop_gradient": False}, "lightly's simsiam supports only stop-gradient True"),
    ("simclr", {"predictor": "trained"}, "lightly's simclr supports only predictor none"),
    ("mocov2", {"symmetric": False}, "lightly's mocov2 supports only symmetric True"),
    ("byol", {"projector_layers": 1}, "at least 2 layers"),
    ("simclr", {"bn_images": 4, "sync_bn": False}, "bn-images works only with lightly's mocov2"),
    ("byol", {"optimizer": "lars"}, "lightly's loop supports only optimizer sgd"),
    ("byol", {"accumulate": 2}, "lightly's loop supports only accumulate 1"),
    ("simsiam", {"max_steps": 10}, "lightly's loop supports only max-steps 0"),
    ("simsiam", {"resume": "never"}, "lightly's loop supports only resume auto"),
    ("simsiam", {"extend": 9}, "lightly's loop supports only extend 0"),
    ("simsiam", {"gpus": 2}, "lightly's loop supports only gpus 1"),
    ("simsiam", {"nodes": 2, "rendezvous": "a:1"}, "lightly's loop supports only nodes 1"),
]


@pytest.mark.parametrize(("method", "changes", "line"), UNSUPPORTED, ids=str)
def test_settings_lightly_lacks_are_rejected(
    method: str, changes: dict[str, Any], line: str
) -> None:
    """Otherwise the record would have settings that the run did not use."""
    from fastsiam.bench.lightly_methods import compose

    demo = RECIPES["demo"]()
    config = replace(demo, model=replace(demo.model, width=4, method=METHOD_CONFIGS[method]()))
    with pytest.raises(BackendError, match=line):
        compose(with_settings(config, **changes), steps_per_epoch=3)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"weights": (0.7, 0.3)}, "weights none"),
        ({"shuffle": "window:8"}, "shuffle full"),
        ({"bad_images": "replace"}, "bad-images stop"),
    ],
    ids=str,
)
def test_settings_lightly_loader_lacks_are_rejected(
    changes: dict[str, Any], line: str, data: Path, tmp_path: Path
) -> None:
    from fastsiam.bench import lightly

    config = with_settings(
        RECIPES["demo"](), data=data, mixed_with=(str(data / "val"),), batch=8, device="cpu",
        out=tmp_path / "out", **changes,
    )  # fmt: skip
    with pytest.raises(BackendError, match=f"lightly's loader supports only {line}"):
        lightly.train(config, "demo")


def test_lightly_step_uses_process_settings_of_training_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fastsiam.bench import lightly_methods

    use_numerics = Mock()
    monkeypatch.setattr(lightly_methods, "use_numerics", use_numerics)
    config = with_settings(RECIPES["demo"](), width=4)
    lightly_methods.Step(config, 3, CPU.device)
    use_numerics.assert_called_once_with(config, CPU.device)


@pytest.mark.parametrize("method", METHODS)
def test_lightly_transform_follows_settings(method: str) -> None:
    """Without augmentation, views equal the normalised image; every setting changes them."""
    from fastsiam.bench.lightly_methods import transform_of

    plain: dict[str, Any] = {
        "crop": 20, "scale_min": 1.0, "flip_p": 0.0, "jitter_p": 0.0, "gray_p": 0.0, "blur_p": 0.0,
    }  # fmt: skip
    augment = AugmentConfig.alike(2, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), **plain)
    pixels = torch.randint(0, 256, (20, 20, 3), dtype=torch.uint8)
    image = Image.fromarray(pixels.numpy())
    mean, std = (torch.tensor(x)[:, None, None] for x in (augment.mean, augment.std))
    expected = (pixels.permute(2, 0, 1) / 255 - mean) / std
    views = transform_of(method, augment)(image)
    assert len(views) == 2
    for view in views:
        torch.testing.assert_close(view, expected)
    for change in ({"flip_p": 1.0}, {"jitter_p": 1.0}, {"gray_p": 1.0}, {"blur_p": 1.0}):
        (first, second) = transform_of(method, augment.changed(**change))(image)
        assert not torch.allclose(first, expected) and not torch.allclose(second, expected)
    same_crop = replace(augment, views=(augment.views[0], replace(augment.views[0], crop_of=0)))
    with pytest.raises(BackendError, match=f"transform for {method} supports only crop-of -1"):
        transform_of(method, same_crop)
    if method != "byol":
        with pytest.raises(BackendError, match=f"for {method} supports only solarise-p 0.0"):
            transform_of(method, augment.changed(solarise_p=0.2))
