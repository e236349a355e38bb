"""Ranks: where this process stands among them, how they are started, what they exchange.

One process drives one GPU (NCCL), or a share of the CPU's cores (gloo). All ranks run the same
program; torch's launcher tells each its number through the environment.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fastsiam.config import RunConfig
from fastsiam.errors import DeviceError


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands."""

    rank: int
    """Number of this process over all machines."""
    world: int
    """Number of processes over all machines."""
    device: torch.device
    """The device that it computes on."""

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0


def is_worker() -> bool:
    """Tell whether torch's launcher started this process."""
    return "LOCAL_RANK" in os.environ


def check_devices(config: RunConfig) -> None:
    """Refuse devices that are not there, before anything starts.

    Raises:
        DeviceError: says what is there and what to ask for.
    """
    there = torch.cuda.device_count()
    if config.device == "cpu":
        return
    if config.device == "cuda" and not there:
        raise DeviceError("--device cuda: torch sees no GPU here")
    if config.gpus > max(1, there):
        seen = f"{there} GPU{'' if there == 1 else 's'}" if there else "no GPU"
        raise DeviceError(
            f"--gpus {config.gpus}: torch sees {seen} here; ask for at most {max(1, there)}, "
            f"or add --device cpu for {config.gpus} processes on the CPU"
        )


def start(config: RunConfig) -> Place:
    """Take this process's place: choose the device and, with several ranks, meet the others."""
    check_devices(config)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if config.device != "cpu" and torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise DeviceError(
                f"rank {rank} is process {local_rank + 1} of this machine, which has "
                f"{torch.cuda.device_count()} GPUs; start one process for each GPU, "
                "or add --device cpu"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        if local_world > 1:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world))
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo")
    return Place(rank, world, device)


def peer_is_gone(error: BaseException) -> bool:
    """Tell whether a collective failed because another rank ended, which has said why itself."""
    text = str(error).lower()
    lost = isinstance(error, dist.DistError) or "closed by peer" in text or "reset by peer" in text
    return is_worker() and lost


def finish() -> None:
    """Part from the other ranks when all are done; after one's error it could wait for ever."""
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run ``fastsiam ARGUMENTS`` in several processes of this machine, by torch's elastic launcher.

    Returns:
        Exit code: 0, the first failed process's, or 128 + the signal that ended this one.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("agent.server.api", "multiprocessing.api"):  # the ranks speak for themselves
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.ERROR)
    home = str(Path(__file__).parents[1])  # so that the ranks find the package from any folder
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "fastsiam", *arguments)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def gather(tensor: Tensor) -> Tensor:
    """Concatenate equal-shaped tensors of all ranks along the first axis."""
    if not dist.is_initialized():
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def gather_uneven(tensor: Tensor) -> Tensor:
    """Concatenate tensors whose first axes differ in length, in the ranks' order."""
    if not dist.is_initialized():
        return tensor
    lengths = gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
    padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = gather(padded).split(max(lengths))
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def mean_across_ranks(tensor: Tensor) -> Tensor:
    """Average a tensor over the ranks."""
    if not dist.is_initialized():
        return tensor
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def minimum_across_ranks(tensor: Tensor) -> Tensor:
    """Return the smallest of the ranks' values, element by element."""
    if not dist.is_initialized():
        return tensor
    tensor = tensor.clone()
    dist.all_reduce(tensor, dist.ReduceOp.MIN)
    return tensor


def from_leader(text: str) -> str:
    """Return rank 0's text on every rank."""
    if not dist.is_initialized():
        return text
    box = [text]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def distribute(module: nn.Module, place: Place, *, sync_bn: bool) -> nn.Module:
    """Wrap a module that is on its device for data-parallel training; alone it stays as it is."""
    if place.world == 1:
        return module
    if sync_bn:
        on_gpu = place.device.type == "cuda"
        module = (
            nn.SyncBatchNorm.convert_sync_batchnorm(module) if on_gpu else to_cpu_sync_bn(module)
        )
    parameters = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    newer = "forward_sync_buffers" in parameters  # torch 2.13 renamed broadcast_buffers
    buffers: Any = {"forward_sync_buffers" if newer else "broadcast_buffers": not sync_bn}
    return nn.parallel.DistributedDataParallel(
        module,
        device_ids=[place.device] if place.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **buffers,  # synchronised BN keeps its statistics equal by itself
    )


class _SumOverRanks(torch.autograd.Function):
    """An all-reduce whose gradient is the all-reduce of the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def _sum_over_ranks(x: Tensor) -> Tensor:
    total: Tensor = _SumOverRanks.apply(x)
    return total


class CpuSyncBatchNorm(_BatchNorm):
    """Batch normalisation over the joint batch of all ranks, on the CPU (torch's own needs a GPU).

    For ranks with batches of equal size, which every loader here guarantees.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.dim() >= 2

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (N, C, ...) over all ranks and axes but C; running statistics as BatchNorm."""
        if not self.training:
            return super().forward(input)
        world = dist.get_world_size()
        axes = [axis for axis in range(input.dim()) if axis != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        x = input.float()
        mean = _sum_over_ranks(x.mean(axes)) / world
        centred = x - mean.view(shape)
        variance = _sum_over_ranks(centred.square().mean(axes)) / world
        if self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None and self.momentum is not None
            count = world * input.numel() // input.shape[1]
            with torch.no_grad():
                self.num_batches_tracked += 1
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(variance * count / max(1, count - 1), self.momentum)
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        y: Tensor = centred * scale.view(shape)
        if self.bias is not None:
            y = y + self.bias.view(shape)
        return y.to(input.dtype)


def to_cpu_sync_bn(module: nn.Module) -> nn.Module:
    """Turn a module's BatchNorms into ``CpuSyncBatchNorm``, parameters and buffers as they are."""
    for child in module.modules():
        if isinstance(child, _BatchNorm):
            child.__class__ = CpuSyncBatchNorm
    return module


class StopSignals:
    """Turns SIGINT and SIGTERM into a decision that all ranks take after the same step.

    A rank that got a signal says so in a one-number gloo all-reduce, which runs beside the next
    step: the host never waits for the device, and no rank stops while another waits for it in a
    collective. A second signal ends the process at once.
    """

    PATIENCE = 3.0
    """Seconds in which further signals are taken for the first one."""

    def __init__(self, place: Place) -> None:
        self._got, self._since = 0, 0.0
        self._alone = place.world == 1
        self._group = None if self._alone else dist.new_group(backend="gloo")
        self._vote: tuple[Tensor, dist.Work] | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if kind is None and self._vote:
            self._vote[1].wait()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._got:
            self._got, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > self.PATIENCE:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def after_step(self) -> int:
        """The signal that all ranks shall stop for now, or 0. Each rank calls it once a step."""
        if self._alone:
            return self._got
        agreed = 0
        if self._vote:
            self._vote[1].wait()
            agreed = int(self._vote[0])  # a CPU tensor: no wait for the device
        vote = torch.tensor(self._got)
        work = dist.all_reduce(vote, dist.ReduceOp.MAX, self._group, async_op=True)  # type: ignore[arg-type]
        assert work is not None
        self._vote = vote, work
        return agreed
