"""The error of a run that is out of memory: the batch, the peak, and what to lower."""

from __future__ import annotations

import resource
import sys

import torch

from fastsiam.config import TrainConfig
from fastsiam.console import size
from fastsiam.distributed import Place
from fastsiam.errors import TrainingError, lacks_memory


def oom_error(
    error: BaseException, config: TrainConfig, place: Place, *, at: int, saved: object
) -> TrainingError | None:
    """Return the error to raise if another one is about memory, else None.

    A step may be half done, so nothing is saved.

    Args:
        error: of a step, a batch or an evaluation.
        config: settings of the run.
        place: this rank.
        at: the step that was not finished.
        saved: as a string, where the last good state is.
    """
    if not lacks_memory(error):
        return None
    gpu = place.device.type == "cuda" and not isinstance(error, MemoryError)
    batch = config.optim.batch
    local = f" ({batch // place.world:,} images on each of {place.world} ranks)"
    return TrainingError(
        f"out of {'GPU memory' if gpu else 'memory'} at step {at:,} with --batch {batch:,}"
        f"{local if place.world > 1 else ''}: {_peak(place, gpu=gpu)}; "
        f"{_lower(config, gpu=gpu)}; {saved}"
    )


def _peak(place: Place, *, gpu: bool) -> str:
    """Return the peak of the memory that was used, as text."""
    if gpu:
        peak = torch.cuda.max_memory_allocated(place.device)
        whole = torch.cuda.get_device_properties(place.device).total_memory
        return f"tensors took {size(peak)} of {size(whole)} at their peak"
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return f"this process took {size(peak)} at its peak"


def _lower(config: TrainConfig, *, gpu: bool) -> str:
    """Return what needs less memory: first what the same run can continue with."""
    ways = []
    if config.step.activation_memory > 0.5:
        ways.append("--activation-memory 0.5")
    if config.data.prefetch > 1:
        ways.append("--prefetch 1")
    if not gpu and config.data.workers != 0:
        ways.append("fewer --workers")
    if gpu:
        ways.append("more --gpus")
    same = f"the same run goes on with {', '.join(ways)}; " if ways else ""
    return f"{same}a new one takes less with a lower --batch or a higher --accumulate"
