"""A training step of a method of lightly's parts, by torch's SGD and the rates of a run."""

from __future__ import annotations

import torch

from fastsiam.bench.lightly.methods import Composed, Views
from fastsiam.config import TrainConfig
from fastsiam.errors import BackendError
from fastsiam.training.optim import decaying_rate, peak_lr


class Step:
    """Takes optimizer steps: loss, backward, SGD.

    Args:
        config: rates, momentum and weight decay.
        model: what is trained.

    Raises:
        BackendError: the settings ask for another optimizer, or for parts of a batch.
    """

    def __init__(self, config: TrainConfig, model: Composed) -> None:
        optim = config.optim
        if optim.optimizer != "sgd":
            raise BackendError(f"lightly's loop takes SGD's steps, not {optim.optimizer}'s")
        if optim.accumulate > 1:
            raise BackendError("lightly's loop takes whole batches: leave accumulate out")
        constant = model.constant()
        apart = {id(parameter) for parameter in constant}
        decaying = [
            parameter
            for parameter in model.parameters()
            if parameter.requires_grad and id(parameter) not in apart
        ]
        groups = [{"params": decaying}, *([{"params": constant}] if constant else [])]
        self.config, self.model = config, model
        self.optimizer = torch.optim.SGD(
            groups,
            lr=peak_lr(optim),
            momentum=optim.momentum,
            weight_decay=optim.weight_decay,
        )

    def __call__(self, views: Views, *, at: int) -> torch.Tensor:
        """Take a step, and return the loss before it.

        Args:
            views: (N, 3, S, S) each, normalised.
            at: its number, from 0.
        """
        self.optimizer.param_groups[0]["lr"] = decaying_rate(
            self.config.optim, at, self.model.steps_per_epoch
        )
        loss = self.model.loss(views, at)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()
