"""The docs have the roofline that the script computes, and its FLOPs agree with known figures."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from fastsiam.config.recipes import RECIPES
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def roofline() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs/scripts/roofline.py"))


def test_pages_contain_roofline_tables(roofline: dict[str, Any]) -> None:
    assert roofline["table"]() in (ROOT / "docs" / "performance.md").read_text()
    assert roofline["headline"]() in (ROOT / "docs" / "benchmarks" / "gpu.md").read_text()


def test_resnet50_flops_match_published_value(roofline: dict[str, Any]) -> None:
    """One view's forward pass is 4.1 billion multiply-adds, with the stride in the 3x3 layers."""
    total = sum(one.flops for one in roofline["layers"](RECIPES["imagenet"]()))
    assert 4.0e9 < total / 2 / 3 / 2 < 4.2e9
