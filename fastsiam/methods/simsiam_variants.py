"""The ablations of the SimSiam paper, which settings of ``SimSiamConfig`` select."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastsiam.collectives import gather
from fastsiam.config import SimSiamConfig
from fastsiam.model.backbones import Backbone
from fastsiam.model.losses import negative_cosine, softmax_cross_entropy

from .base import Moment, Output, ParamGroup
from .fastsiam import FastSiam
from .momentum import MomentumEncoder
from .simsiam import SimSiam

SIMILARITIES = {"cosine": negative_cosine, "cross-entropy": softmax_cross_entropy}
"""Loss functions (section 4.5) for the values of the setting ``similarity``."""

Comparison = tuple[int, tuple[int, ...]]
"""Index of a predicting view, and those of the views whose mean projection is its target."""


def build_simsiam(config: SimSiamConfig, backbone: Backbone, *, images: int = 0) -> SimSiam:
    """Build SimSiam, or a variant if the settings ask for one."""
    kind = SimSiam if _is_standard(config) else SimSiamVariant
    return kind(config, backbone, images=images)


def build_fastsiam(config: SimSiamConfig, backbone: Backbone, *, images: int = 0) -> SimSiam:
    """Build FastSiam, or a variant if the settings ask for one."""
    kind = FastSiam if _is_standard(config) else FastSiamVariant
    return kind(config, backbone, images=images)


def _is_standard(config: SimSiamConfig) -> bool:
    return config == replace(
        config,
        predictor="trained",
        stop_gradient=True,
        similarity="cosine",
        symmetric=True,
        alternate_every=1,
        target_average=0.0,
        encoder_momentum=0.0,
    )


class SimSiamVariant(SimSiam):
    """SimSiam with other targets, comparisons, losses or predictors.

    The submodule ``frozen`` exists if a separate encoder computes the targets. In the k-step
    alternation of section 5.2 it is a copy of the encoder from before the k steps. The paper
    computes the targets before the steps and caches them. A frozen copy gives the same targets,
    with the memory of one network for any k. With ``encoder_momentum`` it is a momentum encoder, as
    in BYOL.

    The buffer ``averages`` exists for section 5.2's expectation over augmentations. It is (images,
    dim) float32, a moving average of each image's l2-normalised projections (footnote 2). The
    cosine loss normalises the average.
    """

    averages: Tensor

    def __init__(self, config: SimSiamConfig, backbone: Backbone, *, images: int = 0) -> None:
        super().__init__(config, backbone, images=images)
        if config.predictor == "none":
            self.parts, self.predictor = ("backbone", "projector"), nn.Identity()
        self.predictor.requires_grad_(config.predictor == "trained")
        if self._has_frozen:
            self.frozen = MomentumEncoder(self.backbone, self.projector)
        if config.target_average:
            self.register_buffer("averages", torch.zeros(images, config.dim))

    def forward(self, views: tuple[Tensor, ...], index: Tensor) -> Output:
        """Compute the loss (a cosine is in [-1, 1]); embeddings are the first view's z, (N, d)."""
        comparisons = self.comparisons(len(views))
        predicting_views = [view for view, _ in comparisons]
        inputs = [views[view] for view in predicting_views]
        _, z, p = self.by_view(inputs, self.backbone, self.projector, self.predictor)
        all_target_views = {view for _, target_views in comparisons for view in target_views}
        targets = self._targets(
            views, dict(zip(predicting_views, z, strict=True)), all_target_views
        )
        rows = self.averages[index] if self.config.target_average else None
        similarity = SIMILARITIES[self.config.similarity]
        losses = [
            similarity(prediction, self._average(rows, [targets[view] for view in target_views]))
            for prediction, (_, target_views) in zip(p, comparisons, strict=True)
        ]
        carry = {}
        if rows is not None:
            carry = {
                "rows": self._average(rows, list(targets.values())).detach(),
                "index": index.clone(),
            }
        return Output(torch.stack(losses).mean(), z[0].detach(), carry)

    def comparisons(self, views: int) -> list[Comparison]:
        """Compare both directions of two views; without ``symmetric``, one direction per pair."""
        if self.config.symmetric:
            return [(0, (1,)), (1, (0,))]
        return [(first, (first + 1,)) for first in range(0, views, 2)]

    def param_groups(self) -> list[ParamGroup]:
        """Return groups for the encoder and, if it is trained (Table 1), the predictor."""
        return super().param_groups()[: 2 if self.config.predictor == "trained" else 1]

    def after_step(self, outputs: Sequence[Output], *, at: Moment) -> None:
        """Store the averages of the batch's images, and update the frozen encoder."""
        if self.config.target_average:
            rows, index = (
                gather(torch.cat([output.carry[name] for output in outputs]))
                for name in ("rows", "index")
            )
            self.averages.index_copy_(0, index, rows)
        interval = self.config.alternate_every or at.steps_per_epoch
        if momentum := self.config.encoder_momentum:
            self.frozen.follow(momentum)
        elif self._has_frozen and at.done % interval == 0:
            self.frozen.copy_parts()

    @property
    def _has_frozen(self) -> bool:
        return self.config.alternate_every != 1 or self.config.encoder_momentum > 0

    def _targets(
        self, views: tuple[Tensor, ...], z: dict[int, Tensor], target_views: set[int]
    ) -> dict[int, Tensor]:
        """Return the targets of some views, (N, dim) each, by view index.

        Without the stop-gradient of section 4.1 training collapses (Fig. 2).

        Args:
            views: all views.
            z: projections of the predicting views, by view index.
            target_views: indices of the views that need targets.
        """
        stop, targets, encoder = self.config.stop_gradient, z, [self.backbone, self.projector]
        if self._has_frozen:
            targets, encoder = {}, [self.frozen]
        if remaining := [view for view in sorted(target_views) if view not in targets]:
            with torch.no_grad() if stop else nullcontext():
                *_, projections = self.by_view([views[view] for view in remaining], *encoder)
            targets = targets | dict(zip(remaining, projections, strict=True))
        return {
            view: targets[view].detach() if stop else targets[view] for view in sorted(target_views)
        }

    def _average(self, rows: Tensor | None, targets: list[Tensor]) -> Tensor:
        """Return the mean of some views' targets, in float32; with ``rows``, the moving average.

        The moving average is over l2-normalised targets. A row of zeros means that the image was
        not trained on yet. Its first average is the mean of its targets: the paper's first targets
        are the network's output (section 5.3).

        Args:
            rows: (N, dim) averages so far, or None.
            targets: (N, dim) for each view.
        """
        stacked_targets = torch.stack(targets).float()
        if rows is None:
            return stacked_targets.mean(0)
        momentum, mean = self.config.target_average, F.normalize(stacked_targets, dim=2).mean(0)
        has_average = rows.any(1, keepdim=True)
        return torch.where(has_average, momentum * rows + (1 - momentum) * mean, mean)


class FastSiamVariant(SimSiamVariant):
    """The same ablations of FastSiam."""

    def comparisons(self, views: int) -> list[Comparison]:
        """Compare each view with all others; without ``symmetric``, only the first view."""
        all_views = tuple(range(views))
        predicting_views = all_views if self.config.symmetric else all_views[:1]
        return [(view, all_views[:view] + all_views[view + 1 :]) for view in predicting_views]
