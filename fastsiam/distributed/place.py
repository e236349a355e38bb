"""Where this process stands among the ranks, and which device it has."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

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
