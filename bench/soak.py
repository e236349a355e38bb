"""``fastsiam bench soak``: runs with faults, which must end as undisturbed runs do.

Pairs of runs train through each pipeline in turn, until the time is over. One of a pair is left
alone. The other is killed, stopped or damaged every few seconds, and its command is given again
until it ends well. Then its log lines and weights must equal the first one's, bit for bit, and
nothing may be left behind.

torch is imported where a run is compared: the report reads records without it.
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
from collections.abc import Callable, Iterator, Mapping
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
_DISK_MB = 16
"""Of the disk that a hurt run has to itself: three checkpoints and little more."""
_PATIENCE = 180.0
"""Seconds that a run has to end after a fault, and to be gone."""
_FIRST_STEPS, _LEAST_STEPS = 120, 30
"""Steps of the first run, by whose speed the length of the others is chosen; and at least."""
_MOST_STARTS = 60
_COMPARED = ("kind", "step", "epoch", "loss", "z_std", "rank", "lr", "top1", "seen")
"""What must be equal of each line of metrics.jsonl."""
_UNITS = {"memory": "MB", "shared": "MB"}
"""Of what records of version 0.2 have the growth of."""
_KEYS = {"minutes", "seed", "ranks", "runs", "findings", "command", "environment", "date"}
"""Of a record. Each of its runs has pipeline, seed, steps, starts, faults, difference, left."""


@dataclass(slots=True)
class Run:
    """A run, started any number of times."""

    out: Path
    data: Path
    pipeline: Pipeline
    steps: int
    ranks: int
    seed: int
    mark: str = "FASTSIAM_SOAK=1"
    """A variable of the environment, NAME=VALUE, that all its processes have and no other."""
    starts: int = 0
    _process: subprocess.Popen[bytes] = field(init=False)
    _step_at_start: int = 0

    @property
    def command(self) -> list[str]:
        """The command that begins the run, or resumes it."""
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
        """Give the command, in a session of its own."""
        name, _, value = self.mark.partition("=")
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with self.out.with_suffix(".log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, name: value, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self.starts += 1
        self._step_at_start = self.step

    @property
    def pid(self) -> int:
        """The launcher's process."""
        return self._process.pid

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the end; return the exit code (128 + a signal), None if it did not come."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return 128 - code if code < 0 else code

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What was logged."""
        from fastsiam.run.log import read_metrics

        return list(read_metrics(self.out))

    @property
    def step(self) -> int:
        """Steps that were logged."""
        return max((line.get("step", 0) for line in self.lines), default=0)

    @property
    def is_training(self) -> bool:
        """Whether a step was logged since it was started."""
        return self.step > self._step_at_start

    @property
    def speed(self) -> float:
        """Steps a second of training, by its last line."""
        trained = [line for line in self.lines if line["kind"] == "train"]
        return float(trained[-1]["step"] / trained[-1]["seconds"]) if trained else 1.0

    def children(self, kind: str) -> list[int]:
        """Return its processes of a kind: rank, or worker (a loader's)."""
        processes = [one.info for one in processes_of(self.mark)]
        below = [one for one in processes if one["ppid"] == self.pid]
        if kind == "rank":
            return [one["pid"] for one in below if "LOCAL_RANK" in one["environ"]]
        ranks = {one["pid"] for one in below}
        workers = [one for one in processes if one["ppid"] in ranks]
        return [x["pid"] for x in workers if "resource_tracker" not in " ".join(x["cmdline"])]

    def kill(self) -> None:
        """End all its processes."""
        for process in processes_of(self.mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def remaining(self, seconds: float) -> list[int]:
        """Wait until no process of it is left; return those that are."""
        deadline = time.monotonic() + seconds
        while (left := processes_of(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [one.pid for one in left]

    def left_behind(self) -> list[str]:
        """Return what it left in its folder that a run that ended well does not leave."""
        names = [str(path.relative_to(self.out)) for path in self.out.rglob("*")]
        return sorted(one for one in names if one.endswith(".tmp") or one == "lock")

    def difference(self, other: Run) -> str:
        """Return how this run's lines or weights differ from another's, or ""."""
        from fastsiam.run import checkpoint as checkpoints

        own, others = (  # alarms are about the machine, such as a disk that fills up
            [{k: x[k] for k in _COMPARED if k in x} for x in run.lines if x["kind"] != "alarm"]
            for run in (self, other)
        )
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
    does: Callable[[Run, random.Random], None]
    """Does it, and repairs what the run needs to resume."""
    codes: tuple[int, ...]
    """Exit codes that it may end the run with."""
    needs: Callable[[Run], bool] = lambda _: True
    """Tells whether it can be done to this run now."""
    ends: bool = True
    """Whether the run must end of it."""


def _sends(number: int, whom: str) -> Callable[[Run, random.Random], None]:
    """Return what sends a signal to all processes, the launcher, a rank or a loader's worker."""

    def send(run: Run, chance: random.Random) -> None:
        with contextlib.suppress(ProcessLookupError, IndexError):
            if whom == "all":
                os.killpg(run.pid, number)
            else:
                one = run.pid if whom == "launcher" else chance.choice(run.children(whom))
                os.kill(one, number)

    return send


def _pause_rank(run: Run, chance: random.Random) -> None:
    """Have a rank stand still for some seconds, as on an overloaded machine."""
    with contextlib.suppress(ProcessLookupError, IndexError):
        rank = chance.choice(run.children("rank"))
        os.kill(rank, signal.SIGSTOP)
        time.sleep(3)
        os.kill(rank, signal.SIGCONT)


def _damage_checkpoint(run: Run, chance: random.Random) -> None:
    """Kill all of it, and flip a bit of its last checkpoint."""
    from fastsiam.run import checkpoint as checkpoints

    run.kill()
    run.wait(_PATIENCE)
    path = checkpoints.last(run.out)
    if checkpoints.previous(run.out).is_file() and path.is_file():
        content = bytearray(path.read_bytes())
        content[chance.randrange(len(content) // 4, len(content) // 2)] ^= 1 << chance.randrange(8)
        path.write_bytes(content)


def _fill_disk(run: Run, _: random.Random) -> None:
    """Fill the disk that the run is on for some seconds."""
    filler = run.out.parent / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    time.sleep(5)
    filler.unlink()


def _damage_image(run: Run, chance: random.Random) -> None:
    """Cut an image off until the run has met it and ended; then it is as it was."""
    path = chance.choice(sorted((run.data / "train").rglob("*.jpg")))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 3])
    try:
        run.wait(_PATIENCE)
    finally:
        path.write_bytes(whole)


def _has(kind: str) -> Callable[[Run], bool]:
    return lambda run: bool(run.children(kind))


def _has_small_disk(run: Run) -> bool:
    return run.is_training and os.path.ismount(run.out.parent)


def _reads_files(run: Run) -> bool:
    return run.is_training and run.pipeline in ("torchvision", "dali")


_KILLED, _TERMINATED, _STOPPED = (128 + n for n in (9, signal.SIGTERM, signal.SIGINT))
_SAVED = 128 + signal.SIGUSR1
FAULTS = (
    Fault("SIGTERM to all processes", _sends(signal.SIGTERM, "all"), (_TERMINATED,)),
    Fault("SIGTERM to the launcher", _sends(signal.SIGTERM, "launcher"), (_TERMINATED,)),
    Fault("Ctrl-C", _sends(signal.SIGINT, "all"), (_STOPPED,)),
    Fault("SIGUSR1 to a rank", _sends(signal.SIGUSR1, "rank"), (_SAVED,), _has("rank")),
    Fault("kill -9 of a rank", _sends(signal.SIGKILL, "rank"), (_KILLED,), _has("rank")),
    Fault("kill -9 of the launcher", _sends(signal.SIGKILL, "launcher"), (_KILLED,)),
    Fault("kill -9 of all", _sends(signal.SIGKILL, "all"), (_KILLED,)),
    Fault("kill -9 of a loader's worker", _sends(signal.SIGKILL, "worker"), (1,), _has("worker")),
    Fault("a rank stands still", _pause_rank, (), _has("rank"), ends=False),
    Fault("a damaged checkpoint", _damage_checkpoint, (_KILLED,)),
    # If a run ends while its disk is full, it cannot save: 1.
    Fault("a full disk", _fill_disk, (1,), _has_small_disk, ends=False),
    Fault("a damaged image, repaired", _damage_image, (1,), _reads_files),
)


@dataclass(slots=True)
class Soak:
    """The state of a soak."""

    config: SoakConfig
    folder: Path
    deadline: float
    console: Console = field(default_factory=Console)
    runs: list[dict[str, Any]] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    _deck: list[Fault] = field(default_factory=list)
    """Faults that are still to come before one of them comes again."""
    _chance: random.Random = field(init=False)
    _steps: int = _FIRST_STEPS

    def __post_init__(self) -> None:
        self._chance = random.Random(self.config.seed)

    def run(self) -> None:
        """Do a pair of runs for each pipeline in turn, as long as there is time for one."""
        took = 0.0
        for number, pipeline in zip(count(), cycle(self.config.names), strict=False):
            began = time.monotonic()
            if number and began + took > self.deadline:
                return
            one = self._pair(number, pipeline)
            self.runs.append(one)
            took = max(took, time.monotonic() - began)
            self.console.say(
                f"{pipeline}: {one['steps']:,} steps, {one['starts']} starts, "
                f"{len(one['faults'])} faults: {one['difference'] or 'as the undisturbed one'}; "
                f"{duration(max(0.0, self.deadline - time.monotonic()))} left"
            )

    def _pair(self, number: int, pipeline: Pipeline) -> dict[str, Any]:
        seed, place = 1000 * self.config.seed + number, self.folder / f"{number}-{pipeline}"
        data, steps = self._data(pipeline), self._steps

        def run_in(name: str) -> Run:
            mark = f"FASTSIAM_SOAK={os.getpid()}-{place.name}-{name}"
            out = place / name / "run"
            return Run(out, data, pipeline, steps, self.config.ranks, seed, mark)

        calm = run_in("calm")
        calm.start()
        self._finish(calm, None)
        self._steps = max(_LEAST_STEPS, round(calm.speed * self.config.seconds))
        with small_disk(place / "hurt", _DISK_MB):
            hurt = run_in("hurt")
            faults = self._hurt(hurt, random.Random(seed))
            left = [f"process {one}" for one in hurt.remaining(30)] + hurt.left_behind()
            done, difference = hurt.step, hurt.difference(calm)
            if difference or left:
                self._note(hurt, difference or f"it left {', '.join(left)}")
        return {
            "pipeline": pipeline, "seed": seed, "steps": done, "starts": hurt.starts,
            "faults": faults, "difference": difference, "left": left,
        }  # fmt: skip

    def _hurt(self, run: Run, chance: random.Random) -> list[str]:
        """Do a run with faults, start after start; return what was done to it."""
        done: list[str] = []
        while run.starts < _MOST_STARTS:
            last = None
            run.start()
            while run.wait(chance.uniform(1, 2 * self.config.every)) is None:
                if time.monotonic() > self.deadline:
                    break
                if (fault := self._next(run)) is None:
                    continue
                done.append(fault.name)
                last = fault
                fault.does(run, chance)
                if fault.ends and run.wait(_PATIENCE) is None:
                    self._note(run, f"still at work {_PATIENCE:.0f} s after {fault.name}")
                    run.kill()
            if self._finish(run, last) == 0:
                return done
        self._note(run, f"it did not end within {_MOST_STARTS} starts")
        return done

    def _next(self, run: Run) -> Fault | None:
        """Draw the next fault that can be done to a run now: each comes once before any again."""
        if not any(fault.needs(run) for fault in self._deck):
            fresh = [fault for fault in FAULTS if fault not in self._deck]
            self._chance.shuffle(fresh)
            self._deck += fresh
        fault = next((fault for fault in self._deck if fault.needs(run)), None)
        if fault:
            self._deck.remove(fault)
        return fault

    def _finish(self, run: Run, fault: Fault | None) -> int:
        """Wait for a run's end; note a code that no fault explains, and processes that stay."""
        code, what = run.wait(), fault.name if fault else "no fault"
        assert code is not None
        if code not in (0, *(fault.codes if fault else ())):
            self._note(run, f"exit code {code} after {what}")
        if stayed := run.remaining(_PATIENCE):
            self._note(run, f"processes {stayed} stayed after {what}")
            run.kill()
        return code

    def _note(self, run: Run, what: str) -> None:
        self.findings.append(f"{run.pipeline}, seed {run.seed}: {what}")
        self.console.warn(self.findings[-1])
        log = run.out.with_suffix(".log")
        for text in log.read_text(errors="replace").splitlines()[-12:] if log.exists() else ():
            self.console.say(f"  {text}")

    def _data(self, pipeline: Pipeline) -> Path:
        """Return images for a pipeline, made when first asked for: noise around a colour each."""
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
    """Hurt runs for so many minutes, write the record; return its path.

    Raises:
        FastSiamError: something went wrong with a run, which the record has; or a file cannot be
            written.
    """
    began, path = time.monotonic(), Path(config.out)
    with tempfile.TemporaryDirectory(prefix="fastsiam-soak-") as folder:
        work = Soak(config, Path(folder), began + 60 * config.minutes)
        work.run()
    record = {
        "minutes": (time.monotonic() - began) / 60,
        "seed": config.seed,
        "ranks": config.ranks,
        "runs": work.runs,
        "findings": work.findings,
        "command": shlex.join(["fastsiam", *sys.argv[1:]]),
        "environment": environment(),
        "date": datetime.date.today().isoformat(),
    }
    write_json(path, record)
    if found := work.findings:
        raise FastSiamError(f"{len(found)} findings, the first: {found[0]}; see {path}")
    return path


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """Give a folder a disk in memory of its own while inside, where that is allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def processes_of(mark: str) -> list[psutil.Process]:
    """Return the processes whose environment has ``mark``, which they have from their parents."""
    name, _, value = mark.partition("=")
    processes = psutil.process_iter(["pid", "ppid", "environ", "cmdline"])
    found = (one for one in processes if (one.info["environ"] or {}).get(name) == value)
    return [one for one in found if one.pid != os.getpid()]


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
    parts = [caption, markdown(heads, rows)]
    parts.append(markdown(("fault", "times"), [[name, f"{n}"] for name, n in faults]))
    if grown := record.get("growth"):  # version 0.2 measured it
        rows = [
            [
                f"{name} {_UNITS.get(name, '')}".rstrip(), f"{one['level']:,.1f}",
                f"{one['slope']:+,.2f}", f"{one['low']:+,.2f} to {one['high']:+,.2f}",
                f"{one['stretches']}", f"{one['samples']:,}",
            ]
            for name, one in grown.items()
        ]  # fmt: skip
        heads = "held by a run", "median", "growth in an hour", "95% interval", "stretches", "looks"
        parts.append(markdown(heads, rows))
    found = [f"- {one}" for one in record["findings"]] or ["Nothing else was found."]
    return "\n\n".join([*parts, "\n".join(found)])
