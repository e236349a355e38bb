"""Settings of a job for SLURM, and which of them ``sbatch`` would refuse."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .checks import require
from .setting import Config, setting

_TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}")
"""sbatch(1), --time: minutes, minutes:seconds, hours:minutes:seconds, days-hours, ..."""
_SEEDS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmConfig(Config):
    """Job: what SLURM is asked for beside --nodes and --gpus."""

    time: str = setting(
        "24:00:00",
        "Time limit, as of sbatch: 24:00:00, 2-12 (days-hours). The run continues after it.",
    )
    partition: str = setting("", "Partition; default: the cluster's.")
    account: str = setting("", "Account that the job is charged to; default: yours.")
    name: str = setting("fastsiam", "Name of the job.")
    cpus: int = setting(12, "Cores for each rank, which load its images.", at_least=1)
    mem: str = setting(
        "", "Memory of each machine, such as 200G or 0 for all; default: the cluster's."
    )
    warning: int = setting(
        120,
        "Seconds before the time limit at which the run saves and goes into the queue again.",
        at_least=1,
    )
    requeues: int = setting(
        100, "How often it may go into the queue again; 0 is never.", at_least=0
    )
    seeds: str = setting(
        "", "An array of runs with these seeds, such as 0-4 or 0,2; each in a folder of its own."
    )
    sbatch: str = setting("", 'Other options of sbatch, such as "--constraint=h100 --exclusive".')

    def check(self) -> None:
        """Refuse what sbatch would refuse."""
        require(bool(_TIME.fullmatch(self.time)), f"time is as of sbatch, not {self.time!r}")
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
