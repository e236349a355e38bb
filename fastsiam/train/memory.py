"""Memory use of training: an estimate before it starts, and the error when memory runs out."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fastsiam.config import TrainConfig
from fastsiam.distributed import Place
from fastsiam.errors import TrainingError, lacks_gpu_memory, lacks_memory
from fastsiam.methods import method_skeleton
from fastsiam.model.numerics import autocast_type

_COPIES_PER_WEIGHT = 3
"""Copies of each trained weight: the weight, its gradient and its momentum."""
_ACTIVATION_FACTOR = 1.5
"""Factor on the saved activations, for temporary tensors and fragmentation."""
_COPIES_PER_VIEW = 5
"""Largest number of float32 copies of a batch's views: prefetched, in use and in transfer."""
_GPU_BYTES = 2 * 2**30
"""GPU memory of the libraries' kernels and workspaces, and of the crops that evaluations cache."""


def training_bytes(config: TrainConfig, place: Place, *, images: int) -> float:
    """Estimate the memory that training needs on one rank, in bytes; errs on the high side.

    The backbone's forward pass runs on the meta device, where tensors have shapes but no memory.
    The sizes of the tensors that it saves for the backward pass are added up, in the autocast
    dtype. Heads save little and are ignored.

    Args:
        config: settings of the run; ``activation_memory`` is assumed to be 1.
        place: this rank.
        images: number of images in the data set, for methods that store one row per image.
    """
    method = method_skeleton(config.model, images=images)
    local = config.optim.batch // place.world
    micro_batch = max(1, config.optim.micro_batch(place.world))
    sides = [view.crop for view in config.augment.views]
    weights = list(method.parameters())
    storages: dict[int, Tensor] = {}

    def record_storage(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(record_storage, lambda tensor: tensor):
        for side in sides:
            method.backbone(torch.zeros(micro_batch, 3, side, side, device="meta"))
    for weight in weights:
        storages.pop(weight.untyped_storage()._cdata, None)
    item_bytes = autocast_type(config.numerics.precision, place.device).itemsize
    activations = sum(x.numel() * min(item_bytes, x.itemsize) for x in storages.values())
    state = sum(buffer.nbytes for buffer in method.buffers())
    state += sum(x.nbytes * (_COPIES_PER_WEIGHT if x.requires_grad else 1) for x in weights)
    pixels = local * 3 * sum(side * side for side in sides) * 4
    overhead = _GPU_BYTES if place.device.type == "cuda" else 0
    return state + _ACTIVATION_FACTOR * activations + _COPIES_PER_VIEW * pixels + overhead


def check_memory(error: BaseException, config: TrainConfig, *, at: int, saved: str) -> None:
    """Raise a TrainingError with advice if ``error`` means that memory ran out.

    A step may be incomplete, so the state is not saved.

    Args:
        error: raised by a step, a batch, an evaluation or the preparation of the steps.
        config: settings of the run.
        at: number of the step that was not finished.
        saved: text that names the last good checkpoint, or says that none exists.
    """
    if not lacks_memory(error):
        return
    is_gpu = lacks_gpu_memory(error)
    kind = "GPU memory" if is_gpu else "memory"
    flags = []
    if config.step.activation_memory > 0.5 and (config.model.is_own or config.step.compile == "on"):
        flags += ["--activation-memory 0.5"]
    pipeline = config.data.pipeline
    # Only dali prefetches into GPU memory. On the host, pipelines prefetch at least two batches.
    prefetching, least = ({"dali"}, 1) if is_gpu else ({"native", "ffcv", "dali"}, 2)
    if pipeline == "memory":
        flags += ["--pipeline native"]
    elif pipeline in prefetching and config.data.prefetch > least:
        flags += ["--prefetch 1"]
    if not is_gpu or pipeline == "dali":  # others have no GPU memory for each worker
        flags += ["fewer --workers"]
    if is_gpu and pipeline == "dali":
        flags += ["--pipeline native"]
    advice = f"to resume this run, pass {' or '.join(flags)}; " if flags else ""
    raise TrainingError(
        f"out of {kind} at step {at:,} with --batch {config.optim.batch:,}; {advice}a new run "
        f"needs less with a lower --batch or a higher --accumulate; {saved}"
    ) from error
