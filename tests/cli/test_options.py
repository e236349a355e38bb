"""Options: every one from the config and only there, with the defaults of recipe and method."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fastsiam.cli.options import with_options
from fastsiam.config import (
    AugmentConfig,
    OptimConfig,
    SimSiamConfig,
    TrainConfig,
)
from fastsiam.config.flags import train_settings
from fastsiam.config.recipes import RECIPES
from tests.configs import flags
from tests.methods import everything
from tests.processes import fastsiam


def parse(*arguments: str) -> tuple[str, TrainConfig]:
    """Give arguments to a command made by ``with_options``; return what it got."""
    got: list[tuple[str, TrainConfig]] = []
    app = typer.Typer()
    app.command()(with_options(lambda recipe, config: got.append((recipe, config))))
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return got[0]


def test_every_flag_is_an_option_with_its_help() -> None:
    text = re.sub(r"[│╭╮╰╯─\s]+", "", fastsiam("train", "--help-all").stdout)
    for flag in train_settings().values():
        if not flag.option:
            continue
        assert f"--{flag.name.replace('_', '-')}" in text
        assert flag.help.endswith(".") and "\n" not in flag.help
        assert flag.help.replace(" ", "")[:40] in text, flag.name


@pytest.mark.parametrize("name", RECIPES)
def test_every_field_makes_the_round_trip(name: str) -> None:
    expected = RECIPES[name]()
    assert parse("--recipe", name) == (name, expected)
    assert parse(*flags(expected, recipe="imagenet")) == ("imagenet", expected)


def test_flag_beats_recipe_beats_default_in_any_order() -> None:
    assert parse()[1] == RECIPES["imagenet"]()
    for arguments in (
        ["--recipe", "cifar10", "--lr", "0.5"],
        ["--lr", "0.5", "--recipe", "cifar10"],
    ):
        expected = replace(RECIPES["cifar10"](), optim=replace(RECIPES["cifar10"]().optim, lr=0.5))
        assert parse(*arguments) == ("cifar10", expected)
    assert (
        parse("--recipe", "cifar10")[1] == RECIPES["cifar10"]()
    )  # nothing leaked from the call before


def test_recipes_are_the_papers() -> None:
    paper = RECIPES["imagenet"]()
    assert paper.optim == OptimConfig(
        epochs=100, batch=512, lr=0.05, momentum=0.9, weight_decay=1e-4
    )
    assert paper.model.backbone == "resnet50"
    assert paper.model.method == SimSiamConfig(projector_layers=3, dim=2048, predictor_dim=512)
    assert paper.augment == AugmentConfig.alike(
        crop=224, scale_min=0.2, jitter_p=0.8, gray_p=0.2, blur_p=0.5
    )
    small = RECIPES["cifar10"]()
    assert (small.optim.epochs, small.optim.batch, small.optim.lr, small.optim.weight_decay) == (
        800,
        512,
        0.03,
        5e-4,
    )
    assert (small.model.backbone, small.model.stem) == ("resnet18", "cifar")
    assert small.model.method == SimSiamConfig(projector_layers=2)
    assert [(view.blur_p, view.crop) for view in small.augment.views] == [(0, 32), (0, 32)]
    for config in (paper, small):
        assert (config.monitor.knn_k, config.monitor.knn_temperature) == (200, 0.2)
        assert isinstance(config.model.method, SimSiamConfig)
        assert config.model.method.predictor_lr == "constant" and config.optim.warmup_epochs == 0


def test_help_shows_the_recipes_defaults() -> None:
    def default(text: str, option: str) -> str:
        body = re.sub(r"[│\s]+", " ", text)
        return re.search(rf"--{option} .*?\[default: ([^\];]+)[\];]", body).group(1)  # type: ignore[union-attr]

    plain, small = (
        fastsiam("train", "--help").stdout,
        fastsiam("train", "--recipe", "cifar10", "--help").stdout,
    )
    assert (default(plain, "epochs"), default(small, "epochs")) == ("100", "800")
    assert (default(plain, "backbone"), default(small, "backbone")) == ("resnet50", "resnet18")


def test_config_survives_json() -> None:
    for recipe in RECIPES.values():
        config: Any = json.loads(json.dumps(recipe().to_dict()))
        assert TrainConfig.from_dict(config) == recipe()
    with pytest.raises(ValueError, match=r"unknown setting optim\.speed"):
        TrainConfig.from_dict({"optim": {"speed": 9}})


def refused(*arguments: str) -> str:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(with_options(lambda recipe, config: None))
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2
    return " ".join(result.output.split())


def test_a_method_brings_its_own_options_and_defaults() -> None:
    """In whatever order; ``dim`` is a setting of both methods, with a default in each."""
    with everything.registered():
        chosen = ["--method", "everything", "--views", "3"]
        for arguments in ([*chosen, "--recipe", "cifar10"], ["--recipe", "cifar10", *chosen]):
            recipe, config = parse(*arguments, "--queue", "30")
            assert recipe == "cifar10" and config.model.backbone == "resnet18"
            assert config.model.method == everything.EverythingConfig(queue=30)
        assert parse(*chosen, "--dim", "9")[1].model.method == everything.EverythingConfig(dim=9)
        assert isinstance(parse("--dim", "9")[1].model.method, SimSiamConfig)
        said = refused(*chosen, "--predictor-dim", "4")
        assert "predictor-dim is no setting of everything" in said
        assert "queue is no setting of simsiam" in refused("--queue", "30")
        assert "three views, not 2" in refused("--method", "everything")
    assert "unknown method 'everything'; there are simsiam" in refused("--method", "everything")


def test_a_setting_of_the_views_is_for_all_or_for_each() -> None:
    views = parse("--crop", "96", "--blur-p", "1,0.1")[1].augment.views
    assert [(view.crop, view.blur_p) for view in views] == [(96, 1.0), (96, 0.1)]
    assert "crop has 3 values for 2 views" in refused("--crop", "96,64,32")
