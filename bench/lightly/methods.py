"""Each method out of lightly's heads and losses, on our backbone, with the settings of a run.

Where lightly's heads have one number of layers (SimSiam's, BYOL's and SwAV's projectors) they are
built with as many as the settings say, by its ``ProjectionHead``.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from lightly.loss import NegativeCosineSimilarity, NTXentLoss, SwaVLoss
from lightly.models.batchnorm import SplitBatchNorm
from lightly.models.modules import (
    BYOLPredictionHead,
    MoCoProjectionHead,
    SimCLRProjectionHead,
    SimSiamPredictionHead,
    SwaVPrototypes,
)
from lightly.models.modules.heads import ProjectionHead
from lightly.models.modules.memory_bank import MemoryBankModule
from lightly.models.utils import (
    batch_shuffle,
    batch_unshuffle,
    deactivate_requires_grad,
    update_momentum,
)
from lightly.utils.scheduler import cosine_schedule
from torch import Tensor, nn
from torch.nn import functional as F

from fastsiam.bench.lightly import NAMES
from fastsiam.config import TrainConfig
from fastsiam.errors import BackendError
from fastsiam.model.backbones import build_backbone

Views = Sequence[Tensor]
"""Of each image: (N, 3, S, S) each, normalised."""


class Composed(nn.Module, ABC):
    """A method that is put together of lightly's parts.

    Args:
        config: of the run; its method is this one.
        steps_per_epoch: optimizer steps in an epoch.
    """

    usual: tuple[str, ...] = ()
    """Settings of ours that lightly lacks: they have to be as by default."""
    splits_bn: bool = False
    """Whether it can be trained with BN over a part of a batch."""

    def __init__(self, config: TrainConfig, *, steps_per_epoch: int) -> None:
        super().__init__()
        self.method: Any = config.model.method
        self.steps_per_epoch, self.total = steps_per_epoch, config.optim.epochs * steps_per_epoch
        self.backbone = build_backbone(config.model)

    def projection(
        self, hidden: int | None = None, *, last: nn.Module | None = None
    ) -> ProjectionHead:
        """Build a head with BN after its hidden layers, and ``last`` behind its output."""
        own, hidden = self.method, hidden or self.method.projector_dim
        widths = [self.backbone.features, *[hidden] * (own.projector_layers - 1)]
        blocks: list[Any] = [
            (width, to, nn.BatchNorm1d(to), nn.ReLU()) for width, to in pairwise(widths)
        ]
        return ProjectionHead([*blocks, (widths[-1], own.dim, last, None)])

    @abstractmethod
    def loss(self, views: Views, step: int) -> Tensor:
        """Return the loss of a batch; moves, before it, what no gradient moves.

        Args:
            views: of each image.
            step: optimizer step, from 0.
        """

    def constant(self) -> list[nn.Parameter]:
        """Return the parameters whose learning rate does not decay."""
        return []


class SimSiam(Composed):
    """SimSiam; and FastSiam, where there are more than two views."""

    usual = (
        *("predictor", "head_bn", "output_affine", "stop_gradient", "similarity", "symmetric"),
        *("alternate_every", "target_average", "encoder_momentum"),
    )

    def __init__(self, config: TrainConfig, *, steps_per_epoch: int) -> None:
        super().__init__(config, steps_per_epoch=steps_per_epoch)
        own = self.method
        last = nn.BatchNorm1d(own.dim, affine=False)
        self.projector = self.projection(own.projector_dim or own.dim, last=last)
        self.predictor = SimSiamPredictionHead(own.dim, own.predictor_dim, own.dim)
        self.criterion = NegativeCosineSimilarity()

    def loss(self, views: Views, step: int) -> Tensor:
        """Compare each view's prediction with the mean projection of the others."""
        z = [self.projector(self.backbone(view)) for view in views]
        p = [self.predictor(projection) for projection in z]
        fixed = [projection.detach() for projection in z]
        losses = []
        for i, prediction in enumerate(p):
            others = fixed[:i] + fixed[i + 1 :]
            losses.append(self.criterion(prediction, torch.stack(others).mean(0)))
        return torch.stack(losses).mean()

    def constant(self) -> list[nn.Parameter]:
        """Return the predictor's, if its rate is to be constant."""
        fixed = self.method.predictor_lr == "constant"
        return list(self.predictor.parameters()) if fixed else []


