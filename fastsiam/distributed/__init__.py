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

from fastsiam.config import NumericsConfig, RunConfig
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


def complete(table: Tensor, shares: Sequence[int]) -> None:
    """Fill in the rows that other ranks hold, in place.

    Args:
        table: of the same shape on every rank; each holds rows of its own.
        shares: how many rows are each rank's, in their order.
    """
    if dist.is_initialized():
        for rank, rows in enumerate(table.split(list(shares))):
            dist.broadcast(rows, src=rank)


def sum_across_ranks(tensor: Tensor) -> Tensor:
    """Add up a tensor over the ranks."""
    if not dist.is_initialized():
        return tensor
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def mean_across_ranks(tensor: Tensor) -> Tensor:
    """Average a tensor over the ranks."""
    return sum_across_ranks(tensor) / (dist.get_world_size() if dist.is_initialized() else 1)


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


def from_all(text: str) -> list[str]:
    """Return every rank's text, in their order, on every rank."""
    if not dist.is_initialized():
        return [text]
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


def bn_group(place: Place, config: NumericsConfig) -> dist.ProcessGroup | None:
    """Return the ranks that share BN statistics with this one, none if it is alone.

    Every rank calls it: the groups are ``sync_bn_ranks`` ranks in a row, or all ranks. They are not
    the group that gradients are exchanged in: NCCL would have each of BN's exchanges wait for the
    gradients that went before.
    """
    size = config.sync_bn_ranks or place.world
    if place.world == 1 or not config.sync_bn or size == 1:
        return None
    starts = range(0, place.world, size)
    groups = [dist.new_group(list(range(start, start + size))) for start in starts]
    own: dist.ProcessGroup = groups[place.rank // size]  # type: ignore[assignment]
    return own


def data_parallel(
    module: nn.Module, place: Place, *, bucket_mb: int, same_buffers: bool
) -> nn.Module:
    """Wrap a module that is on its device for data-parallel training; alone it stays as it is.

    Args:
        module: whose gradients are averaged over the ranks, while the backward pass goes on.
        place: this rank.
        bucket_mb: gradients that are exchanged at once, in MB.
        same_buffers: whether buffers are the same on all ranks, by themselves.
    """
    if place.world == 1:
        return module
    parameters = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    newer = "forward_sync_buffers" in parameters  # torch 2.13 renamed broadcast_buffers
    buffers: Any = {"forward_sync_buffers" if newer else "broadcast_buffers": not same_buffers}
    return nn.parallel.DistributedDataParallel(
        module,
        device_ids=[place.device] if place.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_mb,
        **buffers,
    )


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
