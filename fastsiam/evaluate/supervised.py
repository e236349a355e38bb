"""Training with labels: linear classifiers on frozen features, or fine-tuning of a network.

Linear evaluation follows the SimSiam paper (appendix A): pool5 features of a frozen backbone in
evaluation mode, LARS with a batch of 4096, 90 epochs, a cosine schedule, momentum 0.9 and no weight
decay. The base rate is 0.02 in the paper's text and 0.1 in its code; a public replication measured
66.0 and 67.8 with these. Several rates can be trained on the same features in one pass.

Fine-tuning follows SimCLR (Chen et al. 2020, appendix B.5), because the SimSiam paper does not have
it: SGD with Nesterov momentum 0.9, rate 0.05 x batch / 256 without warm-up, no weight decay, random
crops and flips; 60 epochs on 1% of the labels, 30 on 10%. SimCLR's batch is 4096, the default 256.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastsiam.config import NumericsConfig
from fastsiam.config.evaluate import FinetuneConfig, LinearConfig
from fastsiam.console import pace
from fastsiam.distributed import Place, bn_group, data_parallel, mean_across_ranks
from fastsiam.evaluate.accuracy import Accuracy
from fastsiam.evaluate.features import frozen_output
from fastsiam.evaluate.record_files import RecordFiles
from fastsiam.methods.optim import Lars, cosine, init_momentum_buffers
from fastsiam.model.batch_norm import use_view_batch_norm
from fastsiam.model.numerics import autocast


class Heads(nn.Module):
    """Several linear classifiers on the same features: (n, features) to (n, heads, classes).

    All start with the same weights, drawn from a normal distribution with standard deviation 0.01,
    and zero biases, as in the authors' code.
    """

    def __init__(self, heads: int, features: int, classes: int, *, seed: int) -> None:
        super().__init__()
        start = torch.randn(classes, features, generator=torch.Generator().manual_seed(seed)) / 100
        self.weight = nn.ParameterList(start.clone() for _ in range(heads))
        self.bias = nn.ParameterList(torch.zeros(classes) for _ in range(heads))

    def forward(self, features: Tensor) -> Tensor:
        """Return the scores of every head."""
        scores = F.linear(features, torch.cat([*self.weight]), torch.cat([*self.bias]))
        return scores.view(len(features), len(self.weight), len(self.bias[0]))


class Training:
    """Base class for resumable training on all ranks: network, optimizer, loop and saved state."""

    def __init__(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        dtype: torch.dtype,
        place: Place,
    ) -> None:
        self.network, self.optimizer = network, optimizer
        self.model = data_parallel(network, place, same_buffers=True)
        self.scaler = torch.amp.GradScaler(place.device.type, enabled=dtype == torch.float16)

    def step(self, number: int, batch: Any) -> Tensor:
        """Train on this rank's share of a batch; return its losses, on the device.

        Args:
            number: number of the step, from 0.
            batch: inputs and targets.
        """
        raise NotImplementedError

    def update(self, loss: Tensor) -> None:
        """Backpropagate a loss and take an optimizer step."""
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def check(self, step: int, losses: Tensor) -> None:
        """Raise an error if the state after ``step`` steps must not be saved.

        Args:
            losses: mean losses since the last checkpoint, over all ranks.
        """

    def run(
        self,
        batches: Callable[[int], Generator[Any]],
        *,
        steps: int,
        every: int,
        images: int,
        files: RecordFiles,
        on_checkpoint: Callable[[int, Tensor], str],
        unit: str = "step",
    ) -> int:
        """Train to the last step, from the start or from a saved state, and show the progress.

        Args:
            batches: called with a step; yields this rank's share of the batches from there on.
            steps: total number of steps.
            every: steps between two checkpoints, at which ``files`` may save the state.
            images: images per step, over all ranks.
            files: saves the state, and has the one to resume from.
            on_checkpoint: called after the state is saved, with the number of completed steps and
                the mean losses since the last checkpoint, over all ranks; returns text for the
                progress bar.
            unit: unit of the progress bar.

        Returns:
            Number of steps that were already done at the start.
        """
        console, first, text, began = files.console, 0, "", time.monotonic()
        if files.saved:
            first = files.saved["step"]
            self.load(files.saved["training"])
            files.saved = None  # the next training starts over
            console.say(f"resuming after {unit} {first:,} of {steps:,}")
        losses: list[Tensor] = []
        with console.progress(steps, first, unit), closing(batches(first)) as stream:
            for done, batch in enumerate(stream, start=first + 1):
                losses.append(self.step(done - 1, batch))
                if done % every == 0 or done == steps:
                    mean_losses = mean_across_ranks(torch.stack(losses).mean(0))
                    losses.clear()
                    self.check(done, mean_losses)
                    files.save_state(done, self.state, last=done == steps)
                    text = on_checkpoint(done, mean_losses)
                speed = (done - first) * images / max(time.monotonic() - began, 1e-9)
                remaining = pace(speed, (steps - done) * images)
                console.advance(done, f"{text}{remaining}", place=f" of {steps:,}")
        return first

    def state(self) -> dict[str, Any]:
        """Return the state for ``load``."""
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])


class SupervisedTraining(Training):
    """Training of linear classifiers on features, one per base rate, or of a backbone with one.

    Heads are independent: the loss is the sum over heads. Rates follow a cosine schedule per step.

    LARS computes norms per parameter, so heads do not affect each other. As in the authors' code,
    it adapts all parameters, including biases. It does not scale the step of a parameter whose
    weights or gradient are zero.

    Args:
        config: resolved settings: the actual batch and epochs, no "auto".
        backbone: for fine-tuning, maps (N, 3, S, S) to (N, features); trained in place. None for
            linear evaluation, whose inputs are features (n, features).
        features: dimensions of the features.
        place: this rank; BN statistics are computed over all ranks.
    """

    def __init__(
        self,
        config: LinearConfig | FinetuneConfig,
        backbone: nn.Module | None = None,
        *,
        features: int,
        classes: int,
        steps_per_epoch: int,
        dtype: torch.dtype = torch.float32,
        place: Place,
    ) -> None:
        self.rates = config.lrs if isinstance(config, LinearConfig) else (config.lr,)
        self.steps = config.epochs * steps_per_epoch
        """Total number of steps."""
        self._peaks = [rate * config.batch / 256 for rate in self.rates]
        self._classes, self._device, self._dtype = classes, place.device, dtype
        heads = Heads(len(self.rates), features, classes, seed=config.seed).to(place.device)
        network: nn.Module = heads
        optimizer: torch.optim.Optimizer
        shared: dict[str, Any] = {"momentum": config.momentum, "weight_decay": config.weight_decay}
        if isinstance(config, LinearConfig):
            groups = [{"params": [w, b]} for w, b in zip(heads.weight, heads.bias, strict=True)]
            if config.optimizer == "lars":
                optimizer = Lars(groups, lr=0.0, **shared, trust=config.lars_trust, adapt_all=True)
            else:
                optimizer = torch.optim.SGD(groups, lr=0.0, **shared)
        else:
            assert backbone is not None
            network = nn.Sequential(backbone, heads)
            network.to(place.device).to(memory_format=torch.channels_last)
            if (group := bn_group(place, NumericsConfig())) is not None:
                use_view_batch_norm(network, group=group)
            shared |= {"nesterov": config.momentum > 0, "fused": True}
            optimizer = init_momentum_buffers(
                torch.optim.SGD(network.parameters(), lr=0.0, **shared)
            )
        super().__init__(network, optimizer, dtype=dtype, place=place)

    def step(self, number: int, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Train on inputs and labels (n,); return each head's loss, on the device."""
        inputs, labels = batch
        self.network.train()
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = cosine(peak, number, total=self.steps)
        with autocast(self._device, self._dtype):
            scores = self.model(inputs)
        losses = torch.stack([F.cross_entropy(o, labels) for o in scores.float().unbind(1)])
        self.update(losses.sum())
        return losses.detach()

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> list[Accuracy]:
        """Classify this rank's inputs, each once; return every head's accuracy over all ranks."""
        self.network.eval()
        accuracies = [Accuracy(self._classes, self._device) for _ in self.rates]
        for inputs, labels in batches:
            scores = frozen_output(self.network, inputs, dtype=self._dtype)
            for accuracy, head_scores in zip(accuracies, scores.unbind(1), strict=True):
                accuracy.add(head_scores, labels)
        return [accuracy.over_ranks() for accuracy in accuracies]
