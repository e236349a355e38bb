"""What this machine has: versions, processors, GPUs."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

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
    """Return what a figure or a run depends on, as plain JSON values."""
    import torch

    import fastsiam
    from fastsiam.kernels import library

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "fastsiam": fastsiam.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "packages": {"torch": torch.__version__}
        | {name: version for name in _PACKAGES if (version := _version(name))},
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "driver": _driver() if gpus else None,
        "cpu": _cpu(),
        "kernels": library.kind(),
        "cores": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
    }


def commit() -> str:
    """Return the commit of the source that this runs from, "" if it is none's."""
    home = Path(__file__).resolve().parents[1]
    if not (home / ".git").exists() or not shutil.which("git"):
        return ""
    git = ["git", "-C", str(home), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


def _driver() -> str | None:
    """Return the version of NVIDIA's driver."""
    version = Path("/sys/module/nvidia/version")
    if version.exists():
        return version.read_text().strip()
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if not shutil.which(command[0]):
        return None
    lines = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return lines[0] if lines else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def be_found_by_children() -> None:
    """Have the processes that this one starts find the package, from whatever folder."""
    home, known = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")
    if home not in (known or "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [home, known]))
