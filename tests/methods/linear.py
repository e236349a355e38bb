"""Methods on a linear backbone in float64, for comparison with formulas."""

from __future__ import annotations

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastsiam.config import MethodConfig
from fastsiam.model.backbones import Backbone
from fastsiam.train.step import TrainingStep
from fastsiam.views.batch import Batch
from tests import rank_jobs
from tests.configs import with_settings
from tests.train.runs import CPU

IMAGES, BATCH, STEPS = 24, 8, 3
"""Images in the data set, images per batch, and steps per epoch."""
EPOCHS = 2


class Linear(Backbone):
    """A linear backbone: average pooling to 2 x 2 pixels, a linear map, and optional BN."""

    features = 5

    def __init__(self, *, normed: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(12, self.features)
        self.norm: nn.Module = nn.BatchNorm1d(self.features) if normed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, 5) features of (N, 3, S, S) images with even S."""
        pooled = F.avg_pool2d(x, x.shape[-1] // 2)
        features: Tensor = self.norm(self.layer(pooled.flatten(1)))
        return features


def build(config: MethodConfig, seed: int = 0, *, normed: bool = False) -> Any:
    """Build a method on the linear backbone, with noise added to all initial weights."""
    torch.manual_seed(seed)
    method = resolve_name(config.builder)(config, Linear(normed=normed), images=IMAGES)
    method = method.double().train()
    for parameter in method.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    if "queue" in dict(method.named_buffers()):
        method.queue = method.queue.float()
    return method


def batch_of(step: int = 0, *, sides: Sequence[int] = (2, 2)) -> Batch:
    """Return images of different scale and mean. Views of one image differ less than images do."""
    generator = torch.Generator().manual_seed(step)
    kwargs: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    images = torch.randn(BATCH, 3, 2, 2, **kwargs) + torch.randn(1, 3, 2, 2, **kwargs)
    views = tuple(
        F.interpolate(images, size=side) + 0.5 * torch.randn(BATCH, 3, side, side, **kwargs)
        for side in sides
    )
    # Each epoch has another order, so that per-image rows are accessed in any order.
    epoch, place = divmod(step, STEPS)
    order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(100 + epoch))
    return Batch(views, order[place * BATCH :][:BATCH], torch.zeros(BATCH, dtype=torch.int64))


COPIES = ("frozen", "target")
"""Names of the encoder's copies."""


def weights_of(method: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the weights, without those of the encoder's copy."""
    return {
        name: value.detach().clone()
        for name, value in method.named_parameters()
        if name.partition(".")[0] not in COPIES
    }


def copied_weights_of(method: nn.Module) -> dict[str, Tensor]:
    """Return the weights of the encoder's copy, with the encoder's names; {} without a copy."""
    for name in COPIES:
        if hasattr(method, name):
            backbone, projector = getattr(method, name)
            return weights_of(nn.ModuleDict({"backbone": backbone, "projector": projector}))
    return {}


def step_of(method: Any, **settings: Any) -> TrainingStep:
    """Return the training step of a run of two epochs, ready for its first step."""
    config = with_settings(rank_jobs.CONFIG, batch=BATCH, epochs=EPOCHS, lr=3.0, **settings)
    backbone = method.backbone.state_dict().items()
    # The copy of the encoder receives the initial weights of the run.
    method.start_from({f"backbone.{name}": 1.5 * value for name, value in backbone})
    step = TrainingStep(config, method, CPU, steps_per_epoch=STEPS)
    step.prepare()
    return step
