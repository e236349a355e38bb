"""Recipes: named starting configurations.

The defaults are the SimSiam paper's for ImageNet. Learning rates are for a batch of 256.
``docs/methods`` has the source of every number in the related methods' recipes, ``docs/train.md``
the accuracy that each recipe should reach.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .train import TrainConfig

_Changes = dict[str, Any]

# kNN reads the entire training set, which takes a considerable part of an epoch.
_SELDOM: _Changes = {"knn_every": 10}
_IMAGENET = _SELDOM | {"knn_first": False}
_CIFAR10: _Changes = _SELDOM | {
    "crop": 32, "blur_p": 0.0, "mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616),
    "backbone": "resnet18", "stem": "cifar", "projector_layers": 2,
    "epochs": 800, "lr": 0.03, "weight_decay": 5e-4,
}  # fmt: skip
_RELATED = _IMAGENET | {
    "batch": 4096, "optimizer": "lars", "weight_decay": 1e-6, "warmup_epochs": 10.0,
    "scale_min": 0.08,
}  # fmt: skip
"""Settings that SimCLR, BYOL and SwAV share on ImageNet."""
_STRONG: _Changes = {"brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.2}
"""SimCLR's colour jitter at strength 1, also used by SwAV."""
_BYOL = _RELATED | {
    "method": "byol", "lr": 0.45, "saturation": 0.2, "blur_p": "1.0,0.1", "solarise_p": "0.0,0.2",
}  # fmt: skip
_SWAV = _RELATED | _STRONG | {
    "method": "swav", "lr": 0.3, "lars_all": True, "warmup_from": 0.0625, "lr_end": 0.001,
    "zero_init_residual": False,
}  # fmt: skip
_SWAV_MULTICROP = _SWAV | {
    "projector_layers": 2, "epochs": 800, "views": 8, "crop": "224,224" + 6 * ",96",
    "scale_min": "0.14,0.14" + 6 * ",0.05", "scale_max": "1.0,1.0" + 6 * ",0.14",
}  # fmt: skip

CHANGES: dict[str, _Changes] = {
    "imagenet": _IMAGENET,
    "cifar10": _CIFAR10,
    # About two minutes on the demo's images with two CPU cores.
    "demo": {
        "crop": 32, "scale_min": 0.4, "blur_p": 0.0, "mean": (0.5,) * 3, "std": (0.25,) * 3,
        "backbone": "resnet10", "stem": "cifar", "width": 16,
        "projector_layers": 2, "dim": 512, "predictor_dim": 128,
        "epochs": 24, "batch": 128, "lr": 0.4, "weight_decay": 5e-4, "knn_every": 6,
        "log_every": 20,
    },
    # Batch, epochs and views are from the FastSiam paper, the rest is SimSiam's.
    "fastsiam": _IMAGENET
    | {"method": "fastsiam", "views": 4, "epochs": 25, "batch": 32, "knn_every": 5},
    # Views, batch, epochs, heads, rate (0.06 at this batch) and weight decay are from lightly's
    # benchmark, which reports 90.6% kNN accuracy. The rest is SimSiam's CIFAR-10 recipe: mean and
    # std (lightly uses ImageNet's), and a projector output without scale and offset (--set
    # output_affine=true adds them).
    "fastsiam_cifar10": _CIFAR10
    | {
        "method": "fastsiam", "views": 4, "predictor_lr": "cosine",
        "epochs": 200, "batch": 128, "lr": 0.12,
    },
    # SimCLR's paper and code differ in the weight decay; this is the paper's.
    "simclr": _RELATED | _STRONG | {"method": "simclr", "lr": 0.3},
    # BN statistics are over 32 images, as on the original's 8 GPUs. The loss is the mean of both
    # directions; --lr 0.06 --weight-decay 5e-5 is equivalent to their sum.
    "mocov2": _IMAGENET
    | {
        "method": "mocov2", "zero_init_residual": False,
        "batch": 256, "lr": 0.03, "sync_bn": False, "bn_images": 32,
    },
    # The three recipes of BYOL's code, for 100, 300 and 1000 epochs. The latter two have the epochs
    # of the SimSiam paper.
    "byol": _BYOL,
    "byol_300": _BYOL | {"epochs": 200, "lr": 0.3},
    "byol_1000": _BYOL
    | {"epochs": 800, "lr": 0.2, "weight_decay": 1.5e-6, "encoder_momentum": 0.996},
    "swav": _SWAV,
    "swav_small": _SWAV_MULTICROP
    | {
        "queue": 3840, "epochs": 200, "batch": 256, "lr": 0.6,
        "warmup_epochs": 0.0, "warmup_from": 0.0,
    },
    "swav_multicrop": _SWAV_MULTICROP,
    # "With the same setting" as SimSiam (appendix D); the temperature is SimCLR's for CIFAR-10.
    "simclr_cifar10": _CIFAR10 | {"method": "simclr", "dim": 2048, "temperature": 0.5},
    # The CIFAR-10 demo of MoCo's code. Its loss is the sum of both directions. With their mean,
    # twice the rate and half the weight decay give the same steps. Its head has one layer.
    "mocov2_cifar10": _CIFAR10
    | {
        "method": "mocov2", "scale_min": 0.08, "projector_dim": 512, "queue": 4096,
        "temperature": 0.1, "encoder_momentum": 0.99, "sync_bn": False, "bn_images": 64,
        "lr": 0.06, "weight_decay": 2.5e-4,
    },
    # lightly's benchmark. Its loss is the mean of -cos. With the sum of 2 - 2 cos, a quarter of the
    # rate and four times the weight decay give the same steps.
    "byol_cifar10": _CIFAR10
    | {
        "method": "byol", "scale_min": 0.08, "projector_dim": 1024, "predictor_dim": 1024,
        "momentum_schedule": "constant", "weight_decay": 2e-3,
    },
    # Head, prototypes and crops are from lightly's benchmark, the rates from SwAV's small-batch
    # recipe. No published run has these settings.
    "swav_cifar10": _CIFAR10
    | {
        "method": "swav", "scale_min": 0.14, "projector_dim": 512, "prototypes": 512,
        "optimizer": "lars", "lars_all": True, "lr": 0.6, "weight_decay": 1e-6, "lr_end": 0.001,
    },
}  # fmt: skip
"""The settings that each recipe changes from the defaults, by name."""

RECIPES: dict[str, Callable[[], TrainConfig]] = {
    name: partial(TrainConfig.from_flags, changes) for name, changes in CHANGES.items()
}
"""Every recipe by name. The first is the default."""
