"""A method for tests alone, with everything that SimSiam lacks.

A momentum encoder, a queue of keys spread over ranks, a memory of one row for each image, three
views of two sizes, a schedule and a weight decay of each parameter group, and gradients that are
dropped for a while.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastsiam.config import METHOD_CONFIGS, MethodConfig, require
from fastsiam.config.setting import setting
from fastsiam.distributed import gather
from fastsiam.methods import Method, Moment, Output, ParamGroup
from fastsiam.model.backbones import Backbone
from fastsiam.model.losses import negative_cosine


@dataclass(frozen=True, slots=True, kw_only=True)
class EverythingConfig(MethodConfig):
    """Settings of the test's method."""

    name: ClassVar[str] = "everything"
    title: ClassVar[str] = "Everything"
    paper: ClassVar[str] = "a test"
    builder: ClassVar[str] = f"{__name__}:Everything"

    dim: int = setting(8, "Dimension of the embeddings.")
    queue: int = setting(20, "Keys in the queue.")
    target_momentum: float = setting(
        0.9, "Momentum of the target network at the start; it grows to 1."
    )

    def check_views(self, views: int) -> None:
        require(views == 3, f"everything takes three views, not {views}")


class Everything(Method):
    """The test's method."""

    parts = ("backbone", "head")
    queue: Tensor
    pointer: Tensor
    memory: Tensor

    def __init__(self, config: EverythingConfig, backbone: Backbone, *, images: int = 0) -> None:
        super().__init__(config, backbone, images=images)
        self.backbone, self.dim, self.momentum = backbone, config.dim, config.target_momentum
        self.head = nn.Sequential(
            nn.Linear(backbone.features, config.dim, bias=False), nn.BatchNorm1d(config.dim)
        )
        self.target = copy.deepcopy(nn.Sequential(self.backbone, self.head)).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.ones(config.queue, config.dim)))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))
        self.register_buffer("memory", torch.zeros(images, config.dim))

    def forward(self, views: tuple[Tensor, ...], index: Tensor) -> Output:
        _, (first, second, small) = self.by_view(views, self.backbone, self.head)
        with torch.no_grad():
            keys = F.normalize(self.target(views[0]).float())
        known = self.memory[index]
        others = F.normalize(second.float()) @ self.queue.T
        loss = negative_cosine(second, keys) + negative_cosine(small, keys)
        loss = (
            loss + 0.1 * others.logsumexp(1).mean() + 0.1 * (first.float() - known).square().mean()
        )
        carry = {"keys": keys, "rows": first.detach().float(), "index": index.clone()}
        return Output(loss, first.detach(), carry)

    def param_groups(self) -> list[ParamGroup]:
        return [
            ParamGroup(name="backbone", params=list(self.backbone.parameters())),
            ParamGroup(
                name="head",
                params=list(self.head.parameters()),
                schedule="constant",
                weight_decay=0.0,
            ),
        ]

    def start_from(self, weights: dict[str, Tensor]) -> None:
        super().start_from(weights)
        self._copy_target(0.0)

    def _copy_target(self, momentum: float) -> None:
        ours = nn.Sequential(self.backbone, self.head).parameters()
        for target, own in zip(self.target.parameters(), ours, strict=True):
            target.data.lerp_(own.data, 1 - momentum)

    def before_optimizer(self, *, at: Moment) -> None:
        if at.progress < 0.3:
            self.head[1].weight.grad = None

    def after_step(self, outputs: Sequence[Output], *, at: Moment) -> None:
        momentum = 1 - (1 - self.momentum) * (math.cos(math.pi * at.progress) + 1) / 2
        self._copy_target(momentum)
        keys, rows, index = (
            gather(torch.cat([output.carry[name] for output in outputs]))
            for name in ("keys", "rows", "index")
        )
        places = (self.pointer + torch.arange(len(keys), device=keys.device)) % len(self.queue)
        self.queue.index_copy_(0, places, keys)
        self.pointer.copy_((self.pointer + len(keys)) % len(self.queue))
        self.memory.index_copy_(0, index, rows)


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Let the method be known by its name inside."""
    before = METHOD_CONFIGS.get(EverythingConfig.name)
    METHOD_CONFIGS[EverythingConfig.name] = EverythingConfig
    try:
        yield
    finally:
        if before is None:
            del METHOD_CONFIGS[EverythingConfig.name]
