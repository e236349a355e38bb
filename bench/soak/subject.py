"""A run under test: its command, its processes, its folder, and how it is held to another."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastsiam import checkpoint as checkpoints
from fastsiam.bench.soak.vitals import Vitals, look, processes_of
from fastsiam.config import Pipeline
from fastsiam.errors import CheckpointError
from fastsiam.pipelines.backends import CEILING
from fastsiam.training.log import read_metrics

EVERY = 1.0
"""Seconds between two looks at a run."""
_SETTLED = 6.0
"""Seconds after the first step of a stretch from which what it holds is looked at."""
IMAGES = 96
"""Images to train on."""
_COMPARED = ("kind", "step", "epoch", "loss", "z_std", "rank", "lr", "top1", "seen")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is trained."""

    pipeline: Pipeline
    data: Path
    steps: int
    ranks: int
    seed: int

    @property
    def epochs(self) -> int:
        """Passes over the data, if there are any."""
        return max(1, self.steps * self.batch // IMAGES) if self.pipeline != CEILING else 1

    @property
    def batch(self) -> int:
        """Images of a global batch."""
        return 8 * self.ranks

    def command(self, out: Path) -> list[str]:
        """Return the command that begins the run, or goes on with it."""
        settings = {
            "recipe": "cifar10",
            "data": self.data,
            "pipeline": self.pipeline,
            "workers": 1,
            "device": "cpu",
            "gpus": self.ranks,
            "rank-timeout": 60,
            "backbone": "resnet10",
            "width": 4,
            "projector-layers": 2,
            "dim": 32,
            "predictor-dim": 8,
            "crop": 16,
            "batch": self.batch,
            "epochs": self.epochs,
            "max-steps": self.steps,
            "seed": self.seed,
            "precision": "fp32",
            "compile": "off",
            "knn-every": max(1, self.epochs // 4),
            "knn-k": 5,
            "log-every": 1,
            "save-every": 5,
            "tracker": "none",
            "out": out,
        }
        words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        return [sys.executable, "-m", "fastsiam", "train", *words]


@dataclass(slots=True)
class Subject:
    """A run at work, or between two starts."""

    plan: Plan
    out: Path
    mark: str
    """A variable of the environment, NAME=VALUE, that all its processes have and no other."""
    stretches: list[list[tuple[float, Vitals]]] = field(default_factory=list)
    """Of each stretch of work without a fault, what was held when."""
    starts: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _first: float | None = None
    """When the first step since the start was seen."""
    _seen: int = 0
    """Step at the last look."""
    _since: float = 0.0
    """When this stretch began."""

    @property
    def log(self) -> Path:
        """What it prints, all starts of it."""
        return self.out.with_suffix(".log")

    @property
    def pid(self) -> int:
        """The launcher's process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Begin the run, or go on with it, in a session of its own."""
        name, _, value = self.mark.partition("=")
        environment = {**os.environ, name: value, "OMP_NUM_THREADS": "1"}
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.plan.command(self.out),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.starts += 1
        self._first = None
        self.interrupt_looks()

    def poll(self) -> int | None:
        """Return the exit code, or None while it is at work."""
        assert self._process is not None
        return self._process.poll()

    @property
    def exit_code(self) -> int:
        """How it ended: 128 + the signal, if one ended it."""
        assert self._process is not None
        code = self._process.wait()
        return 128 - code if code < 0 else code

    @property
    def is_training(self) -> bool:
        """Whether a step was taken since it was started."""
        return self._first is not None

    def interrupt_looks(self) -> None:
        """Begin a new stretch: what follows is other work than what was before."""
        self.stretches.append([])
        self._since = time.monotonic()

    def look(self, *, step_at_start: int) -> None:
        """Note what it holds if it trains, once its first steps are over."""
        now, before = time.monotonic(), self._seen
        self._seen = self.step
        if self._seen in (before, step_at_start):
            return  # it starts, evaluates or ends
        if self._first is None:
            self._first = now
        if now - max(self._first, self._since) > _SETTLED:
            self.stretches[-1].append((now, look(processes_of(self.mark))))

    @property
    def step(self) -> int:
        """Steps whose lines are written."""
        return max((line.get("step", 0) for line in read_metrics(self.out)), default=0)

    @property
    def speed(self) -> float:
        """Steps a second of training, by its last line."""
        lines = [line for line in read_metrics(self.out) if line["kind"] == "train"]
        return float(lines[-1]["step"] / lines[-1]["seconds"]) if lines else 1.0

    def wait(self, seconds: float) -> int | None:
        """Wait for the end; return the exit code, or None if it did not come."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def wait_for_all(self, seconds: float) -> list[int]:
        """Wait until no process of it is left; return those that are."""
        deadline = time.monotonic() + seconds
        while (left := processes_of(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def kill(self) -> None:
        """End all its processes."""
        for process in processes_of(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def children(self, kind: str) -> list[int]:
        """Return its processes of a kind: rank or worker (a loader's)."""
        ranks = [one for one in processes_of(self.mark) if _parent(one) == self.pid]
        if kind == "rank":
            return [one for one in ranks if b"LOCAL_RANK=" in _read(one, "environ")]
        workers = [one for one in processes_of(self.mark) if _parent(one) in ranks]
        return [one for one in workers if b"resource_tracker" not in _read(one, "cmdline")]

    def difference(self, other: Subject) -> str:
        """Say in what this run's lines or weights differ from another's, or ""."""
        own, others = (_lines(one.out) for one in (self, other))
        for number, (line, expected) in enumerate(zip(own, others, strict=False), start=1):
            if line != expected:
                return f"line {number}: {line} for {expected}"
        if len(own) != len(others):
            return f"{len(own)} lines for {len(others)}"
        try:
            weights = [checkpoints.digest_of(checkpoints.load(x.out).model) for x in (self, other)]
        except CheckpointError as error:
            return str(error)
        return "" if weights[0] == weights[1] else "the last weights"

    def left_behind(self) -> list[str]:
        """Return what the run left in its folder that a run that ended well does not leave."""
        names = [str(path.relative_to(self.out)) for path in self.out.rglob("*")]
        return sorted(one for one in names if one.endswith(".tmp") or one == "lock")


def _lines(run: Path) -> list[dict[str, Any]]:
    """Return what was trained; alarms are about the machine, such as a disk that fills up."""
    lines = (line for line in read_metrics(run) if line["kind"] != "alarm")
    return [{k: line[k] for k in _COMPARED if k in line} for line in lines]


def _parent(process: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_read(process, "stat").rpartition(b")")[2].split()[1])
    return 0


def _read(process: int, name: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/{name}").read_bytes()
    return b""
