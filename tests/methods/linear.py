"""Methods on a linear backbone, in float64, for tests that compare them with formulas."""

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
from tests.methods.formulas import Array
from tests.train.runs import CPU

IMAGES, BATCH, STEPS = 24, 8, 3
"""Images of the data set, of a batch, and steps of an epoch."""
EPOCHS = 2


class Linear(Backbone):
    """A backbone of one linear map of the images, made 2 x 2 pixels by their means; perhaps BN."""

    features = 5

    def __init__(self, *, normed: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(12, self.features)
        self.norm: nn.Module = nn.BatchNorm1d(self.features) if normed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, 5) features of (N, 3, S, S) images, S even."""
        pooled = F.avg_pool2d(x, x.shape[-1] // 2)
        features: Tensor = self.norm(self.layer(pooled.flatten(1)))
        return features


def build(config: MethodConfig, seed: int = 0, *, normed: bool = False) -> Any:
    """Build a method on the linear backbone, no weight of it where it began."""
    torch.manual_seed(seed)
    method = resolve_name(config.builder)(config, Linear(normed=normed), images=IMAGES)
    method = method.double().train()
    for parameter in method.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    if "queue" in dict(method.named_buffers()):
        method.queue = method.queue.float()
    return method


def batch_of(views: int, step: int = 0, *, sides: Sequence[int] = ()) -> Batch:
    """Return images that differ in scale and place, the views less than the images do."""
    generator = torch.Generator().manual_seed(step)
    kwargs: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    images = torch.randn(BATCH, 3, 2, 2, **kwargs) + torch.randn(1, 3, 2, 2, **kwargs)
    found = tuple(
        F.interpolate(images, size=side) + 0.5 * torch.randn(BATCH, 3, side, side, **kwargs)
        for side in sides or [2] * views
    )
    # An epoch's order is another one in each: rows are written to and read from anywhere.
    epoch, place = divmod(step, STEPS)
    order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(100 + epoch))
    return Batch(found, order[place * BATCH :][:BATCH], torch.zeros(BATCH, dtype=torch.int64))


def views_of(batch: Batch) -> list[Array]:
    return [view.double().numpy() for view in batch.views]


COPIES = ("frozen.", "target.")
"""Where methods keep a copy of the encoder."""


def arrays(method: nn.Module, *, copied: bool = False) -> dict[str, Array]:
    """Return the weights of the parts as numbers; of the encoder's copy if there is one."""
    found = {
        name: value.detach().double().numpy().copy() for name, value in method.named_parameters()
    }
    if not copied:
        return {name: value for name, value in found.items() if not name.startswith(COPIES)}
    parts = {
        f"{copy}{i}.": own for copy in COPIES for i, own in enumerate(("backbone.", "projector."))
    }
    return {
        own + name.removeprefix(copy): value
        for name, value in found.items()
        for copy, own in parts.items()
        if name.startswith(copy)
    }


def step_of(method: Any, *, lr: float = 3.0, **settings: Any) -> TrainingStep:
    """Return the training step of a run of two epochs, at its beginning."""
    config = with_settings(rank_jobs.CONFIG, batch=BATCH, epochs=EPOCHS, lr=lr, **settings)
    backbone = method.backbone.state_dict().items()
    # A copy of the encoder has the weights that a run is given.
    method.start_from({f"backbone.{name}": 1.5 * value for name, value in backbone})
    step = TrainingStep(config, method, CPU, steps_per_epoch=STEPS)
    step.prepare()
    return step
