"""Recipes: named starting configurations.

The defaults are the paper's for ImageNet. ``docs/methods`` has the source of every number of the
related methods' recipes, ``docs/train.md`` the accuracy that each is to reach; the rate is for a
batch of 256.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .train import TrainConfig

_Changes = dict[str, Any]

# kNN reads the whole training set, which takes a good part of an epoch.
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
"""What SimCLR, BYOL and SwAV have in common on ImageNet."""
_STRONG: _Changes = {"brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.2}
"""SimCLR's jitter at strength 1, which SwAV takes over."""
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
    # On the demo's images: two CPU cores, about two minutes.
    "demo": {
        "crop": 32, "scale_min": 0.4, "blur_p": 0.0, "mean": (0.5,) * 3, "std": (0.25,) * 3,
        "backbone": "resnet10", "stem": "cifar", "width": 16,
        "projector_layers": 2, "dim": 512, "predictor_dim": 128,
        "epochs": 24, "batch": 128, "lr": 0.4, "weight_decay": 5e-4, "knn_every": 6,
        "log_every": 20,
    },
    # Batch, epochs and views are its paper's, the rest is SimSiam's.
    "fastsiam": _IMAGENET
    | {"method": "fastsiam", "views": 4, "epochs": 25, "batch": 32, "knn_every": 5},
    # lightly's benchmark, which reports kNN 90.6: views, batch, epochs, heads, rate (.06 at this
    # batch) and weight decay. SimSiam's CIFAR-10 recipe decides the rest: mean and std (lightly:
    # ImageNet's), and no scale and offset on the projector's output (--set output_affine=true).
    "fastsiam_cifar10": _CIFAR10
    | {
        "method": "fastsiam", "views": 4, "predictor_lr": "cosine",
        "epochs": 200, "batch": 128, "lr": 0.12,
    },
    # SimCLR's paper and code differ in the weight decay: the paper's is taken.
    "simclr": _RELATED | _STRONG | {"method": "simclr", "lr": 0.3},
    # BN is of 32 images, as on the original's 8 GPUs. The loss is the mean of both directions; for
    # the sum: --lr 0.06 --weight-decay 5e-5.
    "mocov2": _IMAGENET
    | {
        "method": "mocov2", "zero_init_residual": False,
        "batch": 256, "lr": 0.03, "sync_bn": False, "bn_images": 32,
    },
    # The three recipes of BYOL's code, for 100, 300 and 1000 epochs; the latter two are as long as
    # SimSiam's paper trains them.
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
    # "With the same setting" as SimSiam's (appendix D); the temperature is SimCLR's own for it.
    "simclr_cifar10": _CIFAR10 | {"method": "simclr", "dim": 2048, "temperature": 0.5},
    # The CIFAR-10 demo of MoCo's code. Its loss is the sum of both directions; of their mean, twice
    # the rate and half the weight decay make the same steps. Its head is one layer.
    "mocov2_cifar10": _CIFAR10
    | {
        "method": "mocov2", "scale_min": 0.08, "projector_dim": 512, "queue": 4096,
        "temperature": 0.1, "encoder_momentum": 0.99, "sync_bn": False, "bn_images": 64,
        "lr": 0.06, "weight_decay": 2.5e-4,
    },
    # lightly's benchmark. Its loss is the mean of -cos; of the sum of 2 - 2 cos, a quarter of the
    # rate and four times the weight decay make the same steps.
    "byol_cifar10": _CIFAR10
    | {
        "method": "byol", "scale_min": 0.08, "projector_dim": 1024, "predictor_dim": 1024,
        "momentum_schedule": "constant", "weight_decay": 2e-3,
    },
    # Head, prototypes and crops of lightly's benchmark with SwAV's rates for small batches: no
    # published run has these settings.
    "swav_cifar10": _CIFAR10
    | {
        "method": "swav", "scale_min": 0.14, "projector_dim": 512, "prototypes": 512,
        "optimizer": "lars", "lars_all": True, "lr": 0.6, "weight_decay": 1e-6, "lr_end": 0.001,
    },
}  # fmt: skip
"""What each recipe changes of the defaults, by the names of the settings."""

RECIPES: dict[str, Callable[[], TrainConfig]] = {
    name: partial(TrainConfig.from_flags, changes) for name, changes in CHANGES.items()
}
"""Every recipe by its name; the first is the one that is taken if nobody names another."""
