"""Training steps of lightly's parts at work on ready tensors."""

from __future__ import annotations

from importlib import metadata

import torch

from fastsiam.bench.contest import Work
from fastsiam.bench.contestants.step import Fed, Stepper, stepping
from fastsiam.bench.lightly import require_lightly
from fastsiam.config import TrainConfig
from fastsiam.views.batch import Batch


def build_lightly(*, config: TrainConfig) -> dict[str, Work]:
    """Build a method of lightly's parts; its work is some steps.

    Raises:
        BackendError: lightly is not installed, or lacks what the settings ask for.
    """
    require_lightly()
    return stepping(config, lightly_step)


def lightly_step(own: Fed) -> Stepper:
    """Return the step of lightly's examples: float32, eager, one forward for each view.

    ``channels_last`` is as the settings say, whatever the layout of the batches.
    """
    from fastsiam.bench.lightly.methods import composed
    from fastsiam.bench.lightly.step import Step
    from fastsiam.bench.lightly.training import laid_out_by_channels

    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    model = composed(own.config, steps_per_epoch=own.loader.steps).to(own.place.device).train()
    layout = torch.contiguous_format
    if laid_out_by_channels(own.config):
        layout = torch.channels_last
        model = model.to(memory_format=layout)
    step = Step(own.config, model)

    def take(batch: Batch) -> None:
        views = [view.float().contiguous(memory_format=layout) for view in batch.views]
        step(views, at=0)

    settings = {
        "precision": "fp32",
        "channels_last": layout == torch.channels_last,
        "compile": "off",
        "lightly": metadata.version("lightly"),
    }
    return Stepper(take, model, settings)
