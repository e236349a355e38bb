"""Settings of what is trained: which values make sense together, and how they are described."""

from __future__ import annotations

from typing import Any

import pytest

from fastsiam.config import (
    FastSiamConfig,
    MoCoV2Config,
    SimSiamConfig,
    SwAVConfig,
    TrainConfig,
)
from fastsiam.config.flags import from_flags, to_flags
from fastsiam.config.recipes import RECIPES


@pytest.mark.parametrize("method", [SimSiamConfig, FastSiamConfig])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"predictor": "random"}, "predictor must be trained, fixed or none, not 'random'"),
        ({"head_bn": "output"}, "head-bn must be none, hidden, default or all, not 'output'"),
        ({"similarity": "l2"}, "similarity must be cosine or cross-entropy, not 'l2'"),
        ({"alternate_every": -1}, "alternate-every must be at least 0, not -1"),
        ({"target_average": 1.0}, "target-average must be at least 0 and below 1, not 1.0"),
        ({"target_average": -0.1}, "target-average must be at least 0 and below 1, not -0.1"),
        (
            {"target_average": float("nan")},
            "target-average must be at least 0 and below 1, not nan",
        ),
        ({"alternate_every": 2, "stop_gradient": False}, "leave --no-stop-gradient out"),
        ({"alternate_every": 0, "stop_gradient": False}, "leave --no-stop-gradient out"),
        ({"target_average": 0.8, "stop_gradient": False}, "leave --no-stop-gradient out"),
        ({"target_average": 0.8, "similarity": "cross-entropy"}, "leave --similarity cross-"),
        ({"output_affine": True, "head_bn": "hidden"}, "that head-bn hidden leaves out"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    settings: dict[str, Any], message: str, method: type[SimSiamConfig]
) -> None:
    with pytest.raises(ValueError) as refused:
        method(**settings)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "views"),
    [
        (SimSiamConfig(), [2]),
        (SimSiamConfig(symmetric=False), [2, 4, 6]),
        (FastSiamConfig(), [2, 3, 4, 5, 6]),
        (FastSiamConfig(symmetric=False), [2, 3, 4, 5, 6]),
    ],
    ids=["simsiam", "asymmetric", "fastsiam", "fastsiam asymmetric"],
)
def test_how_many_views_it_takes(settings: SimSiamConfig, views: list[int]) -> None:
    taken = []
    for count in range(2, 7):
        try:
            settings.check_views(count)
            taken.append(count)
        except ValueError as refused:
            assert f"not {count}" in str(refused)
    assert taken == views


def test_views_are_checked_with_the_other_settings() -> None:
    flags = to_flags(TrainConfig())
    with pytest.raises(ValueError, match="without symmetry views are compared in pairs, not 3"):
        from_flags(flags | {"views": 3, "symmetric": False})
    for others in ({"method": "fastsiam"}, {"symmetric": False}):
        assert len(from_flags(flags | {"views": 4} | others).augment.views) == 4


def test_the_default_is_described_without_the_study() -> None:
    assert SimSiamConfig().described() == {
        "projector": "3 layers, 2048 wide, to 2048",
        "predictor": "2048-512-2048, constant learning rate",
        "stop-gradient": "yes",
    }


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"predictor": "none"}, {"predictor": "none"}),
        ({"predictor": "fixed"}, {"predictor": "2048-512-2048, not trained"}),
        ({"predictor_lr": "cosine"}, {"predictor": "2048-512-2048, cosine learning rate"}),
        ({"stop_gradient": False}, {"stop-gradient": "no"}),
        ({"head_bn": "hidden"}, {"head bn": "hidden"}),
        ({"output_affine": True}, {"output affine": "yes"}),
        ({"similarity": "cross-entropy"}, {"similarity": "cross-entropy"}),
        ({"symmetric": False}, {"symmetric": "no"}),
        ({"alternate_every": 10}, {"targets": "of the encoder before each 10 steps"}),
        ({"alternate_every": 0}, {"targets": "of the encoder before each epoch"}),
        (
            {"target_average": 0.8, "alternate_every": 10},
            {
                "targets": "of the encoder before each 10 steps",
                "average": "of each image's targets, momentum 0.8",
            },
        ),
    ],
)
@pytest.mark.parametrize("method", [SimSiamConfig, FastSiamConfig])
def test_what_is_unusual_is_described(
    settings: dict[str, Any], said: dict[str, str], method: type[SimSiamConfig]
) -> None:
    assert method(**settings).described() == method().described() | said


def test_what_hardly_works_is_doubted() -> None:
    usual = {"images": 50_000, "batch": 256, "groups": 8}
    moco, swav = MoCoV2Config(), SwAVConfig(prototypes=256)
    assert moco.doubts(**usual) == swav.doubts(**usual) == SimSiamConfig().doubts(**usual) == []
    assert "learns to cheat" in moco.doubts(**usual | {"groups": 1})[0]
    assert moco.doubts(**usual | {"images": 32_769}) == []
    assert "65,536 keys" in moco.doubts(**usual | {"images": 32_768})[0]
    assert MoCoV2Config(symmetric=False).doubts(**usual) != []
    assert "255 images cannot" in swav.doubts(**usual | {"batch": 255})[0]
    assert SwAVConfig(prototypes=512, queue=256).doubts(**usual) == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_are_beyond_doubt(recipe: str) -> None:
    """On the images that they are meant for, on one rank or eight."""
    config = RECIPES[recipe]()
    images = 50_000 if recipe.endswith("cifar10") else 1_281_167
    batch, numerics = config.optim.batch, config.numerics
    groups = batch // (numerics.bn_images or batch)
    assert config.model.method.doubts(images=images, batch=batch, groups=groups) == []
