"""The roofline on the page is what the script counts, and a step's work is what is known of it."""

from __future__ import annotations

import runpy
from dataclasses import replace
from typing import Any

import pytest

from fastsiam.config.recipes import RECIPES
from tests.configs import changed_model
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def roofline() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs/scripts/roofline.py"))


def test_the_page_has_what_is_counted(roofline: dict[str, Any]) -> None:
    assert roofline["table"]() in (ROOT / "docs" / "performance.md").read_text()


def test_work_is_counted_by_hand(roofline: dict[str, Any]) -> None:
    """A narrow network and images of 8 pixels: the stem and the heads, number by number."""
    config = RECIPES["demo"]()
    config = replace(
        config,
        augment=config.augment.changed(crop=8),
        model=replace(changed_model(config.model, dim=6, predictor_dim=2), width=4),
    )
    counted = roofline["layers"](config)
    image, stem = 3 * 8 * 8, 4 * 8 * 8
    assert counted[0].flops == 2 * 2 * (2 * 27 * stem)  # both views; no gradient of the images
    assert counted[0].elements == 2 * (2 * image + 2 * stem)
    assert counted[0].fewest == 2 * (2 * image + 3 * stem)
    assert counted[1] == (0, 2 * 8 * stem, 0)  # BN: 3 passes forward, 5 backward
    assert counted[-1] == (2 * 3 * 2 * 2 * 6, 2 * 3 * (2 + 6), 2 * 3 * (2 + 6))


def test_a_resnet_50_takes_as_many_operations_as_is_known(roofline: dict[str, Any]) -> None:
    """4.1 billion multiply-adds for one view forward; torchvision puts the stride in the 3x3."""
    total = sum(one.flops for one in roofline["layers"](RECIPES["imagenet"]()))
    assert 4.0e9 < total / 2 / 3 / 2 < 4.2e9
