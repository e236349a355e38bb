"""Recipes: their numbers equal those of the papers and of the authors' code, repeated here."""

from __future__ import annotations

from typing import Any

import pytest

from fastsiam.config.recipes import RECIPES

COMMON = {
    "crop": 224, "scale_min": 0.2, "scale_max": 1.0, "flip_p": 0.5, "jitter_p": 0.8,
    "brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1, "gray_p": 0.2,
    "blur_p": 0.5, "blur_sigma_min": 0.1, "blur_sigma_max": 2.0, "solarise_p": 0.0,
    "solarise_threshold": 128, "views": 2, "backbone": "resnet50", "stem": "imagenet",
    "zero_init_residual": False, "momentum": 0.9, "lars_trust": 0.001, "lars_all": False,
    "warmup_epochs": 0.0, "start": 0.0, "end": 0.0, "sync_bn": True, "bn_images": 0,
    "knn_every": 10, "knn_first": False,
}  # fmt: skip
"""Defaults of the recipes. ``rate``, ``start`` and ``end`` are learning rates at the recipe's
batch: the peak, the start of the warm-up and the end."""
RELATED = COMMON | {
    "epochs": 100, "batch": 4096, "optimizer": "lars", "weight_decay": 1e-6,
    "warmup_epochs": 10.0, "scale_min": 0.08, "projector_layers": 3, "projector_dim": 2048,
    "dim": 128,
}  # fmt: skip
STRONG = {"brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.2}
BYOL = RELATED | {
    "method": "byol", "saturation": 0.2, "blur_p": "1.0,0.1", "solarise_p": "0.0,0.2",
    "projector_layers": 2, "projector_dim": 4096, "predictor_dim": 4096, "dim": 256,
    "momentum_schedule": "cosine", "encoder_momentum": 0.99, "zero_init_residual": True,
}  # fmt: skip
SWAV = RELATED | STRONG | {
    "method": "swav", "lars_all": True, "rate": 4.8, "start": 0.3, "end": 0.0048,
    "prototypes": 3000, "temperature": 0.1, "epsilon": 0.05, "sinkhorn_rounds": 3,
    "frozen_epochs": 1.0, "queue": 0, "predictor": "none", "stop_gradient": True,
}  # fmt: skip
MULTICROP = SWAV | {
    "views": 8, "crop": "224,224" + 6 * ",96", "scale_min": "0.14,0.14" + 6 * ",0.05",
    "scale_max": "1.0,1.0" + 6 * ",0.14", "epochs": 800, "projector_layers": 2,
}  # fmt: skip
CIFAR10 = COMMON | {
    "crop": 32, "blur_p": 0.0, "backbone": "resnet18", "stem": "cifar", "epochs": 800,
    "batch": 512, "zero_init_residual": True, "knn_first": True, "optimizer": "sgd",
    "projector_layers": 2,
}  # fmt: skip
SIMSIAM = {
    "batch": 512, "optimizer": "sgd", "zero_init_residual": True, "dim": 2048,
    "predictor_dim": 512, "predictor_lr": "constant", "head_bn": "default", "symmetric": True,
}  # fmt: skip
PAPERS: dict[str, dict[str, Any]] = {
    # SimSiam's section 3, and appendices A and D.
    "imagenet": COMMON | SIMSIAM | {
        "method": "simsiam", "epochs": 100, "rate": 0.05 * 2, "weight_decay": 1e-4,
        "projector_layers": 3,
    },
    "cifar10": CIFAR10 | SIMSIAM
    | {"method": "simsiam", "rate": 0.03 * 2, "weight_decay": 5e-4},
    # FastSiam's paper; what it leaves open is SimSiam's.
    "fastsiam": COMMON | SIMSIAM | {
        "method": "fastsiam", "epochs": 25, "batch": 32, "rate": 0.05 / 8, "weight_decay": 1e-4,
        "projector_layers": 3, "views": 4, "knn_every": 5,
    },
    # SimCLR's section 2.2, and appendices A (at strength 1) and B.
    "simclr": RELATED | STRONG | {
        "method": "simclr", "rate": 4.8, "temperature": 0.1, "predictor": "none",
        "stop_gradient": False, "zero_init_residual": True,
    },
    # The README of MoCo's authors with --aug-plus; BN statistics cover 32 images.
    "mocov2": COMMON | {
        "method": "mocov2", "epochs": 100, "batch": 256, "weight_decay": 1e-4, "optimizer": "sgd",
        "rate": 0.03, "projector_layers": 2, "projector_dim": 2048, "dim": 128,
        "temperature": 0.2, "queue": 65536, "encoder_momentum": 0.999, "symmetric": True,
        "sync_bn": False, "bn_images": 32,
    },
    # Footnote 3 of SimSiam's section 6.1, the presets in BYOL's code; BYOL's appendix B.
    "byol": BYOL | {"rate": 7.2},
    "byol_300": BYOL | {"rate": 4.8, "epochs": 200},
    "byol_1000": BYOL
    | {"rate": 3.2, "epochs": 800, "weight_decay": 1.5e-6, "encoder_momentum": 0.996},
    # Scripts in SwAV's code (400ep_2x224, 800ep, 200ep_bs256) and src/multicropdataset.py.
    "swav": SWAV,
    "swav_multicrop": MULTICROP,
    "swav_small": MULTICROP | {
        "epochs": 200, "batch": 256, "warmup_epochs": 0.0, "rate": 0.6, "start": 0.0,
        "end": 0.0006, "queue": 3840, "queue_from": 15.0,
    },
    # SGD steps by lr (g + wd w). If another program's loss is k times fastsiam's, fastsiam uses
    # lr * k and wd / k. MoCo's CIFAR-10 demo sums both directions where fastsiam takes the mean
    # (k = 2). lightly's benchmark takes the mean of -cos where fastsiam, like BYOL, sums
    # 2 - 2 cos (k = 1 / 4).
    "simclr_cifar10": CIFAR10 | {"method": "simclr", "rate": 0.06, "weight_decay": 5e-4},
    "mocov2_cifar10": CIFAR10 | {
        "method": "mocov2", "rate": 0.06 * 2, "weight_decay": 5e-4 / 2, "scale_min": 0.08,
        "sync_bn": False, "bn_images": 64,
    },
    "byol_cifar10": CIFAR10
    | {"method": "byol", "rate": 0.24 / 4, "weight_decay": 5e-4 * 4, "scale_min": 0.08},
    "swav_cifar10": CIFAR10 | {
        "method": "swav", "rate": 1.2, "weight_decay": 1e-6, "scale_min": 0.14,
        "optimizer": "lars", "lars_all": True, "end": 0.0012,
    },
    # lightly's benchmark, with SimSiam's views and network.
    "fastsiam_cifar10": CIFAR10 | {
        "method": "fastsiam", "rate": 0.06, "weight_decay": 5e-4, "epochs": 200, "batch": 128,
        "views": 4, "dim": 2048, "predictor_dim": 512, "predictor_lr": "cosine",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PAPERS)
def test_recipe_matches_paper(name: str) -> None:
    flags = RECIPES[name]().to_flags()
    rate = flags["lr"] * flags["batch"] / 256
    flags |= {"rate": rate, "start": rate * flags["warmup_from"], "end": rate * flags["lr_end"]}
    for key, value in PAPERS[name].items():
        assert flags[key] == (pytest.approx(value) if isinstance(value, float) else value), key
