"""The roofline on the page is what the script counts, and a step's work is what is known of it."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from fastsiam.config.recipes import RECIPES
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def roofline() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs/scripts/roofline.py"))


def test_the_page_has_what_is_counted(roofline: dict[str, Any]) -> None:
    assert roofline["table"]() in (ROOT / "docs" / "performance.md").read_text()


def test_a_resnet_50_takes_as_many_operations_as_is_known(roofline: dict[str, Any]) -> None:
    """4.1 billion multiply-adds for one view forward; torchvision puts the stride in the 3x3."""
    total = sum(one.flops for one in roofline["layers"](RECIPES["imagenet"]()))
    assert 4.0e9 < total / 2 / 3 / 2 < 4.2e9
