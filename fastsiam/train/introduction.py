"""The messages before a run's first step: network, data, batch, learning rate, exports."""

from __future__ import annotations

from pathlib import Path

import torch

from fastsiam.console import Console, counted
from fastsiam.methods.optim import peak_lr
from fastsiam.train.resolve import ResolvedConfig
from fastsiam.views.batch import Loader


def introduce(console: Console, resolved: ResolvedConfig, loader: Loader, run: Path) -> None:
    """Print what is about to run, and the settings that results depend on."""
    config, place, start = resolved.config, resolved.place, resolved.start
    if place.device.type == "cpu" and config.run.device == "auto":
        console.say("no GPU found: training on the CPU")
    kind = torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else "CPU"
    local = config.optim.batch // place.world // config.optim.accumulate
    shared = (config.numerics.sync_bn_ranks or place.world) if config.numerics.sync_bn else 1
    bn = config.numerics.bn_images or local * shared
    console.say(
        f"{config.model.method.title} {config.model.backbone} on {place.world} x {kind}, "
        f"{str(resolved.dtype).removeprefix('torch.')}, pipeline {config.data.pipeline}: "
        f"{loader.images:,} images, {loader.steps:,} steps per epoch, "
        f"{counted(config.optim.epochs, 'epoch')}"
    )
    console.say(f"images from {loader.source}")
    console.say(
        f"global batch {config.optim.batch} ({local} images per rank and part; BN sees {bn}), "
        f"learning rate {peak_lr(config.optim):g} "
        f"({config.optim.lr:g} x {config.optim.batch} / 256), run folder {run}"
    )
    part = local * place.world
    doubts = config.model.method.doubts(images=loader.images, batch=part, groups=part // bn)
    for doubt in doubts:
        console.warn(doubt)
    if start is not None:
        console.say(f"resuming after step {start.step:,} (epoch {start.epoch:.2f})")
    if resolved.damaged:
        console.warn(resolved.damaged)
    for note in (*resolved.images.survey(), resolved.images.about_shuffle(config)):
        if note:
            console.say(note)
