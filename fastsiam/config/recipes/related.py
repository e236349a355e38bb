"""Recipes of SimCLR, MoCo v2, BYOL and SwAV: ResNet-50 on ImageNet, as Table 4 of SimSiam has them.

The paper follows "the hyper-parameter and augmentation recipes in its original paper" for each
method (section 6.1), with three improvements of its own (appendix C): a projector of 3 layers in
SimCLR and SwAV, and a symmetrised loss in MoCo v2. Rates are for a batch of 256, as ``lr`` is;
``--epochs`` sets the length of each, and the columns of Table 4 are 100, 200, 400 and 800 epochs.
Residual blocks start as in each method's own code: as the identity in SimCLR's alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastsiam.config import (
    AugmentConfig,
    BYOLConfig,
    MoCoV2Config,
    ModelConfig,
    MonitorConfig,
    NumericsConfig,
    OptimConfig,
    SimCLRConfig,
    SwAVConfig,
    TrainConfig,
    ViewConfig,
)

_MONITOR = MonitorConfig(knn_every=10, knn_first=False)
"""As in the recipe ``imagenet``: kNN reads the whole training set."""
_STRONG: dict[str, Any] = {
    "scale_min": 0.08,
    "brightness": 0.8,
    "contrast": 0.8,
    "saturation": 0.8,
    "hue": 0.2,
}
"""SimCLR's augmentation at strength 1 (its appendix A), where it differs from SimSiam's."""
_BYOL: dict[str, Any] = {"scale_min": 0.08, "saturation": 0.2}
"""BYOL's augmentation (its appendix B), where it differs from SimSiam's and views do not differ."""


def simclr() -> TrainConfig:
    """SimCLR, 100 epochs, batch 4096: linear top-1 66.5 in the paper (200: 68.3, 800: 70.4).

    ``fastsiam train --recipe simclr --data /data/imagenet --gpus 8``.

    LARS, rate .3 x batch / 256 = 4.8, 10 epochs of warm-up, temperature .1, BN over the global
    batch; weight decay 1e-6 and no BN scale, offset or bias in it or in LARS (SimCLR, section 2.2
    and appendix B). Sources differ in the weight decay: its authors' code and its README's
    command have 1e-4, with which that README reports 64.5 after 100 epochs. 1e-6 is the paper's
    and is taken; SimSiam does not say which it had. The projector has 3 layers, 2048-2048-128
    (SimCLR: 2); widths are those of SimCLR's code, which keeps the width of the features.
    """
    return TrainConfig(
        augment=AugmentConfig.alike(**_STRONG),
        model=ModelConfig(method=SimCLRConfig(projector_layers=3, dim=128, projector_dim=2048)),
        optim=OptimConfig(
            batch=4096, optimizer="lars", lr=0.3, weight_decay=1e-6, warmup_epochs=10
        ),
        monitor=_MONITOR,
    )


def mocov2() -> TrainConfig:
    """MoCo v2, 100 epochs, batch 256: linear top-1 67.4 in the paper (200: 69.9, 800: 72.2).

    ``fastsiam train --recipe mocov2 --data /data/imagenet --gpus 8``.

    SGD, rate .03, weight decay 1e-4 on all parameters, no warm-up, temperature .2, 65,536 keys,
    encoder's momentum .999, and the augmentation that SimSiam took over (MoCo v2 and its authors'
    command). The original runs on 8 GPUs, 32 images each, with BN on each alone: BN statistics are
    of 32 images here whatever the number of GPUs (``--bn-images 32 --no-sync-bn``).

    The loss is symmetrised: the mean of both directions. Its authors publish one only in their
    CIFAR-10 demo, and that is the sum, which steps twice as far; SimSiam does not say which of
    them is behind 67.4. ``--lr 0.06 --weight-decay 5e-5`` is the sum.
    """
    return TrainConfig(
        model=ModelConfig(zero_init_residual=False, method=MoCoV2Config()),
        optim=OptimConfig(batch=256, lr=0.03),
        numerics=NumericsConfig(sync_bn=False, bn_images=32),
        monitor=_MONITOR,
    )


def byol() -> TrainConfig:
    """BYOL, 100 epochs, batch 4096: linear top-1 66.5 in the paper.

    ``fastsiam train --recipe byol --data /data/imagenet --gpus 8``.

    BYOL's recipe of 100 epochs: LARS, rate .45 x batch / 256 = 7.2, weight decay 1e-6, neither on
    BN and biases, 10 epochs of warm-up, target's momentum from .99 to 1 (SimSiam's footnote in
    section 6.1; its authors' code has the same). Projector and predictor have 4096 hidden units
    and 256 outputs, BN behind the hidden layer alone, over the global batch. The two views differ:
    the first is always blurred, the second with probability .1 and solarised with .2. The loss is
    the sum of both directions, as BYOL's: rates of BN and biases, which LARS does not scale, and
    the weight decay are meant for it.
    """
    return _byol(epochs=100, lr=0.45, weight_decay=1e-6, momentum=0.99)


def byol_300() -> TrainConfig:
    """BYOL by its recipe of 300 epochs, 200 epochs: linear top-1 70.6 in the paper.

    ``fastsiam train --recipe byol_300 --data /data/imagenet --gpus 8``.

    As ``byol``, except for a rate of 0.3 x batch / 256 = 4.8. The paper trains 200 and 400 epochs
    by it: ``--epochs 400`` is its 73.2, and ``--epochs 300`` BYOL's own 72.5 (reproduced as 72.4).
    """
    return _byol(epochs=200, lr=0.3, weight_decay=1e-6, momentum=0.99)


def byol_1000() -> TrainConfig:
    """BYOL by its recipe of 1000 epochs, 800 epochs: linear top-1 74.3 in the paper.

    ``fastsiam train --recipe byol_1000 --data /data/imagenet --gpus 8``.

    As ``byol``, except for a rate of 0.2 x batch / 256 = 3.2, weight decay 1.5e-6 and a momentum
    from 0.996 to 1. The paper trains 800 epochs by it; ``--epochs 1000`` is BYOL's own, 74.3 too.
    """
    return _byol(epochs=800, lr=0.2, weight_decay=1.5e-6, momentum=0.996)


def _byol(*, epochs: int, lr: float, weight_decay: float, momentum: float) -> TrainConfig:
    """Return what BYOL's recipes have in common, with what they differ in."""
    return TrainConfig(
        augment=AugmentConfig(
            views=(
                ViewConfig(**_BYOL, blur_p=1.0),
                ViewConfig(**_BYOL, blur_p=0.1, solarise_p=0.2),
            )
        ),
        model=ModelConfig(zero_init_residual=False, method=BYOLConfig(encoder_momentum=momentum)),
        optim=OptimConfig(
            epochs=epochs,
            batch=4096,
            optimizer="lars",
            lr=lr,
            weight_decay=weight_decay,
            warmup_epochs=10,
        ),
        monitor=_MONITOR,
    )


