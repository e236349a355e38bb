"""Rank and device of this process."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fastsiam.child_process import is_worker
from fastsiam.collectives import peer_is_gone, peer_is_late, sum_across_ranks
from fastsiam.config.run import NodesConfig
from fastsiam.console import format_count
from fastsiam.environment import gpu_count
from fastsiam.errors import DeviceError

from .rank_cores import take_cores

_TIMEOUT = timedelta(seconds=NodesConfig().rank_timeout)
_BEFORE_NCCL = timedelta(seconds=60)
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class Place:
    """Rank and device of this process."""

    rank: int
    """Rank of this process, over all machines."""
    world: int
    """Number of processes over all machines."""
    device: torch.device
    """The device of this process."""
    timeout: timedelta = _TIMEOUT
    """Timeout of collectives on the host."""

    @property
    def device_timeout(self) -> timedelta:
        """Timeout of collectives on the device.

        It is longer than the host's, so that the votes of ``StopSignals`` on the host fail first.
        NCCL would abort the process with pages of output.
        """
        return self.timeout + (_BEFORE_NCCL if self.device.type == "cuda" else timedelta())

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which writes files and prints messages."""
        return self.rank == 0


def check_devices(config: NodesConfig) -> None:
    """Check that the requested devices exist.

    Raises:
        DeviceError: a requested device does not exist.
    """
    if config.device == "cpu":
        return
    gpus = gpu_count()
    if config.device == "cuda" and not gpus:
        raise DeviceError("--device cuda: torch finds no GPU; pass --device cpu")
    if config.gpus > max(1, gpus) and not is_worker():  # torchrun's number replaces --gpus
        count = format_count(gpus, "GPU") if gpus else "no GPU"
        raise DeviceError(
            f"--gpus {config.gpus}: torch finds {count}; pass at most --gpus {max(1, gpus)}, or "
            f"add --device cpu for {config.gpus} processes on the CPU"
        )


def assigned_rank_and_world() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks, from the launcher's variables.

    Raises:
        DeviceError: some of the launcher's variables are missing, one is not a number, or a rank is
            not below the number of ranks.
    """
    for name in _VARIABLES:
        if not (value := os.environ.get(name, "0")).isdecimal():
            raise DeviceError(f"{name} must be a number, not {value!r}: run `unset {name}` first")
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    required = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if world > 1 else ()
    if rank or is_worker():
        required = ("WORLD_SIZE", *required)
    if missing := [name for name in required if name not in os.environ]:
        present = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in os.environ]
        raise DeviceError(
            f"{', '.join(present)} set without {', '.join(missing)}: start ranks with --gpus or "
            f"torchrun, or run `unset {' '.join(present)}` first"
        )
    for name, number in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        index, count = int(os.environ.get(name, "0")), os.environ.get(number)
        if count is not None and index >= int(count):
            raise DeviceError(
                f"{name} must be below {number}, but they are {index} and {count}: start ranks "
                f"with --gpus or torchrun, or run `unset {' '.join(_VARIABLES)}` first"
            )
    return rank, world


def start(config: NodesConfig, *, numa_binding: bool = True) -> Place:
    """Choose this process's device and cores; with several ranks, initialise the process group.

    Args:
        config: number of machines and ranks, devices and timeouts.
        numa_binding: with several ranks, whether each uses the cores of its GPU's NUMA node.

    Raises:
        DeviceError: a requested device or a variable of the launcher is missing, or the ranks
            cannot connect.
    """
    check_devices(config)
    rank, world = assigned_rank_and_world()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if config.device != "cpu" and torch.cuda.is_available():
        if local_rank >= (count := torch.cuda.device_count()):
            gpus, visible = format_count(count, "GPU"), os.environ.get("CUDA_VISIBLE_DEVICES")
            problem = f"which has {gpus};"
            if visible:
                problem = (
                    f"but it sees {gpus} (CUDA_VISIBLE_DEVICES={visible}); let every rank see all "
                    "GPUs of the machine,"
                )
            raise DeviceError(
                f"rank {rank} is process {local_rank + 1} of this machine, {problem} start one "
                "process for each GPU, or add --device cpu"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    take_cores(device, beside_gpu=numa_binding)
    place = Place(rank, world, device, timedelta(seconds=config.rank_timeout))
    if world > 1 and not dist.is_initialized():
        try:
            meet(place)
        except (RuntimeError, ValueError) as error:  # ValueError: MASTER_PORT is not a port
            if peer_is_gone(error) or peer_is_late(error):
                raise
            raise DeviceError(
                f"the ranks cannot connect: {' '.join(str(error).split())}; check the launcher and "
                "the network (MASTER_PORT, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
            ) from error
    return place


def meet(place: Place) -> None:
    """Initialise the process group; on GPUs connect at once, so that errors are raised here."""
    on_gpu = place.device.type == "cuda"
    store, *_ = next(rendezvous("env://", place.rank, place.world, timeout=place.timeout))
    store.set_timeout(place.timeout)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # The agent's store survives a restart and still contains addresses of exited ranks.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"fastsiam/restart-{restart}", store)
    dist.init_process_group(
        "cuda:nccl,cpu:gloo" if on_gpu else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.world,
        timeout=place.device_timeout,
        device_id=place.device if on_gpu else None,
    )


def wait_for_failed_rank() -> None:
    """Wait until a rank that failed has printed its error and exited.

    If this rank exited first, a launcher would kill the other one, which may still close its
    trackers.
    """
    with contextlib.suppress(RuntimeError):  # raised when the connection to that rank closes
        sum_across_ranks(torch.zeros(1))


def finish() -> None:
    """Destroy the process group. Call it when all ranks are done: after an error it may hang."""
    if dist.is_initialized():
        dist.destroy_process_group()
