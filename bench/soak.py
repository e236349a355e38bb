"""``fastsiam bench soak``: runs with faults, which must end as undisturbed runs do.

Pairs of runs train through each pipeline in turn, until the time is over. One run of a pair is left
alone. The other is killed, stopped or damaged every few seconds, and its command is given again
until it succeeds. Then its log lines and weights must equal the first one's, bit for bit, and
nothing may be left behind.

torch is imported where runs are compared: the report reads records without it.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from PIL import Image

from fastsiam.bench.config import SoakConfig
from fastsiam.bench.images import Silent
from fastsiam.config import ConvertConfig, Pipeline
from fastsiam.console import Console, duration
from fastsiam.environment import environment
from fastsiam.errors import CheckpointError, DataError, FastSiamError
from fastsiam.files import parsed_json, write_json
from fastsiam.pipelines.backends import CEILING
from fastsiam.pipelines.convert import convert
from fastsiam.report.markdown import markdown

_IMAGES, _CLASSES = 96, 4
_PATIENCE = 180.0
"""Seconds that a run has to end after a fault, and its processes after that."""
_FIRST_STEPS, _LEAST_STEPS = 120, 30
"""Steps of the first run, whose speed sets the length of the others, and the fewest steps."""
_MOST_STARTS = 60
_COMPARED = ("kind", "step", "epoch", "loss", "z_std", "rank", "lr", "top1", "seen")
"""Fields of metrics.jsonl that must be equal."""
_KEYS = {"minutes", "seed", "ranks", "runs", "findings", "command", "environment", "date"}
"""Fields of a record. Each of its runs has pipeline, seed, steps, starts, faults, difference, left.
"""
_NOTHING = "No run differed from the undisturbed one, and no other problem was found."


@dataclass(slots=True)
class Run:
    """A run, started any number of times."""

    out: Path
    data: Path
    pipeline: Pipeline
    steps: int
    ranks: int
    seed: int
    starts: int = 0
    _process: subprocess.Popen[bytes] = field(init=False)

    @property
    def command(self) -> list[str]:
        """The command that starts the run, or resumes it."""
        batch = 8 * self.ranks
        epochs = 1 if self.pipeline == CEILING else max(1, self.steps * batch // _IMAGES)
        settings = {
            "data": self.data, "pipeline": self.pipeline, "workers": 1,
            "device": "cpu", "gpus": self.ranks, "rank-timeout": 60, "backbone": "resnet10",
            "width": 4, "projector-layers": 2, "dim": 32, "predictor-dim": 8, "crop": 16,
            "batch": batch, "epochs": epochs, "max-steps": self.steps, "seed": self.seed,
            "precision": "fp32", "compile": "off", "knn-every": max(1, epochs // 4), "knn-k": 5,
            "log-every": 1, "save-every": 5, "tracker": "none", "out": self.out,
        }  # fmt: skip
        words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        return [sys.executable, "-m", "fastsiam", "train", "--recipe", "cifar10", *words]

    def start(self) -> None:
        """Start the command in a session of its own."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with self.out.with_suffix(".log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, "FASTSIAM_SOAK": str(self.out), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )  # fmt: skip
        self.starts += 1

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the end; return the exit code (128 + a signal), None if it did not come."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return 128 - code if code < 0 else code

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What was logged, without alarms, which are about the machine."""
        from fastsiam.run.log import read_metrics

        return [line for line in read_metrics(self.out) if line["kind"] != "alarm"]

    @property
    def processes(self) -> list[psutil.Process]:
        """All processes of the run, known by a variable that they inherit."""
        found = psutil.process_iter(["pid", "ppid", "environ", "cmdline"])
        return [
            one for one in found
            if (one.info["environ"] or {}).get("FASTSIAM_SOAK") == str(self.out)
            and one.pid != os.getpid()
        ]  # fmt: skip

    def pids(self, whom: str) -> list[int]:
        """Return the processes of a kind: launcher, rank, or worker (a loader's)."""
        launcher = self._process.pid
        if whom == "launcher":
            return [launcher]
        found = [one.info for one in self.processes]
        ranks = [x["pid"] for x in found if x["ppid"] == launcher and "LOCAL_RANK" in x["environ"]]
        if whom == "rank":
            return ranks
        workers = [x for x in found if x["ppid"] in ranks]
        return [x["pid"] for x in workers if "resource_tracker" not in " ".join(x["cmdline"])]

    def kill(self) -> None:
        """Kill all its processes."""
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def left_behind(self, seconds: float) -> list[str]:
        """Return what a run that succeeded does not leave: processes, after a while, and files."""
        deadline = time.monotonic() + seconds
        while (left := self.processes) and time.monotonic() < deadline:
            time.sleep(0.2)
        names = [str(path.relative_to(self.out)) for path in self.out.rglob("*")]
        files = sorted(one for one in names if one.endswith(".tmp") or one == "lock")
        return [f"process {one.pid}" for one in left] + files

    def difference(self, other: Run) -> str:
        """Return how this run's lines or weights differ from another's, or ""."""
        from fastsiam.run import checkpoint as checkpoints

        own, others = ([{k: x[k] for k in _COMPARED if k in x} for x in run.lines]
                       for run in (self, other))  # fmt: skip
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


class Fault(NamedTuple):
    """A fault that is injected into a run."""

    name: str
    inject: Callable[[Run, random.Random], None]
    code: int | None
    """Exit code that the run may have then; None if the fault does not end it."""


def _sends(number: int, whom: str) -> Callable[[Run, random.Random], None]:
    """Return what sends a signal to all processes, the launcher, a rank or a loader's worker."""

    def send(run: Run, chance: random.Random) -> None:
        with contextlib.suppress(ProcessLookupError):
            if whom == "all":
                os.killpg(run.pids("launcher")[0], number)
            else:
                os.kill(chance.choice(run.pids(whom)), number)

    return send


def _pause_rank(run: Run, chance: random.Random) -> None:
    """Stop a rank for some seconds, as on an overloaded machine."""
    rank = chance.choice(run.pids("rank"))
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank, signal.SIGSTOP)
        time.sleep(3)
        os.kill(rank, signal.SIGCONT)


