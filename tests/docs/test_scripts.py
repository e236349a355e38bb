"""Pages have the tables that docs/scripts compute, whose figures match real runs and papers."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fastsiam.config import TrainConfig
from fastsiam.config.recipes import RECIPES
from fastsiam.config.train import train_settings
from tests.configs import TINY, flags, with_settings
from tests.conftest import ROOT
from tests.processes import fastsiam


@cache
def script(name: str) -> dict[str, Any]:
    """Return the names that a script defines."""
    return runpy.run_path(str(ROOT / "docs" / "scripts" / f"{name}.py"))


@pytest.mark.parametrize(
    ("page", "name", "function"),
    [
        ("results.md", "fastsiam_curves", "table"),
        ("results.md", "fastsiam_curves", "long_table"),
        ("performance.md", "roofline", "table"),
        ("benchmarks/gpu.md", "roofline", "headline"),
        ("scaling.md", "scaling", "tables"),
    ],
)
def test_page_contains_computed_tables(page: str, name: str, function: str) -> None:
    computed = script(name)[function]()
    tables = [computed] if isinstance(computed, str) else computed
    text = (ROOT / "docs" / page).read_text()
    assert tables and not [table for table in tables if table not in text]


def test_page_of_settings_is_current() -> None:
    """If not: python docs/scripts/settings.py > docs/settings-reference.md."""
    page = (ROOT / "docs" / "settings-reference.md").read_text()
    command = [sys.executable, "docs/scripts/settings.py"]  # other tests may register methods here
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert page == printed
    for name, one in train_settings().items():
        assert f"| `--{one.flag}` |" in page if one.option else f"| `{name}` |" in page


def test_resnet50_flops_match_published_value() -> None:
    """One view's forward pass is 4.1 billion multiply-adds, with the stride in the 3x3 layers."""
    total = sum(one.flops for one in script("roofline")["layers"](RECIPES["imagenet"]()))
    assert 4.0e9 < total / 2 / 3 / 2 < 4.2e9


def test_predicted_communication_matches_training_step(
    ranks: Callable[[str, int], list[Any]],
) -> None:
    """In a training step on two ranks: BN's exchanges, their bytes, and bytes of gradients."""
    counted = script("scaling")["sizes"](TINY)
    for forward, received, gradients in ranks("count_step_exchanges", 2):
        assert forward == counted.exchanges // 2 * counted.views  # uncompiled: view by view
        assert received == counted.statistics // 2
        assert gradients == counted.gradients


def test_predicted_checkpoint_size_matches_run(small: TrainConfig, tmp_path: Path) -> None:
    wide = {"width": 16, "dim": 512, "predictor_dim": 128}
    config = with_settings(small, **wide, pipeline="synthetic", max_steps=1, knn_every=0)
    fastsiam("train", *flags(config))
    size = (tmp_path / "run" / "checkpoints" / "last.pt").stat().st_size
    assert size == pytest.approx(script("scaling")["sizes"](config.model).checkpoint, rel=0.02)
