"""Print the rooflines of docs/performance.md and docs/benchmarks/gpu.md: run this script.

Counts the least work and memory traffic of a training step, layer by layer, for one image: all its
views, forward and backward. Weights, their gradients and the optimizer are left out because a batch
shares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from fastsiam.config import TrainConfig
from fastsiam.config.recipes import RECIPES
from fastsiam.markdown import markdown
from fastsiam.methods import method_skeleton

FLOPS = 989e12  # FLOP/s of an H100 SXM and an H200, bfloat16, not sparse (NVIDIA's data sheets)
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}  # bytes/s of their memory
WIDTH = 2  # bytes per bfloat16


class Layer(NamedTuple):
    """The work of one layer for one image."""

    flops: float
    """Operations of matrix products and convolutions; a multiply-add counts as two."""
    elements: float
    """Numbers read and written if each layer has its own kernels.

    BN takes two passes in each direction: one for the statistics, and one that normalises, adds the
    shortcut and applies the ReLU.
    """
    fewest: float
    """Numbers read and written with one kernel per convolution and direction.

    BN, ReLU and shortcut are computed while reading the input. Such kernels do not exist, so this
    is a lower bound.
    """


def layers(config: TrainConfig) -> list[Layer]:
    """Count the work of a method's layers; each view passes once through every part."""
    method = method_skeleton(config.model).eval()  # in eval mode, BN accepts one image
    result: list[Layer] = []
    for side, views in config.augment.by_side.items():

        def count(
            module: nn.Module, inputs: Sequence[torch.Tensor], output: torch.Tensor,
            views: int = len(views),
        ) -> None:  # fmt: skip
            first = module is method.backbone.conv1
            if work := work_of(module, prod(inputs[0].shape), prod(output.shape), first=first):
                result.append(Layer(*(views * number for number in work)))

        hooks = [module.register_forward_hook(count) for module in method.modules()]
        x = torch.empty(1, 3, side, side, device="meta")
        for part in method.parts:
            x = method.get_submodule(part)(x)
        for hook in hooks:
            hook.remove()
    return result


def work_of(module: nn.Module, x: int, y: int, *, first: bool) -> Layer | None:
    """Return the work of a module that turns ``x`` numbers into ``y``; None if it has none."""
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        multiplied = prod(module.weight.shape[1:]) * y
        # Forward reads x and writes y. Both gradients read the gradient of y. The weight gradient
        # reads x. The input gradient, which the first layer does not compute, writes that of x.
        return Layer(
            flops=2 * multiplied * (2 if first else 3),
            elements=(x + y) + (y + x) + (0 if first else y + x),
            fewest=(x + y) + (2 * y + x) + (0 if first else x),
        )
    if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
        return Layer(0, (y + 2 * y) + (2 * y + 3 * y), 0)
    if isinstance(module, (BasicBlock, Bottleneck)):
        # Forward reads the shortcut to add it. Backward reads the sign of the sum twice and adds
        # the gradients of both branches.
        return Layer(0, y + 3 * y, y)
    if isinstance(module, nn.MaxPool2d):
        return Layer(0, 2 * (x + y), x + y)
    if isinstance(module, nn.AdaptiveAvgPool2d):
        return Layer(0, 2 * x, 0)
    return None


def seconds(counted: Sequence[Layer], *, fused: bool, device: str = "H200") -> float:
    """Return the least time per image; each layer is limited by compute or by memory."""
    return sum(
        max(
            layer.flops / FLOPS,
            (layer.fewest if fused else layer.elements) * WIDTH / BANDWIDTH[device],
        )
        for layer in counted
    )


def table() -> str:
    """Return the roofline table in Markdown."""
    recipes: dict[str, Any] = {
        "ResNet-50, 224 pixels": RECIPES["imagenet"],
        "ResNet-18, 32 pixels": RECIPES["cifar10"],
    }
    rows = []
    for name, recipe in recipes.items():
        recipe_layers = layers(recipe())
        flops, elements, fewest = (sum(column) for column in zip(*recipe_layers, strict=True))
        rows.append([
            name, f"{flops / 1e9:.1f}",
            f"{WIDTH * elements / 1e6:,.0f}", f"{1 / seconds(recipe_layers, fused=False):,.0f}",
            f"{WIDTH * fewest / 1e6:,.0f}", f"{1 / seconds(recipe_layers, fused=True):,.0f}",
        ])  # fmt: skip
    heads = [
        "one image (two views)", "GFLOP", "MB, a kernel for each layer", "images/s at most",
        "MB, lower bound", "images/s at most",
    ]  # fmt: skip
    return markdown(heads, rows)


def headline() -> str:
    """Return the table of the least minutes for FastSiam's 200 epochs of CIFAR-10's images."""
    config = RECIPES["fastsiam_cifar10"]()
    counted, images = layers(config), 50_000 * config.optim.epochs
    rows = []
    for device in BANDWIDTH:
        least = seconds(counted, fused=False, device=device)
        rows.append([device, f"{1 / least:,.0f}", f"{images * least / 60:.1f}"])
    return markdown(["", "images/s at most (four views)", "minutes for 200 epochs"], rows)


if __name__ == "__main__":
    print(f"{table()}\n\n{headline()}")
