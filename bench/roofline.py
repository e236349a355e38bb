"""The least that a training step has to compute and to move, and so the least time it can take.

Counted layer by layer for one image, which is all of its views, forward and backward. Weights,
their gradients and the optimizer are left out: a batch shares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from fastsiam.config import TrainConfig
from fastsiam.methods import method_skeleton


@dataclass(frozen=True)
class Layer:
    """The work of one layer for one image."""

    flops: float
    """Operations of matrix products and convolutions; a multiply-add is two."""
    elements: float
    """Numbers that are read and written if each layer has kernels of its own.

    A convolution forward, its two gradients; BN as a pass for the statistics and one that
    normalises, adds the shortcut and takes the ReLU, and the same backward.
    """
    fewest: float
    """Numbers that are read and written by one kernel for each convolution and direction.

    BN, ReLU and shortcut are computed as their input is read; sums over the batch as the output is
    written. Nobody has such kernels: it is a bound.
    """


@dataclass(frozen=True)
class Machine:
    """What a machine does at most."""

    flops: float
    """Operations a second, in matrix products."""
    bytes: float
    """Bytes a second, to and from memory."""
    width: int = 2
    """Bytes of a number: 2 for bfloat16."""


def layers(config: TrainConfig) -> list[Layer]:
    """Count the work of a method's layers for one image.

    Each view goes once through each of the method's parts, forward and backward; what else a method
    does, with a momentum encoder for instance, is left out.
    """
    method = method_skeleton(config.model).eval()  # BN of one image: only the shapes matter
    found: list[Layer] = []
    for side, views in config.augment.by_side.items():
        hooks = [
            module.register_forward_hook(
                _counting(found, views=len(views), first=module is method.backbone.conv1)
            )
            for module in method.modules()
        ]
        x = torch.empty(1, 3, side, side, device="meta")
        for part in method.parts:
            x = method.get_submodule(part)(x)
        for hook in hooks:
            hook.remove()
    return found


def floor(config: TrainConfig, machine: Machine, *, fused: bool = False) -> float:
    """Return the least seconds for one image: each layer takes what its slower resource takes.

    Args:
        config: what is trained.
        machine: on what.
        fused: count the fewest bytes, not those of a kernel for each layer.
    """
    return sum(
        max(
            layer.flops / machine.flops,
            (layer.fewest if fused else layer.elements) * machine.width / machine.bytes,
        )
        for layer in layers(config)
    )


def measured(rates: Mapping[str, float]) -> Machine:
    """Make a machine of what ``bench machine`` measured, by the names of its work, in bytes and
    operations a second; of the types for matrix products the faster one counts."""
    half, full = (rates[f"matrix product, {name}"] for name in ("bfloat16", "float32"))
    return Machine(max(half, full), rates["copy within memory"], 2 if half > full else 4)


def _counting(found: list[Layer], *, views: int, first: bool) -> Any:
    def hook(module: nn.Module, inputs: Sequence[torch.Tensor], output: torch.Tensor) -> None:
        x, y = (prod(tensor.shape) for tensor in (inputs[0], output))
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            multiplied = prod(module.weight.shape[1:]) * y
            # Forward reads x and writes y; both gradients read that of y; one writes that of x,
            # which nobody wants of the images, the other reads x.
            work = Layer(
                flops=2 * multiplied * (2 if first else 3),
                elements=(x + y) + (y + x) + (0 if first else y + x),
                fewest=(x + y) + (2 * y + x) + (0 if first else x),
            )
        elif isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            work = Layer(0, (y + 2 * y) + (2 * y + 3 * y), 0)
        elif isinstance(module, (BasicBlock, Bottleneck)):
            # The shortcut is read and added; backward the sum's sign is asked for twice, and the
            # gradients of both branches meet.
            work = Layer(0, y + 3 * y, y)
        elif isinstance(module, nn.MaxPool2d):
            work = Layer(0, 2 * (x + y), x + y)
        elif isinstance(module, nn.AdaptiveAvgPool2d):
            work = Layer(0, 2 * x, 0)
        else:
            return
        found.append(Layer(views * work.flops, views * work.elements, views * work.fewest))

    return hook
