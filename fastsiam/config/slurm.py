"""Settings of a job for SLURM, and which of them ``sbatch`` would refuse."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .checks import require, require_at_least_one

_TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}")
"""sbatch(1), --time: minutes, minutes:seconds, hours:minutes:seconds, days-hours, ..."""
_SEEDS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmConfig:
    """Job: what SLURM is asked for beside --nodes and --gpus."""

    time: str = "24:00:00"
    """Time limit, as of sbatch: 24:00:00, 2-12 (days-hours). The run goes on after it."""
    partition: str = ""
    """Partition; default: the cluster's."""
    account: str = ""
    """Account that the job is charged to; default: yours."""
    name: str = "fastsiam"
    """Name of the job."""
    cpus: int = 12
    """Cores for each rank, which load its images."""
    mem: str = ""
    """Memory of each machine, such as 200G or 0 for all; default: the cluster's."""
    warning: int = 120
    """Seconds before the time limit at which the run saves and goes into the queue again."""
    requeues: int = 100
    """How often it may go into the queue again; 0 is never."""
    seeds: str = ""
    """An array of runs with these seeds, such as 0-4 or 0,2; each in a folder of its own."""
    sbatch: str = ""
    """Other options of sbatch, such as "--constraint=h100 --exclusive"."""

    def __post_init__(self) -> None:
        require(bool(_TIME.fullmatch(self.time)), f"time is as of sbatch, not {self.time!r}")
        require_at_least_one(self, "cpus", "warning")
        require(self.requeues >= 0, f"requeues must be 0 or more, not {self.requeues}")
        require(
            not self.seeds or bool(_SEEDS.fullmatch(self.seeds)),
            f"seeds are numbers and ranges, such as 0-4 or 0,2, not {self.seeds!r}",
        )
        for option in ("name", "partition", "account", "mem"):
            value = getattr(self, option)
            require(not re.search(r"\s", value), f"{option} has no spaces: {value!r}")
        for text in self.sbatch.split():
            good = re.fullmatch(r"--[a-z][\w-]*(=\S+)?", text)
            require(bool(good), f"sbatch takes options as --option=value, not {text!r}")
