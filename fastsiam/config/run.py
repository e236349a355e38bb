"""Settings of a run's machines, folder and SLURM job."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from .setting import Config, check_name, require, setting

DEFAULT_PORT = 29500
"""Port of ``--rendezvous`` if it does not include one."""
LONGEST_WAIT = 1e9
"""Maximum timeout in seconds; gloo counts nanoseconds in 64 bits."""
TRACKERS = ("tensorboard", "wandb", "mlflow")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesConfig(Config):
    """Machines: number, devices, and how several machines connect."""

    nodes: int | str = setting(
        1,
        "Number of machines, or MIN:MAX to continue with fewer if some are lost and with more if "
        "some join. Run the same command on each.",
    )
    rendezvous: str = setting(
        "", "With several machines: HOST:PORT, the address of one of them and a free port there."
    )
    rendezvous_timeout: float = setting(
        600.0,
        "With several machines: seconds to wait for the others at a start or restart.",
        above=0,
        at_most=LONGEST_WAIT,
    )
    gpus: int = setting(
        1, "GPUs per machine, one process each. With --device cpu: number of processes.", at_least=1
    )
    device: Literal["auto", "cuda", "cpu"] = setting(
        "auto", "auto: the GPU if there is one, else the CPU."
    )
    rank_timeout: float = setting(
        120.0,
        "With several ranks: seconds that a rank waits for the others, slow reading and "
        "compilation included, before all ranks exit with an error.",
        above=0,
        at_most=LONGEST_WAIT,
    )

    def check(self) -> None:
        """Check the number of machines and the rendezvous."""
        require(
            bool(re.fullmatch(r"\d+(:\d+)?", str(self.nodes)))
            and 1 <= self.min_nodes <= self.max_nodes,
            f"nodes must be a number of machines, or MIN:MAX, not {self.nodes!r}",
        )
        require(
            self.max_nodes == 1 or bool(self.rendezvous),
            f"nodes {self.nodes} needs rendezvous: HOST:PORT of one of the machines",
        )
        if self.rendezvous:
            _ = self.meeting

    def check_given(self, given: Collection[str]) -> None:
        """Raise if a rendezvous is given for a single machine."""
        require(
            not (self.rendezvous and "rendezvous" in given and self.max_nodes == 1),
            "rendezvous is for several machines: pass --nodes too, or leave it out",
        )

    @property
    def min_nodes(self) -> int:
        """Minimum number of machines on which ranks start."""
        return int(str(self.nodes).partition(":")[0])

    @property
    def max_nodes(self) -> int:
        """Maximum number of machines on which ranks start."""
        return int(str(self.nodes).rpartition(":")[2])

    @property
    def worlds(self) -> list[int]:
        """Numbers of ranks with which the command may run, in ascending order."""
        return [number * self.gpus for number in range(self.min_nodes, self.max_nodes + 1)]

    @property
    def meeting(self) -> tuple[str, int]:
        """Host and port of ``--rendezvous``.

        Raises:
            ValueError: it is not HOST or HOST:PORT.
        """
        pattern = r"(?P<host>[^][:/?#@\s]+|\[[0-9a-fA-F:.]+\])(:(?P<port>\d{1,5}))?"
        match = re.fullmatch(pattern, self.rendezvous)
        port = int(match["port"] or DEFAULT_PORT) if match else 0
        require(
            0 < port < 2**16,
            f"rendezvous must be HOST:PORT, such as node1:29500, not {self.rendezvous!r}",
        )
        assert match is not None
        return match["host"].strip("[]"), port


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(NodesConfig):
    """Run: resuming, output folder, metrics and checkpoints."""

    max_restarts: int = setting(
        0,
        "With several ranks: how often each machine restarts them from the last checkpoint after "
        "a rank fails, is killed or hangs, or a machine is lost.",
        at_least=0,
    )
    numa_binding: bool = setting(
        True, "With several GPUs: bind each process to its GPU's NUMA node.", option=False
    )
    out: str = setting("", "Run folder. Default: runs/<time>-<recipe>.")
    init: str = setting(
        "",
        "Initial weights: a run, a checkpoint or a weights file of another program. Heads that are "
        "missing or differ in size are initialised randomly.",
    )
    resume: str = setting(
        "auto",
        "auto: resume from the last checkpoint in --out, if any. never: start a new run; fail if "
        "--out contains a run. PATH of a run or checkpoint: resume it with its settings; with "
        "another --out, branch off into that folder, with other optimizer settings if given.",
    )
    extend: int = setting(
        0,
        "Extend a run to this total number of epochs, with one cosine over all of them. 0: off.",
        at_least=0,
    )
    data_changed: Literal["refuse", "accept"] = setting(
        "refuse",
        "If a resumed run's data lost or gained files: refuse to resume, or accept this one "
        "change. The remaining images keep their order and augmentations, some of them replace "
        "missing ones, and new images are not used.",
    )
    tracker: str = setting(
        "tensorboard",
        "Where to log metrics in addition to metrics.jsonl: tensorboard, wandb, mlflow, several "
        "(tensorboard,wandb), or none. Their environment variables set project and server "
        "(WANDB_PROJECT, MLFLOW_TRACKING_URI, ...).",
    )
    log_every: int = setting(50, "Steps between log lines.", at_least=1)
    save_every: int = setting(
        1000, "Steps between checkpoints; a killed run repeats at most this many.", at_least=1
    )
    max_steps: int = setting(
        0, "Stop after this many steps of the full schedule; 0: no limit.", at_least=0
    )

    def check(self) -> None:
        """Check the machines, the trackers and that ``resume`` is not empty."""
        NodesConfig.check(self)
        require(bool(self.resume), "resume must be auto, never or a path, not empty")
        known = TRACKERS if "," in self.tracker else (*TRACKERS, "none")
        for name in self.trackers:
            check_name("tracker", name, known)

    def check_given(self, given: Collection[str]) -> None:
        """Raise if a single machine has a rendezvous, or a resumed run initial weights."""
        NodesConfig.check_given(self, given)
        names_run = self.resume not in ("auto", "never")
        require(
            not (self.init and names_run and {"init", "resume"} <= set(given)),
            f"resume {self.resume} continues with the run's weights, init starts a new run: "
            "choose one",
        )

    @property
    def trackers(self) -> tuple[str, ...]:
        """Names of the trackers, without duplicates."""
        return () if self.tracker == "none" else tuple(dict.fromkeys(self.tracker.split(",")))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmConfig(Config):
    """Job: SLURM options in addition to --nodes and --gpus."""

    time: str = setting(
        "24:00:00",
        "Time limit of a job, as for sbatch: 24:00:00 or 2-12 (days-hours). A requeued job "
        "resumes the run.",
    )
    partition: str = setting("", "Partition to submit to. Default: the cluster's.")
    account: str = setting("", "Account that the job is charged to. Default: yours.")
    name: str = setting("fastsiam", "Name of the job.")
    cpus: int = setting(12, "CPU cores per rank, for loading images.", at_least=1)
    mem: str = setting(
        "", "Memory per machine, such as 200G, or 0 for all of it. Default: the cluster's."
    )
    warning: int = setting(
        120, "Seconds before the time limit at which the run saves and is requeued.", at_least=1
    )
    requeues: int = setting(
        100, "Maximum number of times that the job is requeued; 0: never.", at_least=0
    )
    seeds: str = setting(
        "", "Job array with one run per seed, such as 0-4 or 0,2, each in its own folder."
    )
    sbatch: str = setting("", 'Further options of sbatch, such as "--constraint=h100 --exclusive".')

    def check(self) -> None:
        """Check the values that the script uses; sbatch checks its own options."""
        require(
            not self.seeds or bool(re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", self.seeds)),
            f"seeds must be numbers and ranges, such as 0-4 or 0,2, not {self.seeds!r}",
        )
        for first, last in re.findall(r"(\d+)-(\d+)", self.seeds):
            require(int(first) <= int(last), f"seeds {first}-{last}: the smaller number goes first")
        require(
            bool(re.fullmatch(r"[\w.,:=@+-]+", self.name)),
            f"name may have letters, digits and . , : = @ + - _ only, not {self.name!r}",
        )
        for option in ("time", "partition", "account", "mem"):
            value = getattr(self, option)
            require(not re.search(r"\s", value), f"{option} must not contain spaces: {value!r}")
        require("\n" not in self.sbatch, f"sbatch must be one line, not {self.sbatch!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyConfig(Config):
    """Verify: which steps to recompute, and on which data."""

    step: int = setting(
        0, "Verify only the log line of this step, from 1, and list its images; 0: all.", at_least=0
    )
    data: str = setting("", "Data, as for train, if they were moved. Default: the run's.")
    image_column: str = setting("", "Image column. Default: the run's, if its data are used.")
    label_column: str = setting("", "Label column. Default: the run's, if its data are used.")
