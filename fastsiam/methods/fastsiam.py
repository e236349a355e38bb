"""FastSiam (Pototzky, Sultan and Schmidt-Thieme, GCPR 2022): SimSiam with more than two views."""

from __future__ import annotations

import torch
from torch import Tensor

from fastsiam.model.losses import negative_cosine as D

from .base import Output
from .simsiam import SimSiam


class FastSiam(SimSiam):
    """SimSiam that compares each view's prediction with the mean projection of the other views."""

    def forward(self, views: tuple[Tensor, ...], index: Tensor) -> Output:
        """Compute the loss of two or more views, in [-1, 1]; embeddings are the first view's z."""
        *_, z, p = self.by_view(views, self.backbone, self.projector, self.predictor)
        losses = []
        for i, prediction in enumerate(p):
            others = torch.stack(z[:i] + z[i + 1 :]).float().mean(0)
            losses.append(D(prediction, others.detach()))
        return Output(torch.stack(losses).mean(), z[0].detach(), {})
