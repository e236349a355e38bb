"""The work of a step is what one counts by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastsiam.bench.roofline import Layer, Machine, floor, layers
from tests.configs import changed_model
from tests.conftest import ROOT


def test_work_is_counted_by_hand() -> None:
    """A narrow network and images of 8 pixels: the stem and the heads, number by number."""
    from fastsiam.config.recipes import demo

    config = demo()
    config = replace(
        config,
        augment=config.augment.changed(crop=8),
        model=replace(changed_model(config.model, dim=6, predictor_dim=2), width=4),
    )
    own = layers(config)
    image, stem = 3 * 8 * 8, 4 * 8 * 8
    assert own[0].flops == 2 * 2 * (2 * 27 * stem)  # both views; no gradient of the images
    assert own[0].elements == 2 * (2 * image + 2 * stem)
    assert own[0].fewest == 2 * (2 * image + 3 * stem)
    assert own[1] == Layer(0, 2 * 8 * stem, 0)  # BN: 3 passes forward, 5 backward
    assert own[-1] == Layer(2 * 3 * 2 * 2 * 6, 2 * 3 * (2 + 6), 2 * 3 * (2 + 6))
    slow = Machine(flops=1.0, bytes=1e12), Machine(flops=1e12, bytes=1.0)
    assert floor(config, slow[0]) == pytest.approx(sum(one.flops for one in own), rel=1e-3)
    assert floor(config, slow[1]) == pytest.approx(2 * sum(one.elements for one in own), rel=1e-3)
    assert floor(config, slow[1], fused=True) < 0.5 * floor(config, slow[1])


def test_a_resnet_50_takes_as_many_operations_as_is_known() -> None:
    """4.1 billion multiply-adds for one view forward; torchvision puts the stride in the 3x3."""
    from fastsiam.config.recipes import imagenet

    total = sum(one.flops for one in layers(imagenet()))
    assert 4.0e9 < total / 2 / 3 / 2 < 4.2e9


def test_the_documentation_has_the_roofline_of_an_h200() -> None:
    """NVIDIA's data sheet: bfloat16 without sparsity, HBM3e."""
    from fastsiam.config.recipes import cifar10, imagenet

    page, h200 = (ROOT / "docs" / "performance.md").read_text(), Machine(989e12, 4.8e12)
    for name, config in (("ResNet-50, 224", imagenet()), ("ResNet-18, 32", cifar10())):
        own, most = (
            layers(config),
            [1 / floor(config, h200, fused=fused) for fused in (False, True)],
        )
        flops = sum(one.flops for one in own) / 1e9
        moved, fewest = (
            2 * sum(x) / 1e6 for x in zip(*((o.elements, o.fewest) for o in own), strict=True)
        )
        figures = f"{flops:.1f} | {moved:,.0f} | {most[0]:,.0f} | {fewest:,.0f} | {most[1]:,.0f}"
        assert f"| {name} pixels | {figures} |" in page