def _damage_checkpoint(run: Run, chance: random.Random) -> None:
    """Kill the run, and flip a bit of its last checkpoint."""
    from fastsiam.run import checkpoint as checkpoints

    run.kill()
    run.wait(_PATIENCE)
    path = checkpoints.last(run.out)
    if checkpoints.previous(run.out).is_file() and path.is_file():
        content = bytearray(path.read_bytes())
        content[chance.randrange(len(content) // 4, len(content) // 2)] ^= 1 << chance.randrange(8)
        path.write_bytes(content)


_KILLED, _TERMINATED = 128 + signal.SIGKILL, 128 + signal.SIGTERM
FAULTS = (
    Fault("SIGTERM to all processes", _sends(signal.SIGTERM, "all"), _TERMINATED),
    Fault("SIGTERM to the launcher", _sends(signal.SIGTERM, "launcher"), _TERMINATED),
    Fault("Ctrl-C", _sends(signal.SIGINT, "all"), 128 + signal.SIGINT),
    Fault("SIGUSR1 to a rank", _sends(signal.SIGUSR1, "rank"), 128 + signal.SIGUSR1),
    Fault("kill -9 of a rank", _sends(signal.SIGKILL, "rank"), _KILLED),
    Fault("kill -9 of the launcher", _sends(signal.SIGKILL, "launcher"), _KILLED),
    Fault("kill -9 of all", _sends(signal.SIGKILL, "all"), _KILLED),
    Fault("kill -9 of a loader's worker", _sends(signal.SIGKILL, "worker"), 1),
    Fault("a rank stands still", _pause_rank, None),
    Fault("a damaged checkpoint", _damage_checkpoint, _KILLED),
)


class Soak:
    """Pairs of runs, and what was found."""

    def __init__(self, config: SoakConfig, folder: Path, deadline: float) -> None:
        self.config, self.folder, self.deadline = config, folder, deadline
        self.runs: list[dict[str, Any]] = []
        self.findings: list[str] = []
        self._console, self._steps = Console(), _FIRST_STEPS
        self._chance, self._deck = random.Random(config.seed), list[Fault]()

    def run(self) -> None:
        """Do a pair of runs for each pipeline in turn, as long as there is time for one."""
        longest = 0.0
        for number, pipeline in zip(count(), cycle(self.config.names), strict=False):
            began = time.monotonic()
            if number and began + longest > self.deadline:
                return
            one = self._pair(number, pipeline)
            self.runs.append(one)
            longest = max(longest, time.monotonic() - began)
            self._console.say(
                f"{pipeline}: {one['steps']:,} steps, {one['starts']} starts, "
                f"{len(one['faults'])} faults: {one['difference'] or 'as the undisturbed one'}; "
                f"{duration(max(0.0, self.deadline - time.monotonic()))} left"
            )

    def _pair(self, number: int, pipeline: Pipeline) -> dict[str, Any]:
        seed, folder = 1000 * self.config.seed + number, self.folder / f"{number}-{pipeline}"
        calm, hurt = (
            Run(folder / name / "run", self._data(pipeline), pipeline, self._steps,
                self.config.ranks, seed) for name in ("calm", "hurt")
        )  # fmt: skip
        calm.start()
        self._finish(calm, None)
        trained = [line for line in calm.lines if line["kind"] == "train"]
        speed = trained[-1]["step"] / trained[-1]["seconds"] if trained else 1.0
        self._steps = max(_LEAST_STEPS, round(speed * self.config.seconds))
        faults = self._hurt(hurt, random.Random(seed))
        left, difference = hurt.left_behind(30), hurt.difference(calm)
        if difference or left:
            self._note(hurt, difference or f"it left {', '.join(left)}")
        steps = max((line.get("step", 0) for line in hurt.lines), default=0)
        return {
            "pipeline": pipeline, "seed": seed, "steps": steps, "starts": hurt.starts,
            "faults": faults, "difference": difference, "left": left,
        }  # fmt: skip

    def _hurt(self, run: Run, chance: random.Random) -> list[str]:
        """Run with faults, start after start; return the faults."""
        done: list[str] = []
        while run.starts < _MOST_STARTS:
            last = None
            run.start()
            while run.wait(chance.uniform(1, 2 * self.config.every)) is None:
                if time.monotonic() > self.deadline:
                    break
                fault = self._next()
                try:
                    fault.inject(run, chance)
                except IndexError:  # there is no rank or worker at the moment
                    self._deck.append(fault)
                    continue
                last = fault
                done.append(fault.name)
                if fault.code is not None and run.wait(_PATIENCE) is None:
                    self._note(run, f"still at work {_PATIENCE:.0f} s after {fault.name}")
                    run.kill()
            if self._finish(run, last) == 0:
                return done
        self._note(run, f"it did not end within {_MOST_STARTS} starts")
        return done

    def _next(self) -> Fault:
        """Draw the next fault: each comes once before any comes again."""
        if not self._deck:
            self._deck = self._chance.sample(FAULTS, len(FAULTS))
        return self._deck.pop(0)

    def _finish(self, run: Run, fault: Fault | None) -> int:
        """Wait for a run's end; note a code that no fault explains, and processes that stay."""
        code, what = run.wait(), fault.name if fault else "no fault"
        assert code is not None
        if code not in (0, fault.code if fault else 0):
            self._note(run, f"exit code {code} after {what}")
        left = run.left_behind(_PATIENCE)
        if stayed := [one for one in left if one.startswith("process")]:
            self._note(run, f"{', '.join(stayed)} stayed after {what}")
            run.kill()
        return code

    def _note(self, run: Run, what: str) -> None:
        self.findings.append(f"{run.pipeline}, seed {run.seed}: {what}")
        self._console.warn(self.findings[-1])
        log = run.out.with_suffix(".log")
        for text in log.read_text(errors="replace").splitlines()[-12:] if log.exists() else ():
            self._console.say(f"  {text}")

    def _data(self, pipeline: Pipeline) -> Path:
        """Return images for a pipeline, made at first use: noise around a colour for each class."""
        images, converted = self.folder / "images", self.folder / "images-beton"
        if not images.exists():
            chance = np.random.default_rng(0)
            for number in range(_IMAGES + _IMAGES // 4):
                split, label = "train" if number < _IMAGES else "val", number % _CLASSES
                path = images / split / f"class{label}" / f"{number:03}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels = chance.normal(40 + 50 * label, 40, size=(40, 48, 3)).clip(0, 255)
                Image.fromarray(pixels.astype(np.uint8)).save(path, quality=90)
        if pipeline != "ffcv":
            return images
        if not converted.exists():
            convert("folder", ConvertConfig(source=str(images), out=str(converted)), Silent())
        return converted


def soak(config: SoakConfig) -> Path:
    """Disturb runs for so many minutes and write the record; return its path.

    Raises:
        FastSiamError: something went wrong with a run, which the record has; or a file cannot be
            written.
    """
    began, path = time.monotonic(), Path(config.out)
    with tempfile.TemporaryDirectory(prefix="fastsiam-soak-") as folder:
        work = Soak(config, Path(folder), began + 60 * config.minutes)
        work.run()
    record = {
        "minutes": (time.monotonic() - began) / 60, "seed": config.seed, "ranks": config.ranks,
        "runs": work.runs, "findings": work.findings,
        "command": shlex.join(["fastsiam", *sys.argv[1:]]),
        "environment": environment(), "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    write_json(path, record)
    if found := work.findings:
        raise FastSiamError(f"{len(found)} findings, the first: {found[0]}; see {path}")
    return path


def read_record(path: Path) -> dict[str, Any]:
    """Read the record that ``soak`` wrote.

    Raises:
        DataError: it is missing, or holds something else.
    """
    try:
        record = parsed_json(path.read_text())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except ValueError:
        record = None
    if not isinstance(record, dict) or not record.keys() >= _KEYS:
        raise DataError(f"{path} holds no record of fastsiam bench soak")
    return record


def as_markdown(record: Mapping[str, Any]) -> str:
    """Return a caption, the tables of runs and faults, and what went wrong."""
    machine, runs = record["environment"], record["runs"]
    caption = (
        f"{len(runs)} runs of {record['ranks']} gloo ranks in {record['minutes']:.0f} minutes, "
        f"seed {record['seed']}; {machine['cores']} cores of {machine['cpu']}; "
        f"torch {machine['packages']['torch']}; {record['date']}; `{record['command']}`"
    )
    rows = []
    for pipeline in dict.fromkeys(one["pipeline"] for one in runs):
        of = [one for one in runs if one["pipeline"] == pipeline]
        counts = (
            len(of), sum(one["steps"] for one in of), sum(one["starts"] for one in of),
            sum(len(one["faults"]) for one in of), sum(bool(one["difference"]) for one in of),
        )  # fmt: skip
        rows.append([pipeline, *(f"{x:,}" for x in counts)])
    heads = ("pipeline", "runs", "steps", "starts", "faults", "unlike the undisturbed run")
    faults = Counter(fault for one in runs for fault in one["faults"]).most_common()
    drawn = markdown(("fault", "times"), [[name, f"{n}"] for name, n in faults])
    found = [f"- {one}" for one in record["findings"]] or [_NOTHING]
    return "\n\n".join([caption, markdown(heads, rows), drawn, "\n".join(found)])
