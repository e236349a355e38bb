"""Settings of MoCo v2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastsiam.config.setting import setting

from .base import ProjectedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MoCoV2Config(ProjectedConfig):
    """MoCo v2: its head, its queue of negatives and its momentum encoder."""

    name: ClassVar[str] = "mocov2"
    title: ClassVar[str] = "MoCo v2"
    builder: ClassVar[str] = "fastsiam.methods.mocov2:MoCoV2"
    paper: ClassVar[str] = (
        "Chen, Fan, Girshick and He, [Improved Baselines with Momentum Contrastive Learning]"
        "(https://arxiv.org/abs/2003.04297), 2020"
    )

    projector_layers: int = 2
    temperature: float = setting(0.2, "Temperature of the softmax over similarities.", above=0)
    queue: int = setting(65536, "Projections of earlier batches to keep as negatives.", at_least=1)
    encoder_momentum: float = setting(0.999, "Momentum of the key encoder.", at_least=0, below=1)
    symmetric: bool = setting(
        True, "Use both views as queries, as SimSiam's authors did, or only the first."
    )

    def doubts(self, *, images: int, batch: int, groups: int) -> list[str]:
        """Warn of BN that tells queries their keys, and of a queue with keys of the same image."""
        said = []
        if groups == 1:
            said.append(
                "BN normalises queries among the same images as their keys, from which MoCo learns "
                "to cheat: divide the batch, by --no-sync-bn --bn-images 32 for example"
            )
        if self.queue >= (keys := images * (2 if self.symmetric else 1)):
            said.append(
                f"the queue of {self.queue:,} is as long as an epoch's {keys:,} keys, so an "
                "image's own keys are among its negatives: choose a smaller queue"
            )
        return said