def swav() -> TrainConfig:
    """SwAV of two views, 100 epochs, batch 4096: linear top-1 66.5 in the paper (400: 70.7).

    ``fastsiam train --recipe swav --data /data/imagenet --gpus 8``.

    LARS on all parameters, BN and biases too, rate from .3 to 4.8 in 10 epochs and along a cosine
    to .0048, weight decay 1e-6, temperature .1, Sinkhorn of 3 rounds with epsilon .05, 3000
    prototypes, as they are initialised for the first epoch, no queue (SwAV, appendix A, and its
    authors' script of two crops, which reports 70.1 after 400 epochs). The projector has 3 layers,
    2048-2048-128 (SwAV: 2). SimCLR's augmentation.

    The authors share BN statistics among 8 GPUs of 64 images each to save time. A recipe does not
    know the number of GPUs: they are of the global batch here; with 64 GPUs, ``--sync-bn-ranks 8``
    is the original. Its code divides the red channel by .228, and the others as all do; .229 here.
    """
    return TrainConfig(
        augment=AugmentConfig.alike(**_STRONG),
        model=ModelConfig(zero_init_residual=False, method=SwAVConfig()),
        optim=OptimConfig(
            batch=4096,
            optimizer="lars",
            lars_all=True,
            lr=0.3,
            weight_decay=1e-6,
            warmup_epochs=10,
            warmup_from=0.0625,
            lr_end=0.001,
        ),
        monitor=_MONITOR,
    )


def swav_multicrop() -> TrainConfig:
    """SwAV of 2 views of 224 and 6 of 96 pixels, 800 epochs, batch 4096: linear top-1 75.3.

    ``fastsiam train --recipe swav_multicrop --data /data/imagenet --gpus 8``.

    SwAV's own recipe, with its projector of 2 layers: the large views are of 14% to 100% of the
    image, the small ones of 5% to 14%. Its authors report 72.1, 73.9, 74.6 and 75.3 after 100,
    200, 400 and 800 epochs (SwAV's README); SimSiam compares two views alone. The rest is as in
    ``swav``.
    """
    recipe = swav()
    large = ViewConfig(**_STRONG | {"scale_min": 0.14})
    small = ViewConfig(**_STRONG | {"scale_min": 0.05, "scale_max": 0.14, "crop": 96})
    return replace(
        recipe,
        augment=AugmentConfig(views=(large,) * 2 + (small,) * 6),
        model=replace(recipe.model, method=SwAVConfig(projector_layers=2)),
        optim=replace(recipe.optim, epochs=800),
    )


def swav_small() -> TrainConfig:
    """SwAV of 2 views of 224 and 6 of 96 pixels with batch 256, 200 epochs: linear top-1 72.7.

    ``fastsiam train --recipe swav_small --data /data/imagenet --gpus 4``.

    SwAV's own recipe for small batches: a queue of 3840 projections for each of the two large
    views from epoch 15 on, rate from .6 along a cosine to .0006 without warm-up, prototypes as
    they are initialised for 5005 steps, which are an epoch. BN over the global batch, as its
    authors have it on 4 GPUs. They report 72.7 and 74.3 after 200 and 400 epochs (SwAV's README);
    they publish no run of two views with small batches.
    """
    recipe = swav_multicrop()
    return replace(
        recipe,
        model=replace(
            recipe.model, method=SwAVConfig(projector_layers=2, queue=3840, queue_from=15.0)
        ),
        optim=replace(
            recipe.optim, epochs=200, batch=256, lr=0.6, warmup_epochs=0.0, warmup_from=0.0
        ),
    )
