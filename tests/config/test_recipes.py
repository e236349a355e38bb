"""Recipes: their numbers are those of the papers and of their authors' code, written here again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastsiam.config import (
    BYOLConfig,
    FastSiamConfig,
    MoCoV2Config,
    SimCLRConfig,
    SwAVConfig,
    TrainConfig,
)
from fastsiam.config.recipes import RECIPES

STRONG = (0.8, 0.8, 0.8, 0.8, 0.2, 0.2, 0.5, 0)
MULTICROP = [(224, 0.14, 1, *STRONG)] * 2 + [(96, 0.05, 0.14, *STRONG)] * 6
BYOL_VIEWS = [
    (224, 0.08, 1, 0.8, 0.4, 0.4, 0.2, 0.1, 0.2, 1, 0),
    (224, 0.08, 1, 0.8, 0.4, 0.4, 0.2, 0.1, 0.2, 0.1, 0.2),
]
BYOL = BYOLConfig(
    projector_layers=2, projector_dim=4096, predictor_dim=4096, dim=256,
    momentum_schedule="cosine",
)  # fmt: skip
SWAV = SwAVConfig(
    projector_dim=2048, dim=128, prototypes=3000, temperature=0.1, epsilon=0.05, sinkhorn_rounds=3,
    frozen_epochs=1,
)  # fmt: skip
MOCO = MoCoV2Config(
    projector_layers=2, projector_dim=2048, dim=128, temperature=0.2, queue=65536,
    encoder_momentum=0.999, symmetric=True,
)  # fmt: skip

# Epochs, batch, epochs of warm-up, weight decay, optimizer; rates at the recipe's batch where the
# warm-up starts, at the peak, at the end; views (crop, scales, jitter's probability and strengths,
# gray, blur, solarise); method. SimCLR: its section 2.2, appendix A at strength 1 and B. MoCo v2:
# its authors' README and --aug-plus. BYOL: footnote 3 of SimSiam's section 6.1, which are the
# presets of BYOL's code, and its appendix B. SwAV: scripts of its code (400ep_2x224, 800ep,
# 200ep_bs256) and src/multicropdataset.py.
IMAGENET: dict[str, tuple[Any, ...]] = {
    "simclr": (
        (100, 4096, 10, 1e-6, "lars"), (0, 4.8, 0), [(224, 0.08, 1, *STRONG)] * 2,
        SimCLRConfig(projector_layers=3, projector_dim=2048, dim=128, temperature=0.1),
    ),
    "mocov2": (
        (100, 256, 0, 1e-4, "sgd"), (0, 0.03, 0),
        [(224, 0.2, 1, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2, 0.5, 0)] * 2, MOCO,
    ),
    "byol": (
        (100, 4096, 10, 1e-6, "lars"), (0, 7.2, 0), BYOL_VIEWS, replace(BYOL, encoder_momentum=0.99)
    ),
    "byol_300": (
        (200, 4096, 10, 1e-6, "lars"), (0, 4.8, 0), BYOL_VIEWS, replace(BYOL, encoder_momentum=0.99)
    ),
    "byol_1000": (
        (800, 4096, 10, 1.5e-6, "lars"), (0, 3.2, 0), BYOL_VIEWS,
        replace(BYOL, encoder_momentum=0.996),
    ),
    "swav": (
        (100, 4096, 10, 1e-6, "lars, all"), (0.3, 4.8, 0.0048), [(224, 0.08, 1, *STRONG)] * 2,
        replace(SWAV, projector_layers=3, queue=0),
    ),
    "swav_multicrop": (
        (800, 4096, 10, 1e-6, "lars, all"), (0.3, 4.8, 0.0048), MULTICROP,
        replace(SWAV, projector_layers=2, queue=0),
    ),
    "swav_small": (
        (200, 256, 0, 1e-6, "lars, all"), (0, 0.6, 0.0006), MULTICROP,
        replace(SWAV, projector_layers=2, queue=3840, queue_from=15),
    ),
}  # fmt: skip


def described(config: TrainConfig) -> list[tuple[float, ...]]:
    """Return the numbers of each view; those that are the same in all papers are checked."""
    for view in config.augment.views:
        assert (view.flip_p, view.blur_sigma_min, view.blur_sigma_max) == (0.5, 0.1, 2.0)
        assert view.solarise_threshold == 128
    return [
        (
            *(view.crop, view.scale_min, view.scale_max, view.jitter_p),
            *(view.brightness, view.contrast, view.saturation, view.hue),
            *(view.gray_p, view.blur_p, view.solarise_p),
        )
        for view in config.augment.views
    ]


@pytest.mark.parametrize("name", IMAGENET)
def test_the_recipe_of_each_is_its_papers(name: str) -> None:
    """MoCo's BN is of 32 images; residual blocks start as the identity in SimCLR's and BYOL's."""
    config, (settings, rates, views, method) = RECIPES[name](), IMAGENET[name]
    optim, numerics = config.optim, config.numerics
    kind = optim.optimizer + (", all" if optim.lars_all else "")
    own = optim.epochs, optim.batch, optim.warmup_epochs, optim.weight_decay, kind
    assert own == settings
    peak = optim.lr * optim.batch / 256
    assert (peak * optim.warmup_from, peak, peak * optim.lr_end) == pytest.approx(rates)
    assert (optim.momentum, optim.lars_trust) == (0.9, 0.001)
    assert described(config) == views
    assert (config.model.backbone, config.model.method) == ("resnet50", method)
    assert config.model.zero_init_residual == name.startswith(("simclr", "byol"))
    assert (numerics.sync_bn, numerics.bn_images) == ((True, 0), (False, 32))[name == "mocov2"]
    assert (config.monitor.knn_every, config.monitor.knn_first) == (10, False)


