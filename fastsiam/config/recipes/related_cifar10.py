"""Recipes of SimCLR, MoCo v2, BYOL and SwAV for CIFAR-10: network and length as SimSiam's there.

ResNet-18 with a 3x3 stem, 32-pixel views without blur, 800 epochs with batch 512. The SimSiam paper
has a figure for SimCLR alone (appendix D); what the others take, and from where, their docstrings
say.
"""

from __future__ import annotations

from typing import Any

from fastsiam.config import (
    AugmentConfig,
    BYOLConfig,
    MethodConfig,
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

from .simsiam import CIFAR10_MEAN, CIFAR10_STD


def _model(method: MethodConfig) -> ModelConfig:
    return ModelConfig(backbone="resnet18", stem="cifar", method=method)


def _views(*differences: dict[str, Any]) -> AugmentConfig:
    """Return a view for each argument: SimSiam's for CIFAR-10 except for what the argument says."""
    views = tuple(ViewConfig(crop=32, blur_p=0.0, **own) for own in differences)
    return AugmentConfig(views=views, mean=CIFAR10_MEAN, std=CIFAR10_STD)


def simclr_cifar10() -> TrainConfig:
    """SimCLR on CIFAR-10: linear top-1 91.1 in the paper (appendix D; SimSiam there: 91.8).

    ``fastsiam train --recipe simclr_cifar10 --data /data/cifar10``. "With the same setting" as
    SimSiam's: SGD with its rate and weight decay, its augmentation, its projector of 2 layers and
    2048 outputs. The temperature is not said: .5 is that of SimCLR's own CIFAR-10 command (README
    of its code, which differs in the rest: LARS, 1000 epochs).
    """
    return TrainConfig(
        augment=_views({}, {}),
        model=_model(SimCLRConfig(projector_layers=2, dim=2048, temperature=0.5)),
        optim=OptimConfig(epochs=800, batch=512, lr=0.03, weight_decay=5e-4),
        monitor=MonitorConfig(knn_every=10),
    )


def mocov2_cifar10() -> TrainConfig:
    """MoCo v2 on CIFAR-10, symmetric: kNN 89.7 and linear 90.7 in the CIFAR-10 demo of MoCo's code.

    ``fastsiam train --recipe mocov2_cifar10 --data /data/cifar10``. From that demo: 4096 keys,
    temperature .1, encoder's momentum .99, BN of 64 images, crops of 8% to 100% of the image. Its
    rate is .03 for a batch of 256 and its weight decay 5e-4, of a loss that is the sum of both
    directions. Ours is their mean: twice the rate and half the weight decay make the same steps.
    The demo's head is one layer (``--projector-layers 1``); two, 512 wide, make it MoCo v2's, as in
    lightly's benchmark (kNN 89.9 with a queue of 8192 and a higher rate).
    """
    return TrainConfig(
        augment=_views({"scale_min": 0.08}, {"scale_min": 0.08}),
        model=_model(
            MoCoV2Config(projector_dim=512, queue=4096, temperature=0.1, encoder_momentum=0.99)
        ),
        optim=OptimConfig(epochs=800, batch=512, lr=0.06, weight_decay=2.5e-4),
        numerics=NumericsConfig(sync_bn=False, bn_images=64),
        monitor=MonitorConfig(knn_every=10),
    )


def byol_cifar10() -> TrainConfig:
    """BYOL on CIFAR-10: kNN 91.0 in lightly's benchmark.

    ``fastsiam train --recipe byol_cifar10 --data /data/cifar10``. From that benchmark: SGD, heads
    with 1024 hidden units and 256 outputs, target's momentum .99, the same at all steps, crops of
    8% to 100% of the image, SimCLR's jitter at strength .5 in both views. Its rate is .12 for a
    batch of 256 and its weight decay 5e-4, of a loss of -cos, the mean of both directions. Ours is
    BYOL's, the sum of 2 - 2 cos, which is four times that: a quarter of the rate and four times
    the weight decay make the same steps. solo-learn's recipe is another: LARS, 1000 epochs, and the
    second view solarised with probability .2 (``--solarise-p 0,0.2``).
    """
    return TrainConfig(
        augment=_views({"scale_min": 0.08}, {"scale_min": 0.08}),
        model=_model(
            BYOLConfig(projector_dim=1024, predictor_dim=1024, momentum_schedule="constant")
        ),
        optim=OptimConfig(epochs=800, batch=512, lr=0.03, weight_decay=2e-3),
        monitor=MonitorConfig(knn_every=10),
    )


def swav_cifar10() -> TrainConfig:
    """SwAV of two views on CIFAR-10; no published run has these settings.

    ``fastsiam train --recipe swav_cifar10 --data /data/cifar10``. From lightly's benchmark (kNN
    88.4, with Adam): a head of 512-512-128, 512 prototypes, which a batch of 512 images can be
    balanced over without a queue, crops of 14% to 100% of the image. From SwAV's own recipe for
    small batches: LARS on all parameters, rate .6 x batch / 256 along a cosine to a thousandth,
    weight decay 1e-6, prototypes as they are initialised for an epoch. solo-learn takes LARS with a
    bound of its own, 3000 prototypes and a queue of 3840 from epoch 50 on.
    """
    return TrainConfig(
        augment=_views({"scale_min": 0.14}, {"scale_min": 0.14}),
        model=_model(SwAVConfig(projector_layers=2, projector_dim=512, prototypes=512)),
        optim=OptimConfig(
            epochs=800,
            batch=512,
            optimizer="lars",
            lars_all=True,
            lr=0.6,
            weight_decay=1e-6,
            lr_end=0.001,
        ),
        monitor=MonitorConfig(knn_every=10),
    )
