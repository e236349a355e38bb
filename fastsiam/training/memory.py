"""How much of a device's memory training takes: an estimate, before anything is there."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fastsiam.config import TrainConfig
from fastsiam.distributed import Place
from fastsiam.methods import method_skeleton
from fastsiam.training.numerics import autocast_type

_OF_EACH_WEIGHT = 3
"""The weight, its gradient and its momentum; one that no gradient moves has neither."""
_ACTIVATIONS = 1.5
"""What goes beyond the activations that the backward pass needs: those under way, gaps."""
_OF_EACH_VIEW = 5
"""Float32 copies of a batch's views at once, at most: made ahead, at work, under way."""
_GPU_BYTES = 2 * 2**30
"""Libraries' kernels and workspaces, and the central crops that evaluations keep."""


def training_bytes(config: TrainConfig, place: Place, *, images: int) -> float:
    """Estimate the memory of one rank's training, in bytes, rather too high than too low.

    The backbone goes forward on the meta device, where tensors have shapes and no memory. What it
    keeps for the backward pass is added up, as wide as the autocast type; heads keep little.

    Args:
        config: of the run; ``activation_memory`` below 1 is not counted on.
        place: this rank.
        images: in the data set, for methods that keep a row for each.
    """
    method = method_skeleton(config.model, images=images)
    local = config.optim.batch // place.world
    part = max(1, local // config.optim.accumulate)
    sides = [view.crop for view in config.augment.views]
    weights = list(method.parameters())
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        for side in sides:
            method.backbone(torch.zeros(part, 3, side, side, device="meta"))
    for weight in weights:
        kept.pop(weight.untyped_storage()._cdata, None)
    width = autocast_type(config.numerics.precision, place.device).itemsize
    activations = sum(x.numel() * min(width, x.itemsize) for x in kept.values())
    state = sum(buffer.nbytes for buffer in method.buffers())
    state += sum(x.nbytes * (_OF_EACH_WEIGHT if x.requires_grad else 1) for x in weights)
    pixels = local * 3 * sum(side * side for side in sides) * 4
    rest = _GPU_BYTES if place.device.type == "cuda" else 0
    return state + _ACTIVATIONS * activations + _OF_EACH_VIEW * pixels + rest