# Rate at a batch of 512, weight decay, and how much larger the slope of their loss is than ours,
# smallest crop. SGD steps by lr (slope g + wd w): a loss k times as large takes lr / k and k wd.
# MoCo's CIFAR-10 demo adds up both directions, of which ours is the mean; lightly's benchmark has
# the mean of -cos where ours, as BYOL's, adds up 2 - 2 cos; SimCLR's is the loss of its paper.
CIFAR10 = {
    "simclr": (0.06, 5e-4, 1, 0.2),
    "mocov2": (0.06, 5e-4, 2, 0.08),
    "byol": (0.24, 5e-4, 1 / 4, 0.08),
    "swav": (1.2, 1e-6, 1, 0.14),
}


@pytest.mark.parametrize("name", CIFAR10)
def test_cifar10_recipes_share_simsiams_network_and_length(name: str) -> None:
    simsiam, config = RECIPES["cifar10"](), RECIPES[f"{name}_cifar10"]()
    rate, decay, larger, scale = CIFAR10[name]
    optim = config.optim
    assert config.model.method.name == name
    assert replace(config.model, method=simsiam.model.method) == simsiam.model
    assert (optim.epochs, optim.batch) == (800, 512)
    assert config.augment == simsiam.augment.changed(scale_min=scale)
    assert config.monitor == simsiam.monitor
    assert optim.lr * 512 / 256 == pytest.approx(rate * larger)
    assert optim.weight_decay == pytest.approx(decay / larger)
    kind = ("lars", True, 0.001) if name == "swav" else ("sgd", False, 0)
    assert (optim.optimizer, optim.lars_all, optim.lr_end) == kind


def test_fastsiam_on_cifar10_is_lightlys_benchmark() -> None:
    """Batch, epochs, SGD and heads of lightly's CIFAR-10 benchmark; views and network SimSiam's."""
    config, simsiam = RECIPES["fastsiam_cifar10"](), RECIPES["cifar10"]()
    optim, method = config.optim, config.model.method
    assert (optim.optimizer, optim.epochs, optim.batch, optim.warmup_epochs) == ("sgd", 200, 128, 0)
    assert optim.lr * optim.batch / 256 == pytest.approx(0.06)
    assert (optim.momentum, optim.weight_decay) == (0.9, 5e-4)
    assert method == FastSiamConfig(
        projector_layers=2, dim=2048, predictor_dim=512, predictor_lr="cosine"
    )
    assert config.augment.views == simsiam.augment.views * 2
    assert replace(config.model, method=simsiam.model.method) == simsiam.model
