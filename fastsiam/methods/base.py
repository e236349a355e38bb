"""The interface of self-supervised methods, such as SimSiam, BYOL and MoCo v2.

Training, checkpoints, import, export, evaluation and benchmarks use only this interface. To add a
method, write a subclass of ``Method`` and a settings class that names its builder, and add the
settings class to ``fastsiam.config.METHOD_CONFIGS``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fastsiam.model.backbones import Backbone

from .momentum import MomentumEncoder

Schedule = Literal["cosine", "constant"]
"""Learning rate schedule: warm-up and cosine decay, or constant."""


class Output(NamedTuple):
    """Result of a method's forward pass."""

    loss: Tensor
    """Scalar float32, averaged over this rank's images."""
    embedding: Tensor
    """(N, d) embeddings of one view, as the loss compares them, detached; used to detect
    collapse."""
    carry: dict[str, Tensor]
    """Detached tensors that ``after_step`` needs from this pass; may be empty."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The position of a step in the schedule."""

    step: int
    """Step number, from 0."""
    steps_per_epoch: int
    total: int
    """Number of steps in the entire schedule."""

    @property
    def done(self) -> int:
        """Number of completed steps, including this one."""
        return self.step + 1

    @property
    def progress(self) -> float:
        """Fraction of the schedule completed before this step, in [0, 1)."""
        return self.step / self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroup:
    """Parameters with the same learning rate schedule and weight decay."""

    name: str
    params: list[nn.Parameter]
    schedule: Schedule = "cosine"
    weight_decay: float | None = None
    """None means that of the optimizer settings."""


class Method(nn.Module, ABC):
    """Base class of self-supervised methods: a backbone, its heads and a loss.

    All state, such as momentum encoders, queues and per-image rows, is in parameters and buffers,
    so it is saved, loaded and moved to a device like weights. Buffers must be equal on all ranks:
    ``after_step`` must gather the values that it writes to them (``fastsiam.distributed.gather``).

    Args:
        config: the method's settings.
        backbone: the network to train.
        images: number of images in the data set, for buffers with one row per image; 0 if the
            method will not be trained.
    """

    parts: tuple[str, ...]
    """Names of the submodules that are exported and that ``--init`` can load, in forward order: the
    backbone first, then modules that each take the output of the previous one."""

    @abstractmethod
    def __init__(self, config: Any, backbone: Backbone, *, images: int = 0) -> None:
        super().__init__()

    backbone: Backbone
    dim: int
    """Dimension of the embeddings."""
    views_together: bool = False
    """Whether adjacent views of the same size are processed as one batch; see ``by_view``."""

    @abstractmethod
    def forward(self, views: tuple[Tensor, ...], index: Tensor) -> Output:
        """Compute the loss of one batch. DDP wraps this method, so it does the entire forward pass.

        Args:
            views: one tensor per view, normalised; view v is (N, 3, S_v, S_v).
            index: (N,) int64 positions of the images in the data set.
        """

    def param_groups(self) -> list[ParamGroup]:
        """Return the trainable parameters, each in one group; the backbone is in the first group.

        The default is a single group of all parameters that require a gradient.
        """
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return [ParamGroup(name="all", params=trainable)]

    def start_from(self, weights: dict[str, Tensor]) -> None:
        """Load pretrained weights of some parts, and copy them to momentum encoders.

        Args:
            weights: all weights of one or more parts, with the keys of this method's state dict.
        """
        self.load_state_dict(self.state_dict() | weights)
        for module in self.modules():
            if isinstance(module, MomentumEncoder):
                module.copy_parts()

    def after_step(self, outputs: Sequence[Output], *, at: Moment) -> None:
        """Update state without gradients, such as queues, under ``no_grad`` after each step.

        Args:
            outputs: results of this rank's forward passes, one per micro-batch (``accumulate``).
            at: the step.
        """

    def before_optimizer(self, *, at: Moment) -> None:
        """Modify gradients before each optimizer step, for example drop those of frozen weights.

        Gradients are summed over micro-batches and averaged over ranks. With fp16 they are still
        multiplied by the loss scale, so set them only to zero or None, and do not clip them.

        Args:
            at: the step.
        """

    def by_view(self, views: Sequence[Tensor], *modules: nn.Module) -> list[tuple[Tensor, ...]]:
        """Apply modules to views in sequence, and return the outputs of every module.

        With ``views_together``, adjacent views of the same size are concatenated into one batch,
        for which the compiler generates faster kernels. Otherwise each view is a batch. In both
        cases BN normalises each view with its own statistics (``ViewBatchNorm``).

        Args:
            views: (N, 3, S_v, S_v) each.
            modules: the first takes the views, the others the output of the previous module.

        Returns:
            A tuple for each module: its output (N, ...) for each view.
        """
        images, batches = len(views[0]), list(views)
        if self.views_together:
            sizes = groupby(views, key=lambda view: view.shape[-1])
            batches = [torch.cat(list(group)) for _, group in sizes]
        outputs = []
        for module in modules:
            batches = [module(batch) for batch in batches]
            outputs.append(tuple(view for batch in batches for view in batch.split(images)))
        return outputs
