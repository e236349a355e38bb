"""The catalogue of studies: each row can be run at every scale."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from fastsiam.config import TrainConfig
from fastsiam.config.methods.swav import SwAVConfig
from fastsiam.config.recipes import RECIPES
from fastsiam.config.settings_files import merge, read_settings
from fastsiam.config.study import ScaleName
from fastsiam.study.catalogue import ORIGINAL, STUDIES, ClaimKind
from fastsiam.study.runs import runs_of
from fastsiam.study.scales import _DATA, scale


@pytest.mark.parametrize("name", get_args(ScaleName))
def test_settings_of_every_variant_are_valid(name: ScaleName, tmp_path: Path) -> None:
    """Settings are valid; at a recipe's and a small scale they also survive the settings file."""
    assert tuple(_DATA["scales"]) == get_args(ScaleName)
    size = scale(name).on("images", gpus=2, device="cpu")
    runs = runs_of(STUDIES.values(), size, tmp_path, seeds=[1])
    configs = {run.variant: run.config for run in runs}
    assert len(configs) == len(runs)
    for run in runs:
        assert run.config.numerics.seed == 1 and not run.config.run.trackers
        assert (run.config.data.data, run.config.run.gpus) == ("images", 2)
        if name in ("paper", "demo"):
            run.prepare()
            read_config = TrainConfig.from_flags(merge(read_settings(run.settings_file)).flags)
            assert read_config == run.config, run.folder.name
        steps = run.config.optim.epochs * (size.images // run.config.optim.batch)
        assert 15 <= steps // run.config.run.log_every <= 50, run.folder.name
        equal_runs = [one for one in runs if one.config == run.config]
        assert {one.folder for one in equal_runs} == {run.folder}, run.variant
    assert len({run.folder for run in runs}) == len(runs) - (4 if name == "paper" else 2)
    for study in STUDIES.values():
        row_configs = [configs[row.variant] for row in study.rows]
        trained = [(one.augment, one.model, one.optim, one.numerics) for one in row_configs]
        assert all(trained.count(one) == 1 for one in trained), study.name


def test_default_number_of_seeds() -> None:
    seeds = {name: scale(name).seeds for name in get_args(ScaleName)}
    assert seeds == {"paper": 1, "cifar": 3, "cifar-small": 3, "demo": 10}


def test_claims_refer_to_existing_rows() -> None:
    for study in STUDIES.values():
        names = [row.variant for row in study.rows]
        assert len(names) == len(set(names)) and study.reference in names
        claims = [(row, claim) for row in study.rows for claim in row.claims]
        for row, claim in claims:
            assert claim.kind in get_args(ClaimKind) and claim.than != row.variant
            compares = claim.kind in ("better", "worse", "alike", "comparable")
            assert (claim.than in (*names, ORIGINAL)) == compares, (row, claim)
            assert claim.kind != "comparable" or claim.than == ORIGINAL
            assert claim.than != ORIGINAL or isinstance(row.original, float)


def paper_settings(study: str) -> dict[str, Any]:
    """Return the settings of a study's rows at the paper's scale, by variant."""
    size = scale("paper")
    return {row.variant: size.recipe_of(row.variant) for row in STUDIES[study].rows}


def test_settings_match_paper() -> None:
    batches = paper_settings("batch").values()
    assert [one.optim.batch for one in batches] == [64, 128, 256, 512, 1024, 2048, 4096]
    assert [one.optim.warmup_epochs for one in batches] == [0, 0, 0, 0, 10, 10, 10]
    assert [one.optim.epochs for one in paper_settings("schedule").values()] == [100, 200, 400, 800]
    assert {one.optim.batch for one in paper_settings("schedule").values()} == {256}
    heads = [one.model.method for one in paper_settings("dimension").values()]
    assert [one.dim for one in heads] == [256, 512, 1024, 2048, 2048]
    assert [one.predictor_dim for one in heads] == [64, 128, 256, 512, 2048]
    assert {one.projector_dim or one.dim for one in heads} == {2048}
    assert paper_settings("batch-norm")["head-bn-none"].optim.warmup_epochs == 10
    transfer = paper_settings("transfer")["transfer"].optim
    assert (transfer.lr, transfer.weight_decay) == pytest.approx((0.5, 1e-5))
    assert {one.optim.epochs for one in paper_settings("transfer").values()} == {200}
    assert len(paper_settings("symmetry")["asymmetric-2x"].augment.views) == 4
    average = paper_settings("moving-average")["moving-average"].model.method
    assert (average.predictor, average.target_average) == ("none", 0.8)
    rates = {one.model.method.predictor_lr for one in paper_settings("stop-gradient").values()}
    assert rates == {"cosine"}


def test_related_methods_use_recipes_and_lengths_of_paper() -> None:
    longer = {1: "related", 2: "related-2x", 4: "related-4x", 8: "related-8x"}
    for times, study in longer.items():
        rows = list(paper_settings(study).values())
        names = [one.model.method.name for one in rows]
        assert names == ["simclr", "mocov2", "byol", "swav", "simsiam"]
        assert {one.optim.epochs for one in rows} == {100 * times}
        assert [one.optim.batch for one in rows] == [4096, 256, 4096, 4096, 256]
        byol = rows[2]
        base = RECIPES[{1: "byol", 2: "byol_300", 4: "byol_300", 8: "byol_1000"}[times]]()
        assert (byol.optim.lr, byol.optim.weight_decay) == (base.optim.lr, base.optim.weight_decay)
        assert byol.model == base.model


@pytest.mark.parametrize("name", ["cifar-small", "demo"])
def test_small_scale_methods_differ_only_in_heads_loss_and_rate(name: ScaleName) -> None:
    size = scale(name, epochs=4)
    for row in STUDIES["related"].rows:
        recipe, base = size.recipe_of(row.variant), size.base
        optim = replace(recipe.optim, lr=base.optim.lr)
        assert (recipe.augment, optim, recipe.monitor) == (base.augment, base.optim, base.monitor)
        assert replace(recipe.model, method=base.model.method) == base.model
    swav = size.recipe_of("swav").model.method
    assert isinstance(swav, SwAVConfig) and swav.frozen_epochs == 0.4  # a tenth of the epochs
