"""Weights of a run are exported by the command; what each method's card says: ``test_methods``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torchvision

from fastsiam.config import TrainConfig
from fastsiam.interchange import load_pretrained
from fastsiam.train.command import preflight
from tests.configs import flags, model_of
from tests.processes import fastsiam


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
    export = ["export", config.run.out, "--format", "timm", "--out", str(out)]
    assert fastsiam(*export).stdout.splitlines()[1:] == [f"wrote {out}", f"wrote {out}.md"]
    fastsiam(*export, "--force")
    assert load_pretrained(out, backbone="timm/test_efficientnet").layout == "timm"
    model = replace(config.model, backbone="vit_b_16")
    with pytest.raises(ValueError, match="vit_b_16 needs images of 224 pixels"):
        preflight(replace(config, model=model), world=1)
    less = replace(config.step, activation_memory=0.5)
    with pytest.raises(ValueError, match="needs --compile on"):
        preflight(replace(config, step=less), world=1)
    preflight(replace(config, step=replace(less, compile="on")), world=1)
