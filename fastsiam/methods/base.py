"""The interface of methods: SimSiam, its ablations and related methods.

The loop, the step, checkpoints, import, export, evaluation and benchmarks use this interface alone.
A new method needs a settings class that names its builder, a ``Method`` class, and a line in
``fastsiam.config.METHOD_CONFIGS``.
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
"""Schedule of a learning rate: warm-up and cosine decay, or constant."""


class Output(NamedTuple):
    """The result of a forward pass."""

    loss: Tensor
    """Scalar float32, the mean over this rank's images."""
    embedding: Tensor
    """(N, d) embeddings of one view that the loss compares, without gradient; used to detect
    collapse."""
    carry: dict[str, Tensor]
    """Tensors of this pass for ``after_step``, without gradient; may be empty."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The position of a step in the schedule."""

    step: int
    """Number of the step, from 0."""
    steps_per_epoch: int
    total: int
    """Steps of the whole schedule."""

    @property
    def done(self) -> int:
        """Number of steps done, including this one."""
        return self.step + 1

    @property
    def progress(self) -> float:
        """Share of the schedule before this step, in [0, 1)."""
        return self.step / self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroup:
    """Parameters that share a learning rate and a weight decay."""

    name: str
    params: list[nn.Parameter]
    schedule: Schedule = "cosine"
    weight_decay: float | None = None
    """None means the optimizer's default."""


class Method(nn.Module, ABC):
    """A method that trains a backbone without labels.

    All state (momentum encoders, queues, a row for each image) is in parameters and buffers, so
    that checkpoints and ranks handle it like weights. Buffers must be equal on all ranks:
    ``after_step`` gathers what it writes to them (``fastsiam.distributed.gather``).

    Args:
        config: the method's settings.
        backbone: the encoder.
        images: number of images in the data set, for buffers with one row per image; 0 if the
            method is not trained.
    """

    parts: tuple[str, ...]
    """Names of the modules that are exported and that ``--init`` can load, the backbone first. Each
    takes the output of the previous one."""

    @abstractmethod
    def __init__(self, config: Any, backbone: Backbone, *, images: int = 0) -> None:
        super().__init__()

    backbone: Backbone
    dim: int
    """Dimension of the embeddings."""
    views_together: bool = False
    """Whether views of the same size go through the layers as one batch; see ``by_view``."""

    @abstractmethod
    def forward(self, views: tuple[Tensor, ...], index: Tensor) -> Output:
        """Compute the loss of one batch, in a single call: DDP wraps this method.

        Args:
            views: view v of all images is (N, 3, S_v, S_v), normalised.
            index: (N,) int64 positions of the images in the data set.
        """

    def param_groups(self) -> list[ParamGroup]:
        """Return the trained parameters, each in one group; the backbone is in the first group.

        By default a single group has all parameters that require a gradient.
        """
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return [ParamGroup(name="all", params=trained)]

    def start_from(self, weights: dict[str, Tensor]) -> None:
        """Load the weights of some parts, and copy them to momentum encoders.

        Args:
            weights: weights of complete parts, by their names in this method's state dict.
        """
        self.load_state_dict(self.state_dict() | weights)
        for module in self.modules():
            if isinstance(module, MomentumEncoder):
                module.copy_parts()

    def after_step(self, outputs: Sequence[Output], *, at: Moment) -> None:
        """Update state that has no gradient, after the optimizer's step, under ``no_grad``.

        Args:
            outputs: outputs of this rank's forward passes, one for each accumulated part.
            at: the step.
        """

    def before_optimizer(self, *, at: Moment) -> None:
        """Change gradients before the optimizer's step, for example drop those of frozen weights.

        Gradients are summed over parts and averaged over ranks. With fp16 they are multiplied by
        the loss scale, so only set them to zero or None; do not compare them with thresholds.

        Args:
            at: the step.
        """

    def by_view(self, views: Sequence[Tensor], *modules: nn.Module) -> list[tuple[Tensor, ...]]:
        """Apply modules one after the other to views; return the outputs of each module.

        With ``views_together``, adjacent views of the same size are one batch, for which the
        compiler generates faster kernels; otherwise each view is a batch. BN normalises each view
        by its own statistics in both cases (``ViewBatchNorm``).

        Args:
            views: (N, 3, S_v, S_v) each.
            modules: the first takes the views, each other one the outputs of the one before.

        Returns:
            For each module, its outputs (N, ...) by view.
        """
        images, batches = len(views[0]), list(views)
        if self.views_together:
            sizes = groupby(views, key=lambda view: view.shape[-1])
            batches = [torch.cat(list(same)) for _, same in sizes]
        outputs = []
        for module in modules:
            batches = [module(batch) for batch in batches]
            outputs.append(tuple(view for batch in batches for view in batch.split(images)))
        return outputs
