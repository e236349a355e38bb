"""What a method is: the one interface behind which SimSiam, its ablations and its relatives differ.

The loop, the step, checkpoints, import and export, evaluation and bench know nothing else of a
method. A method of its own is its settings, which name what builds it, a class, and a line in
``fastsiam.config.METHOD_CONFIGS``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fastsiam.model.backbones import Backbone

Schedule = Literal["cosine", "constant"]
"""How a learning rate continues: with warm-up and cosine, or always the same."""


class Output(NamedTuple):
    """What a forward pass returns."""

    loss: Tensor
    """Scalar float32, the mean over this rank's images."""
    embedding: Tensor
    """(N, d) what the loss compares, of one view, without gradient: for the collapse monitors."""
    carry: dict[str, Tensor]
    """What ``after_step`` needs of this pass, without gradient; empty if nothing."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a run is: the step that is being taken."""

    step: int
    """Its number, from 0."""
    steps_per_epoch: int
    total: int
    """Steps of the whole schedule."""

    @property
    def done(self) -> int:
        """Steps that will be done after it."""
        return self.step + 1

    @property
    def progress(self) -> float:
        """Share of the training that was done before it, 0 to below 1."""
        return self.step / self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroup:
    """Parameters that share a learning rate and a weight decay."""

    name: str
    params: list[nn.Parameter]
    schedule: Schedule = "cosine"
    weight_decay: float | None = None
    """None is the optimizer's own."""


class Method(nn.Module, ABC):
    """A way to train a backbone without labels.

    All state lies in parameters and buffers (momentum encoders, queues, a row for each image), so
    it is saved, resumed and spread over ranks as weights are. Buffers stay equal on all ranks:
    ``after_step`` gathers what it puts into them (``fastsiam.distributed.gather``).

    Args of a method's constructor: its settings; the backbone; ``images``, how many the data set
    holds, for memories of one row per image (0 where nothing is trained).
    """

    parts: tuple[str, ...]
    """Names of the modules that ``--init`` may take over and that are exported, the backbone
    first; each takes what the one before it returns."""

    @abstractmethod
    def __init__(self, config: Any, backbone: Backbone, *, images: int = 0) -> None:
        super().__init__()

    backbone: Backbone
    dim: int
    """Dimension of the embeddings."""
    views_together: bool = False
    """Whether views of one size go through the layers as one batch; see ``joined``."""

    @abstractmethod
    def forward(self, views: tuple[Tensor, ...], index: Tensor) -> Output:
        """Compute the loss of one batch; all of it, because several ranks reduce one forward.

        Args:
            views: of each image; view v is (N, 3, S_v, S_v), normalised.
            index: (N,) int64 positions of the images in the data set.
        """

    @abstractmethod
    def param_groups(self) -> list[ParamGroup]:
        """Return what is trained, each parameter once; the backbone is in the first group."""

    def start_from(self, weights: dict[str, Tensor]) -> None:
        """Take over the weights of some parts; override it where a momentum encoder follows them.

        Args:
            weights: by their names in this method's state: of whole parts.
        """
        self.load_state_dict(self.state_dict() | weights)

    def after_step(self, outputs: Sequence[Output], *, at: Moment) -> None:
        """Move what no gradient moves, after the optimizer's step; called without gradients.

        Args:
            outputs: of this rank's forward passes: one for each accumulated part.
            at: the step.
        """

    def before_optimizer(self, *, at: Moment) -> None:
        """Change the gradients before the optimizer's step: drop those of frozen prototypes, say.

        They are summed over parts and averaged over ranks. With fp16 they are scaled by the loss
        scale: set them to zero or None, and leave thresholds out.

        Args:
            at: the step.
        """

    def joined(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Return the batches in which the layers take the views.

        They are the views themselves, or with ``views_together`` one batch of those neighbours
        that have one size, which the compiler makes faster kernels for.

        BN normalises each view by its own statistics in both cases (``ViewBatchNorm``).
        """
        if not self.views_together:
            return list(views)
        batches: list[list[Tensor]] = []
        for view in views:
            if batches and batches[-1][0].shape == view.shape:
                batches[-1].append(view)
            else:
                batches.append([view])
        return [torch.cat(batch) for batch in batches]

    @staticmethod
    def apart(outputs: Sequence[Tensor], images: int) -> tuple[Tensor, ...]:
        """Take apart what became of ``joined`` batches: (N, ...) for each view."""
        return tuple(view for output in outputs for view in output.split(images))
