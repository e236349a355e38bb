"""Settings of methods: which values can be combined, and warnings."""

from __future__ import annotations

from typing import Any

import pytest

from fastsiam.config import SimSiamConfig
from fastsiam.config.methods.fastsiam import FastSiamConfig
from fastsiam.config.methods.mocov2 import MoCoV2Config
from fastsiam.config.methods.swav import SwAVConfig
from fastsiam.config.recipes import RECIPES


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alternate_every": 0, "stop_gradient": False}, "need stop-gradient"),
        ({"target_average": 0.8, "stop_gradient": False}, "need stop-gradient"),
        ({"encoder_momentum": 0.9, "alternate_every": 2}, "choose one of alternate-every and"),
        ({"target_average": 0.8, "similarity": "cross-entropy"}, "needs similarity cosine"),
        ({"output_affine": True, "head_bn": "hidden"}, "head-bn default or all, not hidden"),
    ],
)
def test_incompatible_settings_are_one_line_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        FastSiamConfig(**settings)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_wrong_number_of_views_is_rejected() -> None:
    asymmetric = SimSiamConfig(symmetric=False)
    for settings, count in ((SimSiamConfig(), 2), (asymmetric, 4), (FastSiamConfig(), 3)):
        settings.check_views(count)
    for settings, count in ((SimSiamConfig(), 4), (asymmetric, 3)):
        with pytest.raises(ValueError, match=f"not {count}"):
            settings.check_views(count)


def test_unsuitable_batches_cause_warnings() -> None:
    usual = {"images": 50_000, "batch": 256, "groups": 8}
    moco, swav = MoCoV2Config(), SwAVConfig(prototypes=256)
    assert (
        moco.batch_warnings(**usual)
        == swav.batch_warnings(**usual)
        == SimSiamConfig().batch_warnings(**usual)
        == []
    )
    assert "lets MoCo cheat" in moco.batch_warnings(**usual | {"groups": 1})[0]
    assert moco.batch_warnings(**usual | {"images": 32_769}) == []
    assert "65,536 keys" in moco.batch_warnings(**usual | {"images": 32_768})[0]
    assert "255 images cannot" in swav.batch_warnings(**usual | {"batch": 255})[0]
    assert SwAVConfig(prototypes=512, queue=256).batch_warnings(**usual) == []
    for recipe, build in RECIPES.items():
        config, images = build(), 50_000 if recipe.endswith("cifar10") else 1_281_167
        batch = config.optim.batch
        groups = batch // (config.numerics.bn_images or batch)
        assert config.model.method.batch_warnings(images=images, batch=batch, groups=groups) == []
