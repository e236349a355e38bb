"""``fastsiam bench soak``: inject faults into runs, which must end like undisturbed runs.

Pairs of runs train with each pipeline in turn until time runs out. One run of a pair is left alone.
The other is killed or stopped, or its checkpoint is corrupted, every few seconds, and its command
is repeated until it succeeds. Then its log lines and weights must equal those of the first run bit
for bit, and no process or temporary file may be left behind.

torch is imported only where runs are compared, because the report reads records without it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import cycle, zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from fastsiam.bench.bench_images import Images, make_images
from fastsiam.bench.config import SoakConfig
from fastsiam.bench.measurements import circumstances
from fastsiam.child_process import FASTSIAM, Child
from fastsiam.config import Pipeline
from fastsiam.console import Console, duration, format_count
from fastsiam.errors import CheckpointError, DataError, FastSiamError
from fastsiam.files import os_errors_as, parse_json, write_json
from fastsiam.markdown import markdown
from fastsiam.pipelines.backends import BACKENDS, CEILING
from fastsiam.run.log import read_metrics
from fastsiam.run.records import check_targets
from fastsiam.signals import exit_after_signal, handle_stop_signals

_IMAGES = 96
_PATIENCE = 180.0
"""Seconds that a run has to end after a fault, and then its other processes."""
_FIRST_STEPS, _LEAST_STEPS = 120, 30
"""Steps of the first run, whose speed determines the length of the others, and their minimum."""
_PAUSE = 3.0
"""Seconds for which a rank is stopped."""
_COMPARED = ("kind", "step", "epoch", "loss", "z_std", "rank", "lr", "top1", "seen")
"""Fields of metrics.jsonl that must be equal."""
_KEYS = {"minutes", "seed", "ranks", "runs", "findings", "command", "environment", "date"}
"""Fields of a record. Each of its runs has pipeline, seed, steps, starts, faults, difference, left.
"""


@dataclass(slots=True)
class Run:
    """A training run that can be started repeatedly."""

    out: Path
    data: Path
    pipeline: Pipeline
    steps: int
    ranks: int
    seed: int
    starts: int = 0
    left: list[str] = field(default_factory=list)
    """Processes and files that it left behind."""
    child: Child = field(init=False)
    """The process of the last start."""

    @property
    def command(self) -> list[str]:
        """The command that starts or resumes the run."""
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
        return [*FASTSIAM, "train", "--recipe", "cifar10", *words]

    def start(self) -> None:
        """Start the command."""
        variables = {"FASTSIAM_SOAK": str(self.out), "OMP_NUM_THREADS": "1"}
        self.child = Child(self.command, self.out.with_suffix(".log"), **variables)
        self.starts += 1

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Fields of its log lines that must not differ between runs; alarms are left out."""
        lines = [line for line in read_metrics(self.out) if line["kind"] != "alarm"]
        return [{name: line[name] for name in _COMPARED if name in line} for line in lines]

    @property
    def processes(self) -> list[psutil.Process]:
        """All its processes, including orphans, by an environment variable that they inherit."""
        candidates = psutil.process_iter(["environ"])
        return [
            x for x in candidates if (x.info["environ"] or {}).get("FASTSIAM_SOAK") == str(self.out)
        ]

    def targets(self, whom: str) -> list[psutil.Process]:
        """Return the processes of a kind: launcher, rank, or worker (of a loader).

        Raises:
            psutil.NoSuchProcess: one of them has just ended.
        """
        launcher = psutil.Process(self.child.process.pid)
        if whom == "launcher":
            return [launcher]
        ranks = [one for one in launcher.children() if "LOCAL_RANK" in one.environ()]
        if whom == "rank":
            return ranks
        descendants = [one for rank in ranks for one in rank.children()]
        return [one for one in descendants if "resource_tracker" not in " ".join(one.cmdline())]

    def kill(self) -> None:
        """Kill all its processes."""
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def left_behind(self, seconds: float, *, files: bool) -> list[str]:
        """Return processes that still exist after some seconds, and optionally leftover files."""
        deadline = time.monotonic() + seconds
        while (left := self.processes) and time.monotonic() < deadline:
            time.sleep(0.2)
        names = [str(path.relative_to(self.out)) for path in self.out.rglob("*") if files]
        leftover_files = sorted(one for one in names if one.endswith(".tmp") or one == "lock")
        return [f"process {one.pid}" for one in left] + leftover_files

    def difference(self, other: Run) -> str:
        """Describe how this run's log lines or weights differ from another's; "" if equal."""
        from fastsiam.run import checkpoint as checkpoints

        pairs = zip_longest(self.lines, other.lines)
        for number, (line, expected) in enumerate(pairs, start=1):
            if line != expected:
                return f"line {number}: {line} for {expected}"
        try:
            hashes = [checkpoints.load(x.out).model_hash for x in (self, other)]
        except CheckpointError as error:
            return str(error)
        return "" if hashes[0] == hashes[1] else "the last weights"


