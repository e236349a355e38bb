"""Settings and recipes of MoCo v2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastsiam.config.setting import setting

from .base import CIFAR10, IMAGENET, Changes, ProjectedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MoCoV2Config(ProjectedConfig):
    """MoCo v2: head, queue of negatives and momentum encoder."""

    name: ClassVar[str] = "mocov2"
    title: ClassVar[str] = "MoCo v2"
    builder: ClassVar[str] = "fastsiam.methods.mocov2:MoCoV2"
    paper: ClassVar[str] = (
        "Chen, Fan, Girshick and He, [Improved Baselines with Momentum Contrastive Learning]"
        "(https://arxiv.org/abs/2003.04297), 2020"
    )
    recipes: ClassVar[dict[str, Changes]] = {
        # BN statistics are over 32 images, as on the original's 8 GPUs. The loss is the mean of
        # both directions; --lr 0.06 --weight-decay 5e-5 is equivalent to their sum.
        "mocov2": IMAGENET
        | {
            "method": "mocov2", "zero_init_residual": False,
            "batch": 256, "lr": 0.03, "sync_bn": False, "bn_images": 32,
        },
        # The CIFAR-10 demo of MoCo's code. Its loss is the sum of both directions. With their mean,
        # twice the rate and half the weight decay give the same steps. Its head has one layer.
        "mocov2_cifar10": CIFAR10
        | {
            "method": "mocov2", "scale_min": 0.08, "projector_dim": 512, "queue": 4096,
            "temperature": 0.1, "encoder_momentum": 0.99, "sync_bn": False, "bn_images": 64,
            "lr": 0.06, "weight_decay": 2.5e-4,
        },
    }  # fmt: skip

    projector_layers: int = 2
    temperature: float = setting(0.2, "Temperature of the softmax over similarities.", above=0)
    queue: int = setting(65536, "Number of previous projections to keep as negatives.", at_least=1)
    encoder_momentum: float = setting(0.999, "Momentum of the key encoder.", at_least=0, below=1)
    symmetric: bool = setting(
        True, "Use both views as queries, as SimSiam's authors did, or only the first."
    )

    def batch_warnings(self, *, images: int, batch: int, groups: int) -> list[str]:
        """Warn if BN lets queries identify their keys, or an image's own keys are negatives."""
        warnings = []
        if groups == 1:
            warnings.append(
                "BN normalises queries and their keys over the same images, which lets MoCo cheat; "
                "split the batch, for example with --no-sync-bn --bn-images 32"
            )
        if self.queue >= (keys := images * (2 if self.symmetric else 1)):
            warnings.append(
                f"the queue of {self.queue:,} holds all {keys:,} keys of an epoch, so an image's "
                "own keys are among its negatives; choose a smaller --queue"
            )
        return warnings
