"""Recipes: their numbers are those of the papers and of their authors' code, written here again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastsiam.config import (
    AugmentConfig,
    BYOLConfig,
    FastSiamConfig,
    MoCoV2Config,
    SimCLRConfig,
    SwAVConfig,
    TrainConfig,
)
from fastsiam.config.recipes import RECIPES

# Epochs, batch, epochs of warm-up, weight decay, optimizer; rates at the recipe's batch where the
# warm-up starts, at the peak, at the end. SimCLR: its section 2.2 and appendix B. MoCo v2: its
# authors' README. BYOL: footnote 3 of SimSiam's section 6.1, which are the presets of BYOL's code.
# SwAV: scripts of its code (400ep_2x224, 800ep, 200ep_bs256).
IMAGENET: dict[str, tuple[tuple[Any, ...], tuple[float, float, float]]] = {
    "simclr": ((100, 4096, 10, 1e-6, "lars"), (0, 4.8, 0)),
    "mocov2": ((100, 256, 0, 1e-4, "sgd"), (0, 0.03, 0)),
    "byol": ((100, 4096, 10, 1e-6, "lars"), (0, 7.2, 0)),
    "byol_300": ((200, 4096, 10, 1e-6, "lars"), (0, 4.8, 0)),
    "byol_1000": ((800, 4096, 10, 1.5e-6, "lars"), (0, 3.2, 0)),
    "swav": ((100, 4096, 10, 1e-6, "lars, all"), (0.3, 4.8, 0.0048)),
    "swav_multicrop": ((800, 4096, 10, 1e-6, "lars, all"), (0.3, 4.8, 0.0048)),
    "swav_small": ((200, 256, 0, 1e-6, "lars, all"), (0, 0.6, 0.0006)),
}


@pytest.mark.parametrize("name", IMAGENET)
def test_the_optimizer_of_each_is_its_papers(name: str) -> None:
    config, (settings, rates) = RECIPES[name](), IMAGENET[name]
    optim = config.optim
    kind = optim.optimizer + (", all" if optim.lars_all else "")
    own = optim.epochs, optim.batch, optim.warmup_epochs, optim.weight_decay, kind
    assert own == settings
    peak = optim.lr * optim.batch / 256
    assert (peak * optim.warmup_from, peak, peak * optim.lr_end) == pytest.approx(rates)
    assert (optim.momentum, optim.lars_trust) == (0.9, 0.001)
    assert config.model.backbone == "resnet50"
    assert (config.monitor.knn_every, config.monitor.knn_first) == (10, False)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("simclr", SimCLRConfig(projector_layers=3, projector_dim=2048, dim=128, temperature=0.1)),
        (
            "mocov2",
            MoCoV2Config(
                projector_layers=2,
                projector_dim=2048,
                dim=128,
                temperature=0.2,
                queue=65536,
                encoder_momentum=0.999,
                symmetric=True,
            ),
        ),
        ("swav", SwAVConfig(projector_layers=3, queue=0)),
        ("swav_multicrop", SwAVConfig(projector_layers=2, queue=0)),
        ("swav_small", SwAVConfig(projector_layers=2, queue=3840, queue_from=15)),
        *(
            (
                name,
                BYOLConfig(
                    projector_layers=2,
                    projector_dim=4096,
                    predictor_dim=4096,
                    dim=256,
                    encoder_momentum=momentum,
                    momentum_schedule="cosine",
                ),
            )
            for name, momentum in (("byol", 0.99), ("byol_300", 0.99), ("byol_1000", 0.996))
        ),
    ],
)
def test_the_method_of_each_is_its_papers(name: str, method: Any) -> None:
    assert RECIPES[name]().model.method == method


def test_swavs_own_settings_are_its_scripts() -> None:
    for name in ("swav", "swav_multicrop", "swav_small"):
        own = RECIPES[name]().model.method
        assert isinstance(own, SwAVConfig)
        assert (own.prototypes, own.temperature, own.epsilon) == (3000, 0.1, 0.05)
        assert (own.sinkhorn_rounds, own.frozen_epochs, own.dim) == (3, 1, 128)
        assert own.projector_dim == 2048
        # 313 steps of 4096 images, 5005 of 256
        steps = 1_281_167 / RECIPES[name]().optim.batch * own.frozen_epochs
        assert steps == pytest.approx(5005 if name == "swav_small" else 313, abs=1)


def described(config: TrainConfig) -> list[tuple[float, ...]]:
    """Return each view's crop, scales, jitter (probability, strengths), gray, blur, solarise."""
    return [
        (
            *(view.crop, view.scale_min, view.scale_max, view.jitter_p),
            *(view.brightness, view.contrast, view.saturation, view.hue),
            *(view.gray_p, view.blur_p, view.solarise_p),
        )
        for view in config.augment.views
    ]


