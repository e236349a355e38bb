"""Facts about this machine: versions, CPU, GPUs, free memory. Does not import torch."""

from __future__ import annotations

import contextlib
import platform
import shutil
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from fastsiam.console import format_count
from fastsiam.kernels import cores

if TYPE_CHECKING:
    import torch

LOADING_PEAK = 1.2
"""Peak memory of loading images into memory, as a multiple of their decoded size."""
USABLE = 0.8
"""Share of the free memory that loading may use."""
_PACKAGES = (
    "torchvision",
    "numpy",
    "pillow",
    "timm",
    "pycocotools",
    "nvidia-dali-cuda120",
    "nvidia-dali-cuda130",
    "ffcv",
    "triton",
)


def environment() -> dict[str, Any]:
    """Return the software versions and hardware that results depend on, as JSON values."""
    import torch

    import fastsiam
    from fastsiam.kernels import library

    gpus = [torch.cuda.get_device_name(i) for i in range(gpu_count())]
    driver = Path("/sys/module/nvidia/version")
    packages: dict[str, str] = {"torch": torch.__version__}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return {
        "fastsiam": fastsiam.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "packages": packages,
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "driver": driver.read_text().strip() if gpus and driver.exists() else None,
        "cpu": cores.cpu_info("model name") or platform.processor() or platform.machine(),
        "kernels": library.kind(),
        "cores": cores.cores(),
        "platform": platform.platform(),
    }


def hardware(environment: Mapping[str, Any]) -> str:
    """Describe the cores, CPU and GPUs of an ``environment`` in words."""
    cpu = f"{format_count(environment['cores'], 'core')} of {environment['cpu']}"
    return f"{cpu}, {', '.join(environment['gpus']) or 'no GPU'}"


def commit() -> str:
    """Return the commit of the source tree, or "" outside a git repository."""
    home = Path(__file__).resolve().parents[1]
    if not (home / ".git").exists() or not shutil.which("git"):
        return ""
    git = ["git", "-C", str(home), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


def gpu_count() -> int:
    """Return the number of GPUs that torch can use.

    ``device_count`` alone asks the driver, which may be too old for this torch.
    """
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def free_bytes(device: torch.device) -> int:
    """Return this rank's free memory in bytes: on its GPU, or its share of the host's."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    return host_memory()[0] // cores.local_ranks()


def host_memory() -> tuple[int, int]:
    """Return free and total memory in bytes: the host's, or a control group's if less is free."""
    machine = psutil.virtual_memory()
    return min([(machine.available, machine.total), *_control_groups()])


def _control_groups() -> list[tuple[int, int]]:
    """Return the free memory and the limit, in bytes, of each of this process's cgroups (v1 or v2).

    The inactive file cache counts as free, because the kernel reclaims it when memory is needed.
    """
    limits = []
    for home, controller, limit, used, cached in (
        ("sys/fs/cgroup", "", "memory.max", "memory.current", "inactive_file"),
        (
            "sys/fs/cgroup/memory",
            "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        for group in cores.control_groups(home, controller):
            with contextlib.suppress(OSError, ValueError, KeyError):  # "max": no limit
                limit_bytes, used_bytes = (
                    int((group / name).read_text()) for name in (limit, used)
                )
                lines = (group / "memory.stat").read_text().splitlines()
                stat = dict(line.split() for line in lines)
                limits.append((max(0, limit_bytes - used_bytes + int(stat[cached])), limit_bytes))
    return limits