class Fault(NamedTuple):
    """A fault that is injected into a run."""

    name: str
    number: signal.Signals
    target: Literal["all", "launcher", "rank", "worker", "checkpoint"]
    """Which processes get the signal. checkpoint: all, then a bit of the last checkpoint flips."""
    code: int | None
    """Exit code that the run may have afterwards; None if it continues."""

    def inject(self, run: Run, chance: random.Random) -> None:
        """Send the signal, or corrupt the checkpoint.

        Raises:
            IndexError, psutil.NoSuchProcess, ProcessLookupError: no such process exists now.
        """
        if self.target == "checkpoint":
            run.kill()
            if run.child.wait(_PATIENCE) != 0:  # a run that has finished is not repeated
                _flip_a_bit(run.out, chance)
        elif self.target == "all":
            os.killpg(run.targets("launcher")[0].pid, self.number)
        else:
            process = chance.choice(run.targets(self.target))
            process.send_signal(self.number)
            if self.number == signal.SIGSTOP:
                time.sleep(_PAUSE)
                process.resume()


def _flip_a_bit(run: Path, chance: random.Random) -> None:
    """Corrupt a run's last checkpoint if the one before exists, too."""
    from fastsiam.run import checkpoint as checkpoints

    path = checkpoints.last(run)
    if checkpoints.previous(run).is_file() and path.is_file():
        content = bytearray(path.read_bytes())
        content[chance.randrange(len(content) // 4, len(content) // 2)] ^= 1 << chance.randrange(8)
        path.write_bytes(content)


FAULTS = (
    Fault("SIGTERM to all processes", signal.SIGTERM, "all", 143),
    Fault("SIGTERM to the launcher", signal.SIGTERM, "launcher", 143),
    Fault("Ctrl-C", signal.SIGINT, "all", 130),
    Fault("SIGUSR1 to a rank", signal.SIGUSR1, "rank", 138),
    Fault("kill -9 of a rank", signal.SIGKILL, "rank", 137),
    Fault("kill -9 of the launcher", signal.SIGKILL, "launcher", 137),
    Fault("kill -9 of all", signal.SIGKILL, "all", 137),
    Fault("kill -9 of a loader's worker", signal.SIGKILL, "worker", 1),
    Fault("a rank stands still", signal.SIGSTOP, "rank", None),
    Fault("a damaged checkpoint", signal.SIGKILL, "checkpoint", 137),
)


def draw_faults(chance: random.Random) -> Iterator[Fault]:
    """Yield faults forever in random order; each occurs once before any is repeated."""
    while True:
        yield from chance.sample(FAULTS, len(FAULTS))


class Soak:
    """Pairs of runs, and the problems that were found."""

    def __init__(self, config: SoakConfig, folder: Path, deadline: float) -> None:
        self.config, self.folder, self.deadline = config, folder, deadline
        self.runs: list[dict[str, Any]] = []
        self.findings: list[str] = []
        self._console, self._steps = Console(), _FIRST_STEPS
        self._faults = draw_faults(random.Random(config.seed))

    def run(self) -> None:
        """Train a pair of runs with each pipeline in turn, as long as there is time for a pair."""
        for number, pipeline in enumerate(cycle(self.config.names)):
            left = self.deadline - time.monotonic()
            if number and left < 2 * self.config.seconds:
                return
            self._console.say(f"{pipeline}: a pair of runs, {duration(max(0.0, left))} left")
            one = self._pair(number, pipeline)
            self.runs.append(one)
            faults, difference = len(one["faults"]), one["difference"] or "no difference"
            self._console.say(f"{pipeline}: {faults} faults, {difference}")

    def _pair(self, number: int, pipeline: Pipeline) -> dict[str, Any]:
        """Train a run without and with faults; return an entry of the record."""
        seed, folder = 1000 * self.config.seed + number, self.folder / f"{number}-{pipeline}"
        data, ranks = self._data(pipeline), self.config.ranks
        undisturbed, disturbed = (
            Run(folder / name / "run", data, pipeline, self._steps, ranks, seed)
            for name in ("calm", "hurt")
        )
        start = time.monotonic()
        try:
            undisturbed.start()
            self._finish(undisturbed, None)
            speed = self._steps / (time.monotonic() - start)
            self._steps = max(_LEAST_STEPS, round(speed * self.config.seconds))
            faults = self._hurt(disturbed, random.Random(seed))
        except BaseException:  # a signal, which the runs in their own process groups do not get
            for run in (undisturbed, disturbed):
                run.kill()
                run.left_behind(_PATIENCE, files=False)
            raise
        if difference := disturbed.difference(undisturbed):
            self._note(disturbed, difference)
        steps = max((line.get("step", 0) for line in disturbed.lines), default=0)
        return {
            "pipeline": pipeline, "seed": seed, "steps": steps, "starts": disturbed.starts,
            "faults": faults, "difference": difference, "left": disturbed.left,
        }  # fmt: skip

    def _hurt(self, run: Run, chance: random.Random) -> list[str]:
        """Start a run and inject faults until it succeeds or fails; return the faults.

        There is at least one fault, even after the deadline, unless the run ends before it.
        """
        fault_names: list[str] = []
        while True:
            run.start()
            last: Fault | None = None
            while run.child.wait(chance.uniform(1, 2 * self.config.every)) is None:
                if fault_names and time.monotonic() > self.deadline:
                    break
                fault = next(self._faults)
                try:
                    fault.inject(run, chance)
                except (IndexError, psutil.NoSuchProcess, ProcessLookupError):
                    continue
                last = fault
                fault_names.append(fault.name)
                if fault.code is not None and run.child.wait(_PATIENCE) is None:
                    self._note(run, f"still at work {_PATIENCE:.0f} s after {fault.name}")
                    run.kill()
            code = self._finish(run, last)
            if code == 0 or last is None or code != last.code:
                return fault_names

    def _finish(self, run: Run, fault: Fault | None) -> int:
        """Wait for a run's end; note an unexpected exit code, and what is left behind."""
        code, cause = run.child.wait(), fault.name if fault else "no fault"
        assert code is not None
        if code not in (0, fault.code if fault else 0):
            self._note(run, f"exit code {code} after {cause}")
        if left := run.left_behind(_PATIENCE, files=code == 0):
            self._note(run, f"{', '.join(left)} stayed after {cause}")
            run.left = left
            run.kill()
        return code

    def _note(self, run: Run, finding: str) -> None:
        self.findings.append(f"{run.pipeline}, seed {run.seed}: {finding}")
        self._console.warn(self.findings[-1])
        log = run.out.with_suffix(".log")
        for text in log.read_text(errors="replace").splitlines()[-12:] if log.exists() else ():
            self._console.say(f"  {text}")

    def _data(self, pipeline: Pipeline) -> Path:
        """Return images for a pipeline, which are generated on first use."""
        images = Images(self.folder / "images", _IMAGES, "generated")
        if not images.folder.exists():
            make_images(images.folder / "train", _IMAGES)
            make_images(images.folder / "val", _IMAGES // 4)
        return images.convert_to("beton") if BACKENDS[pipeline].needs_beton else images.folder


def soak(config: SoakConfig) -> Path:
    """Disturb runs for the configured minutes and write the record; return its path.

    Raises:
        BackendError: a pipeline in the settings cannot run here.
        FastSiamError: a problem was found, which the record describes; or a file cannot be written.
    """
    start, path = time.monotonic(), Path(config.out)
    check_targets(path)
    for name in config.names:
        BACKENDS[name].check()
    with (
        # A second signal is ignored: killing the runs and deleting their folder is quick.
        handle_stop_signals(exit_after_signal, again=lambda _: None),
        tempfile.TemporaryDirectory(prefix="fastsiam-soak-") as folder,
    ):
        work = Soak(config, Path(folder), start + 60 * config.minutes)
        work.run()
    record = {
        "minutes": (time.monotonic() - start) / 60, "seed": config.seed, "ranks": config.ranks,
        "runs": work.runs, "findings": work.findings,
        **circumstances(),
    }  # fmt: skip
    write_json(path, record)
    if findings := work.findings:
        raise FastSiamError(f"{len(findings)} findings, the first: {findings[0]}; see {path}")
    return path


def read_record(path: Path) -> dict[str, Any]:
    """Read a record that ``soak`` wrote.

    Raises:
        DataError: the file is missing, or is not a record of a soak.
    """
    with os_errors_as(DataError, f"cannot read {path}"):
        text = path.read_text()
    with contextlib.suppress(ValueError):
        record = parse_json(text)
        if isinstance(record, dict) and record.keys() >= _KEYS:
            return record
    raise DataError(f"{path} holds no record of fastsiam bench soak")


def as_markdown(record: Mapping[str, Any]) -> str:
    """Format a record as a caption, tables of runs and faults, and the problems found."""
    machine, runs = record["environment"], record["runs"]
    caption = (
        f"{format_count(len(runs), 'run')} of {record['ranks']} gloo ranks "
        f"in {record['minutes']:.0f} minutes, seed {record['seed']}; "
        f"{format_count(machine['cores'], 'core')} of {machine['cpu']}; "
        f"torch {machine['packages']['torch']}; {record['date']}; `{record['command']}`"
    )
    rows = []
    for pipeline in dict.fromkeys(one["pipeline"] for one in runs):
        group = [one for one in runs if one["pipeline"] == pipeline]
        counts = (
            len(group), sum(one["steps"] for one in group), sum(one["starts"] for one in group),
            sum(len(one["faults"]) for one in group), sum(bool(one["difference"]) for one in group),
        )  # fmt: skip
        rows.append([pipeline, *(f"{x:,}" for x in counts)])
    heads = ("pipeline", "runs", "steps", "starts", "faults", "unlike the undisturbed run")
    faults = Counter(fault for one in runs for fault in one["faults"]).most_common()
    fault_table = markdown(("fault", "times"), [[name, f"{n}"] for name, n in faults])
    nothing = "No run differed from the undisturbed one, and no other problem was found."
    findings = "\n".join(f"- {one}" for one in record["findings"]) or nothing
    return "\n\n".join([caption, markdown(heads, rows), fault_table, findings])