# SimCLR's appendix A at strength 1; MoCo v2's --aug-plus; BYOL's appendix B; SwAV's scripts and
# src/multicropdataset.py. Flip .5 and blur's sigma .1 to 2 are the same in all.
STRONG = (0.8, 0.8, 0.8, 0.8, 0.2, 0.2, 0.5, 0)
MULTICROP = [(224, 0.14, 1, *STRONG)] * 2 + [(96, 0.05, 0.14, *STRONG)] * 6
BYOL = [
    (224, 0.08, 1, 0.8, 0.4, 0.4, 0.2, 0.1, 0.2, 1, 0),
    (224, 0.08, 1, 0.8, 0.4, 0.4, 0.2, 0.1, 0.2, 0.1, 0.2),
]


@pytest.mark.parametrize(
    ("name", "views"),
    [
        ("simclr", [(224, 0.08, 1, *STRONG)] * 2),
        ("mocov2", [(224, 0.2, 1, 0.8, 0.4, 0.4, 0.4, 0.1, 0.2, 0.5, 0)] * 2),
        ("byol", BYOL),
        ("byol_300", BYOL),
        ("byol_1000", BYOL),
        ("swav", [(224, 0.08, 1, *STRONG)] * 2),
        ("swav_multicrop", MULTICROP),
        ("swav_small", MULTICROP),
    ],
)
def test_the_views_of_each_are_its_papers(name: str, views: list[tuple[float, ...]]) -> None:
    config = RECIPES[name]()
    assert described(config) == views
    for view in config.augment.views:
        assert (view.flip_p, view.blur_sigma_min, view.blur_sigma_max) == (0.5, 0.1, 2.0)
        assert view.solarise_threshold == 128


def test_batch_norm_and_first_residuals_are_each_authors() -> None:
    """MoCo's BN is of 32 images; residual blocks start as the identity in SimCLR's code alone."""
    for name in IMAGENET:
        config = RECIPES[name]()
        expected = (False, 32) if name == "mocov2" else (True, 0)
        assert (config.numerics.sync_bn, config.numerics.bn_images) == expected
        assert config.model.zero_init_residual == (name == "simclr")


def test_cifar10_recipes_share_simsiams_network_and_length() -> None:
    simsiam = RECIPES["cifar10"]()
    for name in ("simclr", "mocov2", "byol", "swav"):
        config = RECIPES[f"{name}_cifar10"]()
        assert config.model.method.name == name
        assert replace(config.model, method=simsiam.model.method) == simsiam.model
        assert (config.optim.epochs, config.optim.batch) == (800, 512)
        scale = {"simclr": 0.2, "mocov2": 0.08, "byol": 0.08, "swav": 0.14}[name]
        assert config.augment == simsiam.augment.changed(scale_min=scale)
        assert isinstance(config.augment, AugmentConfig) and config.monitor == simsiam.monitor


def test_cifar10_rates_make_the_steps_of_those_that_published_them() -> None:
    """SGD steps by lr (slope g + wd w): a loss k times as large takes lr / k and k wd.

    Theirs are for a batch of 512, and the slope of their loss is ``larger`` times ours. MoCo's
    CIFAR-10 demo adds up both directions, of which ours is the mean; lightly's benchmark has the
    mean of -cos where ours, as BYOL's, adds up 2 - 2 cos; SimCLR's is the loss of its paper.
    """
    for name, rate, decay, larger in (
        ("simclr", 0.06, 5e-4, 1),
        ("mocov2", 0.06, 5e-4, 2),
        ("byol", 0.24, 5e-4, 1 / 4),
    ):
        optim = RECIPES[f"{name}_cifar10"]().optim
        assert optim.optimizer == "sgd"
        assert optim.lr * 512 / 256 == pytest.approx(rate * larger), name
        assert optim.weight_decay == pytest.approx(decay / larger), name
    swav = RECIPES["swav_cifar10"]().optim
    assert (swav.optimizer, swav.lars_all, swav.lr, swav.lr_end) == ("lars", True, 0.6, 0.001)


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
    assert replace(config.augment, views=simsiam.augment.views) == simsiam.augment
    assert replace(config.model, method=simsiam.model.method) == simsiam.model
