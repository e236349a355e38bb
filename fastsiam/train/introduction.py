"""The messages before a run's first step: network, data, batch, learning rate, exports."""

from __future__ import annotations

from pathlib import Path

import torch

from fastsiam import distributed
from fastsiam.config import ModelConfig, TrainConfig
from fastsiam.console import Console, counted, size
from fastsiam.distributed import Place
from fastsiam.interchange import exports_of
from fastsiam.methods import image_rows, method_skeleton
from fastsiam.methods.optim import peak_lr
from fastsiam.train.resolve import ResolvedConfig
from fastsiam.views.batch import Loader


def introduce(console: Console, resolved: ResolvedConfig, loader: Loader, run: Path) -> None:
    """Print what is about to run, and the settings that results depend on."""
    config, place, start = resolved.config, resolved.place, resolved.start
    if place.device.type == "cpu" and config.run.device == "auto":
        console.say("no GPU found: training on the CPU")
    if idle := idle_gpus(config, place):
        console.say(idle)
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
    if kept := extra_state(config.model, loader.images):
        console.say(kept)
    console.say(exports_of(config.model))
    if start is not None:
        console.say(f"resuming after step {start.step:,} (epoch {start.epoch:.2f})")
    if resolved.damaged:
        console.warn(resolved.damaged)
    for note in (*resolved.images.survey(), resolved.images.about_shuffle(config)):
        if note:
            console.say(note)


def extra_state(model: ModelConfig, images: int) -> str:
    """Return a message on what a method stores besides trained weights; "" if that is nothing."""
    parts = []
    weights = list(method_skeleton(model).parameters())
    if still := sum(weight.nbytes for weight in weights if not weight.requires_grad):
        trained = sum(weight.nbytes for weight in weights) - still
        parts.append(f"{size(still)} of untrained weights beside {size(trained)} of trained ones")
    for name, row in image_rows(model).items():
        kind = str(row.dtype).removeprefix("torch.")
        shape = " x ".join(f"{n:,}" for n in (images, *row.shape[1:]))
        parts.append(
            f"a row of {name} for each image ({shape} {kind}: {size(images * row.nbytes)})"
        )
    return f"on every rank and in every checkpoint: {'; '.join(parts)}" if parts else ""


def idle_gpus(config: TrainConfig, place: Place) -> str:
    """Return a message if this machine has more GPUs than ``--gpus`` uses, else "".

    It is empty if another launcher, such as torchrun, chose the GPUs.
    """
    there = torch.cuda.device_count() if place.device.type == "cuda" else 0
    asked = config.run.gpus * config.run.max_nodes
    ours = place.world == asked == config.run.gpus and (
        place.world > 1 or not distributed.is_worker()
    )
    if not ours or place.world >= there:
        return ""
    return f"training on {place.world} of {there} GPUs; --gpus {there} uses all"
