"""Weights of a run are exported by the command; what each method's card says: ``test_methods``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fastsiam.config import TrainConfig
from fastsiam.interchange import load_pretrained
from fastsiam.train.command import preflight
from tests.configs import flags, model_of
from tests.processes import fastsiam


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