class SimCLR(Composed):
    """SimCLR."""

    usual = "predictor", "stop_gradient"

    def __init__(self, config: TrainConfig, *, steps_per_epoch: int) -> None:
        super().__init__(config, steps_per_epoch=steps_per_epoch)
        own = self.method
        self.projector = SimCLRProjectionHead(
            self.backbone.features, own.projector_dim, own.dim, num_layers=own.projector_layers
        )
        self.criterion = NTXentLoss(temperature=own.temperature)

    def loss(self, views: Views, step: int) -> Tensor:
        """Contrast both views of each image with all others."""
        first, second = (self.projector(self.backbone(view)) for view in views)
        loss: Tensor = self.criterion(first, second)
        return loss


class MoCoV2(Composed):
    """MoCo v2, symmetrised: both views are queries, their keys are the other's.

    The memory bank is asked once for both, so that no query meets the keys of its own batch in it.
    """

    usual = ("symmetric",)
    splits_bn = True

    def __init__(self, config: TrainConfig, *, steps_per_epoch: int) -> None:
        super().__init__(config, steps_per_epoch=steps_per_epoch)
        own = self.method
        if config.numerics.bn_images:
            _split_bn(self.backbone, config.optim.batch // config.numerics.bn_images)
        self.projector = MoCoProjectionHead(
            self.backbone.features, own.projector_dim, own.dim, num_layers=own.projector_layers
        )
        self.encoder = nn.Sequential(self.backbone, self.projector)
        self.momentum_encoder = copy.deepcopy(self.encoder)
        deactivate_requires_grad(self.momentum_encoder)
        self.criterion = NTXentLoss(
            temperature=own.temperature, memory_bank_size=(own.queue, own.dim)
        )

    def loss(self, views: Views, step: int) -> Tensor:
        """Contrast each view with the other's key and the memory bank, and let keys in there."""
        update_momentum(self.encoder, self.momentum_encoder, m=self.method.encoder_momentum)
        first, second = (self.encoder(view) for view in views)
        first_key, second_key = (self._key(view) for view in views)
        loss: Tensor = self.criterion(
            torch.cat([second, first]), torch.cat([first_key, second_key])
        )
        return loss

    @torch.no_grad()
    def _key(self, view: Tensor) -> Tensor:
        shuffled, order = batch_shuffle(view)
        keys: Tensor = batch_unshuffle(self.momentum_encoder(shuffled), order)
        return keys


class BYOL(Composed):
    """BYOL. Its loss is four times lightly's examples', to have the slope of its paper's.

    The paper adds up 2 - 2 cos of both directions; these take the mean of their -cos. With SGD the
    rate would not be the same.
    """

    def __init__(self, config: TrainConfig, *, steps_per_epoch: int) -> None:
        super().__init__(config, steps_per_epoch=steps_per_epoch)
        own = self.method
        self.encoder = nn.Sequential(self.backbone, self.projection())
        self.predictor = BYOLPredictionHead(own.dim, own.predictor_dim, own.dim)
        self.momentum_encoder = copy.deepcopy(self.encoder)
        deactivate_requires_grad(self.momentum_encoder)
        self.criterion = NegativeCosineSimilarity()

    def loss(self, views: Views, step: int) -> Tensor:
        """Predict each view's target from the other."""
        momentum = self.method.encoder_momentum
        if self.method.momentum_schedule == "cosine":
            momentum = cosine_schedule(step, self.total, momentum, 1.0)
        update_momentum(self.encoder, self.momentum_encoder, m=momentum)
        first, second = (self.predictor(self.encoder(view)) for view in views)
        with torch.no_grad():
            first_target, second_target = (self.momentum_encoder(view) for view in views)
        loss: Tensor = self.criterion(first, second_target) + self.criterion(second, first_target)
        return 2 * loss


class SwAV(Composed):
    """SwAV: the first two views are assigned to prototypes, and predicted from all others."""

    usual = "predictor", "stop_gradient"

    def __init__(self, config: TrainConfig, *, steps_per_epoch: int) -> None:
        super().__init__(config, steps_per_epoch=steps_per_epoch)
        own = self.method
        self.projector = self.projection()
        frozen = round(own.frozen_epochs * steps_per_epoch)
        self.prototypes = SwaVPrototypes(own.dim, own.prototypes, n_steps_frozen_prototypes=frozen)
        self.criterion = SwaVLoss(
            temperature=own.temperature,
            sinkhorn_iterations=own.sinkhorn_rounds,
            sinkhorn_epsilon=own.epsilon,
        )
        banks = [MemoryBankModule((own.queue, own.dim), feature_dim_first=False) for _ in range(2)]
        self.queues = nn.ModuleList(banks if own.queue else [])

    def loss(self, views: Views, step: int) -> Tensor:
        """Predict the assignments of two views from the others' scores."""
        self.prototypes.normalize()
        features = [F.normalize(self.projector(self.backbone(view)), dim=1) for view in views]
        scores = [self.prototypes(x, step) for x in features]
        queued = self._queued(features[:2], step)
        loss: Tensor = self.criterion(scores[:2], scores[2:], queued)
        return loss.squeeze()

    def _queued(self, features: Sequence[Tensor], step: int) -> list[Tensor] | None:
        """Let features into the queues, and return the scores of those that were there."""
        there = [queue(x, update=True)[1] for queue, x in zip(self.queues, features, strict=False)]
        if not there or step < self.method.queue_from * self.steps_per_epoch:
            return None
        return [self.prototypes(x, step) for x in there]


COMPOSED: dict[str, type[Composed]] = {
    "simsiam": SimSiam,
    "fastsiam": SimSiam,
    "simclr": SimCLR,
    "mocov2": MoCoV2,
    "byol": BYOL,
    "swav": SwAV,
}
"""What the methods are that lightly has the parts of."""
assert tuple(COMPOSED) == NAMES


def composed(config: TrainConfig, *, steps_per_epoch: int) -> Composed:
    """Build a run's method out of lightly's parts; seed torch before.

    Raises:
        BackendError: lightly cannot do what the settings ask for; names the setting.
    """
    method = config.model.method
    if method.name not in COMPOSED:
        raise BackendError(f"lightly's parts make {', '.join(NAMES)}, not {method.name}")
    kind, usual = COMPOSED[method.name], type(method)()
    changed = [name for name in kind.usual if getattr(method, name) != getattr(usual, name)]
    if changed:
        flag, value = changed[0].replace("_", "-"), getattr(usual, changed[0])
        raise BackendError(f"lightly's {method.name} has {flag} {value} alone: leave it so")
    if getattr(method, "projector_layers", 2) < 2:
        raise BackendError("lightly's heads have 2 layers or more: set projector-layers")
    if config.numerics.bn_images and not kind.splits_bn:
        raise BackendError(f"lightly's {method.name} has no BN of some images: no bn-images")
    if config.numerics.bn_images and config.optim.batch % config.numerics.bn_images:
        raise BackendError("lightly's BN of some images needs whole parts: set batch or bn-images")
    return kind(config, steps_per_epoch=steps_per_epoch)


def backbone_weights(model: Composed) -> dict[str, Tensor]:
    """Return the backbone's weights by torchvision's names; puts the model into eval mode."""
    model.eval()  # which makes split BN's statistics one
    found = model.backbone.state_dict()
    for name, module in model.backbone.named_modules():
        if isinstance(module, SplitBatchNorm):
            for statistic in ("running_mean", "running_var"):
                key = f"{name}.{statistic}"
                found[key] = found[key][: module.num_features].clone()
    return found


def _split_bn(network: nn.Module, splits: int) -> None:
    """Let each BN take its statistics of so many parts of a batch."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                split = SplitBatchNorm(child.num_features, splits)
                split.weight, split.bias = child.weight, child.bias
                setattr(module, name, split)
