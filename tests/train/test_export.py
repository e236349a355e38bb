"""Weights of a run out and in: a run is trained, exported, and trained on from."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import load_file
from torch import nn
from torchvision.models import resnet

from fastsiam import __version__
from fastsiam.config import TrainConfig
from fastsiam.config.evaluate import KnnConfig, LinearConfig
from fastsiam.console import rounded
from fastsiam.environment import commit
from fastsiam.evaluate.command import evaluate_knn, evaluate_linear
from fastsiam.interchange import load_pretrained
from fastsiam.methods import build_method
from fastsiam.run import checkpoint as checkpoints
from fastsiam.train.command import preflight
from tests.configs import changed_model, flags, model_of
from tests.interchange.networks import X, same
from tests.processes import fastsiam
from tests.train.runs import CPU


def test_export_end_to_end(small: TrainConfig, tmp_path: Path) -> None:
    """A run is trained, exported with what is known of it, and its file converted once more."""
    model = changed_model(small.model, width=64, stem="imagenet", dim=512, projector_layers=3)
    config = replace(
        small,
        augment=small.augment.changed(crop=32),
        model=replace(model, backbone="resnet18"),
        optim=replace(small.optim, epochs=1),
        monitor=replace(small.monitor, knn_every=1, eval_resize=32),
    )
    fastsiam("train", *flags(config))
    run = Path(config.run.out)
    quick = LinearConfig(cached=True, lrs=(0.1, 3), workers=0, batch=8, epochs=1)
    linear = evaluate_linear(run, quick, CPU)
    evaluate_knn(run, KnnConfig(workers=0, untrained=True, k=(3,)), CPU)  # of other weights
    out = tmp_path / "r18.safetensors"
    done = fastsiam("export", str(run), "--format", "timm", "--out", str(out))
    assert done.stdout.splitlines()[1:] == [f"wrote {out}", f"wrote {out}.md"]
    card = (tmp_path / "r18.safetensors.md").read_text()
    assert str(tmp_path) not in card
    for text in (
        "# ResNet-18, pre-trained with SimSiam",
        "| data | data, 24 images |",
        "of a run of fastsiam, 1 epoch, from last.pt, in the layout of timm.",
        "2020; no labels were used.",
        "| recipe | imagenet |",
        "| epochs | 1 of 1 |",
        f"Trained by fastsiam {__version__}, commit {commit()}, torch {torch.__version__}. Written",
        "kNN top-1 ",
        "**linear** (batch 8, momentum 0.9, weight_decay 0, schedule cosine per step, seed 0, "
        "optimizer lars, lars_trust 0.001, rates [0.1, 3.0], epochs 1, cached True, storage fp32)",
        f"| 0.1 | {rounded(linear.results[0]['top1'])} | 100 |",
        "views of 32 x 32 pixels",
        'timm.create_model("resnet18", num_classes=0)',
    ):
        assert text in card, text
    read = load_pretrained(out)
    network = resnet.resnet18()
    network.fc = nn.Identity()
    network.load_state_dict(load_file(out))
    method = build_method(config.model)
    method.load_state_dict(checkpoints.load(run).model)
    same(network.eval()(X), method.backbone.eval()(X))
    assert torch.equal(read.network()(X), network(X))
    converted = str(tmp_path / "converted.pkl")
    fastsiam("export", str(out), "--format", "detectron2", "--out", converted)
    bad = fastsiam("export", str(run), "--format", "timm", "--out", str(out), code=1)
    assert bad.stderr == f"error: {out} is there already: choose another, or give --force\n"
    fastsiam("export", str(run), "--format", "timm", "--out", str(out), "--force")
    card = (tmp_path / "converted.pkl.md").read_text()
    assert card.startswith("# ResNet-18, converted by fastsiam\n") and "SimSiam" not in card
    assert "stem.conv1.weight" in pickle.loads(Path(converted).read_bytes())["model"]


def test_wrong_usage_is_told(tmp_path: Path) -> None:
    bad = fastsiam("export", str(tmp_path), "--format", "timm", "--out", "x.pth", code=1)
    assert "is not a run folder" in bad.stderr and bad.stderr.count("\n") == 1
    torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "w.pth")
    path = str(tmp_path / "w.pth")
    bad = fastsiam("export", path, "--format", "timm", "--out", "x.onnx", code=2)
    assert "a file of format timm ends in" in bad.stderr
    said = "--format", "timm", "--out", str(tmp_path / "x.pth"), "--stem", "cifar-pad3"
    assert "stem must be one of imagenet, cifar" in fastsiam("export", path, *said, code=2).stderr
    assert not (tmp_path / "x.pth").exists()


def test_a_foreign_backbone_is_trained_and_exported(small: TrainConfig, tmp_path: Path) -> None:
    pytest.importorskip("timm")
    config = replace(
        small,
        augment=small.augment.changed(crop=32),
        model=model_of(backbone="timm/test_efficientnet", dim=16, predictor_dim=4),
        optim=replace(small.optim, epochs=1),
        monitor=replace(small.monitor, eval_resize=32),
    )
    fastsiam("train", *flags(config))
    out = tmp_path / "w.pth"
    fastsiam("export", config.run.out, "--format", "timm", "--out", str(out))
    assert load_pretrained(out, backbone="timm/test_efficientnet").layout == "timm"
    model = replace(config.model, backbone="vit_b_16")
    with pytest.raises(ValueError, match="vit_b_16 needs images of 224 pixels"):
        preflight(replace(config, model=model), world=1)
    less = replace(config.step, activation_memory=0.5)
    with pytest.raises(ValueError, match="needs --compile on"):
        preflight(replace(config, step=less), world=1)
    preflight(replace(config, step=replace(less, compile="on")), world=1)
