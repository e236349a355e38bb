"""Recipes of SimSiam, and of FastSiam."""

from __future__ import annotations

from fastsiam.config import (
    AugmentConfig,
    FastSiamConfig,
    ModelConfig,
    MonitorConfig,
    OptimConfig,
    RunConfig,
    SimSiamConfig,
    TrainConfig,
)

CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)


def imagenet() -> TrainConfig:
    """ResNet-50 on ImageNet, 100 epochs, batch 512: linear top-1 68.1 in the paper (section 4).

    ``fastsiam train --data /data/imagenet --gpus 8``. The kNN monitor runs every 10 epochs and not
    before the first, because it reads the whole training set; the authors ran it every epoch.
    """
    return TrainConfig(monitor=MonitorConfig(knn_every=10, knn_first=False))


def cifar10() -> TrainConfig:
    """ResNet-18 on CIFAR-10, 800 epochs, batch 512: linear top-1 91.8 in the paper (appendix D).

    ``fastsiam train --recipe cifar10 --data /data/cifar10``. No blur; 2-layer projector; 3x3 stem
    without max-pool. The kNN monitor runs every 10 epochs: on a GPU it takes a good part of one.
    """
    return TrainConfig(
        augment=AugmentConfig.alike(crop=32, blur_p=0.0, mean=CIFAR10_MEAN, std=CIFAR10_STD),
        model=ModelConfig(
            backbone="resnet18", stem="cifar", method=SimSiamConfig(projector_layers=2)
        ),
        optim=OptimConfig(epochs=800, lr=0.03, weight_decay=5e-4),
        monitor=MonitorConfig(knn_every=10),
    )


def demo() -> TrainConfig:
    """A narrow ResNet-10 on the demo's 32-pixel images: two CPU cores, about two minutes.

    ``fastsiam demo`` makes the images and runs it.
    """
    return TrainConfig(
        augment=AugmentConfig.alike(
            crop=32, scale_min=0.4, blur_p=0.0, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)
        ),
        model=ModelConfig(
            backbone="resnet10",
            stem="cifar",
            width=16,
            method=SimSiamConfig(projector_layers=2, dim=512, predictor_dim=128),
        ),
        optim=OptimConfig(epochs=24, batch=128, lr=0.4, weight_decay=5e-4),
        monitor=MonitorConfig(knn_every=6),
        run=RunConfig(log_every=20),
    )


def fastsiam() -> TrainConfig:
    """ResNet-50 on ImageNet by FastSiam (Pototzky et al. 2022): 25 epochs, batch 32, one GPU.

    ``fastsiam train --recipe fastsiam --data /data/imagenet``. Four views, each predicted against
    the mean of the other three. Batch, epochs and the single GPU are that paper's; heads, rate
    (.05 x 32 / 256) and augmentation are SimSiam's.
    """
    return TrainConfig(
        augment=AugmentConfig.alike(4),
        model=ModelConfig(method=FastSiamConfig()),
        optim=OptimConfig(epochs=25, batch=32),
        monitor=MonitorConfig(knn_every=5, knn_first=False),
    )


def fastsiam_cifar10() -> TrainConfig:
    """FastSiam on CIFAR-10, ResNet-18, 200 epochs, batch 128: kNN 90.6 in lightly's benchmark.

    ``fastsiam train --recipe fastsiam_cifar10 --data /data/cifar10``. From that benchmark: four
    views, batch and epochs, projector of 2 layers, rate .06 (.12 x 128 / 256) for all parameters
    along a cosine, the predictor's too, and weight decay 5e-4. Choices that keep to SimSiam's
    ``cifar10`` recipe: CIFAR-10's mean and std (lightly: ImageNet's) and a BN without scale and
    offset on the projector's output (lightly: with both, ``--set output_affine=true``).
    """
    return TrainConfig(
        augment=AugmentConfig.alike(4, crop=32, blur_p=0.0, mean=CIFAR10_MEAN, std=CIFAR10_STD),
        model=ModelConfig(
            backbone="resnet18",
            stem="cifar",
            method=FastSiamConfig(projector_layers=2, predictor_lr="cosine"),
        ),
        optim=OptimConfig(epochs=200, batch=128, lr=0.12, weight_decay=5e-4),
        monitor=MonitorConfig(knn_every=10),
    )
