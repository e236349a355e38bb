"""Settings that make no sense are refused, and what is chosen where nobody says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastsiam.bench.config import BenchConfig
from fastsiam.bench.session import Session
from fastsiam.config.recipes import RECIPES
from fastsiam.console import Console


@pytest.mark.parametrize(
    "settings",
    [
        {"pipelines": "torchvision,ffvc"},
        {"pipelines": "dali,"},
        {"stored": "raw"},
        {"variants": "fast"},
        {"peers": "lightning"},
        {"recipe": "nothing"},
        {"backbone": "vit"},
        {"values": "1,x"},
        {"repeats": -1},
        {"batch": 1},
        {"crop": 2},
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        BenchConfig(**settings)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_batch_for_a_cpu(recipe: str, tmp_path: Path) -> None:
    session = Session(BenchConfig(recipe=recipe), "cpu", tmp_path, Console(quiet=True))
    batch = session.trained_batch
    groups = RECIPES[recipe]().numerics.bn_images or 1
    assert 2 <= batch <= 64 and batch % groups == 0
