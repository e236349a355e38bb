"""A training run of lightly's parts, loader and transform, with the settings of one of ours."""

from __future__ import annotations

import math
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fastsiam.bench.lightly.methods import Composed, backbone_weights, composed
from fastsiam.bench.lightly.step import Step
from fastsiam.bench.lightly.views import loader
from fastsiam.bench.measure import cpu_seconds
from fastsiam.config import TrainConfig
from fastsiam.console import Console
from fastsiam.environment import environment
from fastsiam.errors import FastSiamError, TrainingError
from fastsiam.files import explained, write_json
from fastsiam.interchange import plain, weight_files
from fastsiam.interchange.loading import snippet
from fastsiam.interchange.pretrained import Input, Pretrained
from fastsiam.pipelines import open_training_images
from fastsiam.pipelines.workers import count as count_workers
from fastsiam.training.numerics import keep_freed_memory

WEIGHTS, RESULT = "backbone.pt", "result.json"
"""Files of a run: a plain file of the backbone, and what is known of the run."""


def train(config: TrainConfig, recipe: str) -> dict[str, Any]:
    """Train, and leave the backbone and the result in the run's folder.

    Args:
        config: all settings; ``run.out`` is the folder. Nothing is compiled, and precision is
            float32. ``channels_last`` holds for this loop as for ours.
        recipe: name of the recipe that the settings are changes of.

    Returns:
        The result: losses, seconds, processor seconds, settings and versions.

    Raises:
        BackendError: lightly's parts lack a setting.
        DataError: the images cannot be read.
        TrainingError: the loss is no number any more.
        FastSiamError: the folder cannot be written.
    """
    out = Path(config.run.out)
    with explained(FastSiamError, f"cannot write {out}"):
        out.mkdir(parents=True, exist_ok=True)
    use_gpu = config.run.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if use_gpu else "cpu")
    if not use_gpu:
        keep_freed_memory()
    images = open_training_images(config.data, batch=config.optim.batch)
    batches = loader(config, images, workers=max(0, count_workers(config.data.workers)))
    torch.manual_seed(config.numerics.seed)
    model = composed(config, steps_per_epoch=len(batches)).to(device)
    if laid_out_by_channels(config):
        model = model.to(memory_format=torch.channels_last)
    wall, cpu = time.perf_counter(), cpu_seconds()
    losses = _train(config, model, batches, device)
    result = {
        "method": config.model.method.name,
        "lightly": metadata.version("lightly"),
        "data": config.data.data,
        "images": len(images),
        "seed": config.numerics.seed,
        "epochs": config.optim.epochs,
        "steps": config.optim.epochs * len(batches),
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": cpu_seconds() - cpu,
        "losses": losses,
        "weights": str(out / WEIGHTS),
    }
    _write(config, model, out / WEIGHTS)
    about = {"recipe": recipe, "config": config.to_dict(), "environment": environment()}
    write_json(out / RESULT, result | about)
    return result


def laid_out_by_channels(config: TrainConfig) -> bool:
    """Tell whether convolutions run channels last, which lightly's split BN cannot."""
    return config.numerics.channels_last and not config.numerics.bn_images


def _train(config: TrainConfig, model: Composed, batches: Any, device: torch.device) -> list[float]:
    """Train, and return the mean loss of each epoch."""
    step, console, losses = Step(config, model.train()), Console(), []
    layout = torch.channels_last if laid_out_by_channels(config) else torch.contiguous_format
    for epoch in range(config.optim.epochs):
        seen = torch.zeros((), device=device)
        for number, views in enumerate(batches, start=epoch * len(batches)):
            moved = [view.to(device, memory_format=layout, non_blocking=True) for view in views]
            seen += step(moved, at=number)
        losses.append(seen.item() / len(batches))
        if not math.isfinite(losses[-1]):
            raise TrainingError(f"the loss is {losses[-1]} in epoch {epoch + 1}: lower --lr")
        console.say(f"epoch {epoch + 1}/{config.optim.epochs}: loss {losses[-1]:.4f}")
    return losses


def _write(config: TrainConfig, model: Composed, path: Path) -> None:
    """Write a plain file of the backbone."""
    weights = {key: value.cpu().contiguous() for key, value in backbone_weights(model).items()}
    trained = Pretrained(
        path=path,
        layout="lightly",
        model=config.model,
        state={f"backbone.{key}": value for key, value in weights.items()},
        epoch=float(config.optim.epochs),
        config=None,
        images=None,
        left_out=(),
        input=Input.of(config),
    )
    content = plain.content(trained, weights, snippet(trained, "plain", path.name))
    weight_files.write(path, content, weight_files.write_torch)
