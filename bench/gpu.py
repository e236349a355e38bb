"""``fastsiam bench gpu``: tests and measurements of a GPU, within the minutes given.

``stages`` lists the stages, the most informative first. Each is a process whose result is kept when
it ends, so a later call continues where this one stopped. ``page.md`` puts what was measured beside
what was expected (``fastsiam.bench.expected``).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import psutil
import torch

from fastsiam.bench.config import AUTHORS, GpuConfig
from fastsiam.bench.expected import Found, table
from fastsiam.bench.records import read
from fastsiam.bench.report import records_block
from fastsiam.config import Pipeline, RunConfig
from fastsiam.console import Console, duration
from fastsiam.distributed import check_devices
from fastsiam.errors import DataError, FastSiamError
from fastsiam.files import explained, write_json, written_for_user
from fastsiam.kernels.cores import cores
from fastsiam.pipelines.backends import BACKENDS
from fastsiam.report.markdown import markdown
from fastsiam.run.log import read_metrics

ROOT = Path(__file__).resolve().parents[1]
"""The checkout, if this runs from one."""
_GRACE = 15.0, 8.0, 5.0
"""Seconds that a stage has to end in after SIGINT, by which a run saves its state and pytest writes
what it has found, after SIGTERM to all that it started, and after SIGKILL."""
_MARGIN = 20.0
"""Seconds kept for the page, and for what the caller does with it."""
_TEST_SECONDS = {"kernels": 90, "step": 90, "loaders": 90, "runs": 90, "bench": 220,
                 "elsewhere": 120}  # fmt: skip
"""Seconds that a test file takes; others take 60."""
_SIDE_BY_SIDE = ("kernels", "step", "runs")
"""Test files that compile much and run in several processes. Others use the whole GPU."""
_FLOAT32_BYTES = 90e9
"""GPU memory that the steps in float32 need at batch 512, with a margin: about 86 GB by counting
activations."""
_NOT_MEASURED = ": not measured: "
"""How a comparison reports that a runner failed."""

Status = Literal["done", "partly", "failed", "stopped", "cut"]
"""``partly``: something could not be measured, or a test was skipped; ``stopped``: the minutes were
over; ``cut``: it took longer than it may."""
_LAST: tuple[Status, ...] = ("partly", "failed", "cut")
"""Stages that ended so are repeated after those that are new, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A process of the campaign."""

    name: str
    """Of the stage, and of the files that it leaves."""
    arguments: tuple[str, ...]
    """What Python is called with."""
    seconds: int
    """What it takes on an H200, about; it is not started with less time left."""
    most: int
    """Seconds after which it is ended."""
    endless: bool = False
    """It uses all the time that is left, and resumes when it is called again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a stage ended."""

    status: Status
    seconds: float
    said: str
    """The last line that it printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the stages depend on."""

    out: Path
    """The campaign's folder."""
    gpu: bool
    """Whether there is one; without, everything is small."""
    gpu_name: str = ""
    gpu_bytes: float = math.inf
    pipelines: tuple[str, ...]
    """Pipelines beside torchvision's that can run here."""
    data: str = ""
    """Images to measure with; empty generates some."""
    cifar10: str = ""
    """CIFAR-10, as ``fastsiam train`` takes it; empty trains on the demo's images."""
    test_workers: int = 0
    """Processes of pytest-xdist that run tests side by side; 0 where it is not installed."""
    test_timeout: int = 0
    """Seconds that a test may take; 0 is any time."""

    @property
    def float32_batch(self) -> int:
        """Images of a batch of the steps in float32: half as many on a GPU with less memory."""
        return 512 if self.gpu_bytes >= _FLOAT32_BYTES else 256

    @property
    def run(self) -> Path:
        """The run folder of the CIFAR-10 recipe: on other images it is another run."""
        return self.out / ("cifar10" if self.cifar10 else "made")

    def records(self, stage: str) -> Path:
        """Return the file that gets a stage's records."""
        return self.out / "records" / f"{stage}.json"


def stages(setup: Setup) -> list[Stage]:
    """Return the stages that can be done here, in their order."""
    gpu, tests = setup.gpu, {stage.name: stage for stage in _tests(setup)}

    def tested(*names: str) -> list[Stage]:
        found = [one for name in names for one in tests if f"{one}-".startswith(f"tests-{name}-")]
        return [tests.pop(one) for one in found]

    def bench(name: str, case: str, *flags: str, seconds: int, images: int = 0, batch: int = 512,
              recipe: str = "imagenet") -> Stage:  # fmt: skip
        """Return a measurement; on a CPU one of the demo's recipe, as small as can be."""
        asked = ["-m", "fastsiam", "bench", case, *flags]
        if case != "machine":
            asked += ["--recipe", recipe if gpu else "demo", "--batch", str(batch if gpu else 8)]
        if setup.data and (images or case == "profile"):
            asked += ["--data", setup.data]
        if images:
            asked += ["--images", str(images)] if gpu else ["--images", "16", "--workers", "1"]
        if case != "profile":
            asked += ["--repeats", ("3" if images else "5") if gpu else "1"]
        asked += ["--device", "cuda" if gpu else "cpu", "--json", str(setup.records(name))]
        most = min(400, 2 * seconds + 60)
        return Stage(name=name, arguments=tuple(asked), seconds=seconds, most=most)

    fed = ("--pipelines", ",".join(setup.pipelines or ("memory",)))
    traced = next((name for name in ("dali", "native") if name in setup.pipelines), "torchvision")
    trace = ("--steps", "20" if gpu else "2", "--out", str(setup.out / "trace.json"))
    jpeg = ("--over", "jpeg-engine", *(() if gpu else ("--values", "0,100")), "--pipelines", "dali")
    way, float32 = "--variants", setup.float32_batch
    found = [
        bench("machine", "machine", seconds=25),
        *tested("kernels"),
        bench("step-512", "step", way, "default,eager" if gpu else "eager", seconds=160),
        bench("photometric-512", "photometric", seconds=30),
        bench("profile", "profile", "--pipeline", traced, *trace, seconds=80),
        *tested("loaders"),
        bench("train", "train", *fed, images=8192, seconds=280),
        bench("step-authors", "step", way, AUTHORS, batch=float32, seconds=70),
        *([bench("jpeg-engine", "sweep", *jpeg, images=32768, seconds=110)]
          if "dali" in setup.pipelines else ()),
        *tested("step"),
        bench("loader", "loader", *fed, images=8192, seconds=220),
        bench("step-graphs", "step", way, "cuda-graphs" if gpu else "plain", seconds=110),
        bench("step-fp32", "step", way, "fp32" if gpu else "plain", batch=float32, seconds=70),
        bench("geometric-512", "geometric", seconds=35),
        bench("step-cifar10", "step", way, "default,eager,cuda-graphs" if gpu else "eager",
              recipe="cifar10", seconds=150),
        *tested("knn", "runs", "ranks", "bench"),
        bench("photometric-4096", "photometric", batch=4096, seconds=35),
        bench("geometric-4096", "geometric", batch=4096, seconds=40),
        Stage(name="info", arguments=("-m", "fastsiam", "info"), seconds=30, most=90),
        *tests.values(),
    ]  # fmt: skip
    demo = str(setup.out / "demo")
    if not setup.cifar10:
        convert = ("-m", "fastsiam", "convert", "demo", "--out", demo)
        found.append(Stage(name="images", arguments=convert, seconds=15, most=120))
    asked = ["-m", "fastsiam", "train", "--data", setup.cifar10 or demo]
    asked += ["--out", str(setup.run), "--save-every", "2000"]
    if gpu:
        asked += ["--recipe", "cifar10", "--knn-every", "25", "--device", "cuda"]
    else:
        asked += ["--recipe", "demo", "--epochs", "2", "--max-steps", "4", "--log-every", "2"]
        asked += ["--knn-every", "0", "--device", "cpu"]
    training = Stage(name="cifar10", arguments=tuple(asked), seconds=60, most=86400, endless=True)
    return [*found, training]


def _tests(setup: Setup) -> Iterator[Stage]:
    """Yield the tests that need a GPU: by the files of tests/gpu, and one stage for all others.

    The many tests of the step have a stage each, so that a cut loses few of them.
    """
    folder = ROOT / "tests" / "gpu"
    if not folder.is_dir():
        return
    for path in sorted(folder.glob("test_*.py")):
        name, file = path.stem.removeprefix("test_"), str(path.relative_to(ROOT))
        if name == "step":
            for test in re.findall(r"^def test_(\w+)", path.read_text(), re.MULTILINE):
                yield _pytest(setup, f"{name}-{test.replace('_', '-')}", f"{file}::test_{test}")
        else:
            yield _pytest(setup, name, file)
    # The files are named because collecting all tests takes minutes.
    files = (x for x in sorted((ROOT / "tests").rglob("test_*.py")) if x.parent != folder)
    marked = (x for x in files if re.search(r"\bmark\.gpu\b", x.read_text()))
    yield _pytest(setup, "elsewhere", *(str(x.relative_to(ROOT)) for x in marked))


def _pytest(setup: Setup, name: str, *which: str) -> Stage:
    kind = name.partition("-")[0]
    asked = ["-m", "pytest", *which, "-m", "gpu", "-v", "-ra", "-p", "no:cacheprovider"]
    if setup.test_timeout:
        # A thread ends the process of a test that hangs in compiled code: of a worker only one test
        # is lost then, of pytest itself the results of all.
        method = "thread" if setup.test_workers else "signal"
        asked += ["--timeout", str(setup.test_timeout), "--timeout-method", method]
    if setup.test_workers:
        asked += ["-n", str(setup.test_workers if kind in _SIDE_BY_SIDE else 1)]
    seconds = _TEST_SECONDS.get(kind, 60)
    return Stage(
        name=f"tests-{name}", arguments=tuple(asked), seconds=seconds, most=2 * seconds + 60
    )


def run(config: GpuConfig) -> Path:
    """Do what is not done yet, as far as the minutes go; return the page about all of it.

    The minutes begin with this process, which has imported torch before.

    Raises:
        DeviceError: the device is missing.
        FastSiamError: the folder cannot be written, or holds something else; a stage is unknown.
    """
    age = time.time() - psutil.Process().create_time()  # some systems have these by two clocks
    deadline = time.monotonic() - min(max(0.0, age), 60.0) + 60 * config.minutes - _MARGIN
    check_devices(RunConfig(device=config.device))
    setup, console = _setup(config), Console()
    if not setup.gpu:
        console.warn("no GPU is used: everything is small, and the figures say nothing")
    with explained(FastSiamError, f"cannot make the folder {setup.out}"):
        for folder in ("logs", "records"):
            (setup.out / folder).mkdir(parents=True, exist_ok=True)
    outcomes = read_outcomes(setup.out)
    table = stages(setup)
    for name in filter(None, config.again.split(",")):
        if name not in (names := [one.name for one in table]):
            raise DataError(f"--again {name}: there is no such stage, only {', '.join(names)}")
        outcomes.pop(name, None)
    # A script's shell starts background commands deaf to SIGINT, by which stages are ended.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends its stage, too
    for stage in in_turn(table, outcomes):
        left = deadline - time.monotonic()
        if left < (stage.seconds + sum(_GRACE) if setup.gpu else 1):
            console.say(f"{stage.name}: left for another call: {duration(max(0.0, left))} are left")
            continue
        console.say(f"{stage.name}: begins, {duration(left)} left")
        outcome = outcomes[stage.name] = perform(stage, setup.out, seconds=left)
        console.say(
            f"{stage.name}: {outcome.status} after {duration(outcome.seconds)}: {outcome.said}"
        )
        write_json(setup.out / "state.json", {n: asdict(one) for n, one in outcomes.items()})
        write_page(setup, table, outcomes)
    return write_page(setup, table, outcomes)


def in_turn(table: Sequence[Stage], outcomes: Mapping[str, Outcome]) -> list[Stage]:
    """Return the stages that are to be done, in the order of the calls to come.

    New ones are first, and those for which the minutes were over; then those that went wrong; last
    is one that uses all the time that is left.
    """

    def rank(stage: Stage) -> tuple[bool, int]:
        status = outcomes[stage.name].status if stage.name in outcomes else "stopped"
        return stage.endless, _LAST.index(status) + 1 if status in _LAST else 0

    done = {name for name, one in outcomes.items() if one.status == "done"}
    return sorted((stage for stage in table if stage.name not in done), key=rank)


def perform(stage: Stage, out: Path, *, seconds: float) -> Outcome:
    """Run a stage in a process of its own, and end it and all that it started after some time.

    Args:
        stage: what is done.
        out: the campaign's folder; the stage's output is added to its log there.
        seconds: that are left, for it and for its end.
    """
    began, log = time.monotonic(), out / "logs" / f"{stage.name}.txt"
    before = log.stat().st_size if log.exists() else 0
    allowed = max(1.0, min(seconds - sum(_GRACE), stage.most))
    with log.open("a") as output:
        print(f"$ python {' '.join(stage.arguments)}", file=output, flush=True)
        process = subprocess.Popen(
            [sys.executable, *stage.arguments],
            stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            cwd=ROOT, env=_environment(stage), process_group=0,
        )  # fmt: skip
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(allowed)
        finally:
            if process.poll() is None:
                _end(process)
    text = log.read_bytes()[before:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lacking = _NOT_MEASURED in text or ("pytest" in stage.arguments and " skipped" in lines[-1])
    status: Status = "failed" if code else "partly" if lacking else "done"
    if code is None:
        status = "cut" if allowed == stage.most else "stopped"
    if "bench" in stage.arguments:  # the last line that says what went wrong
        lines = [line for line in lines if _NOT_MEASURED in line or "rror" in line] or ["measured"]
    took = round(time.monotonic() - began, 1)
    return Outcome(status=status, seconds=took, said=lines[-1][:300])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, first by asking."""
    asks = (os.kill, signal.SIGINT), (os.killpg, signal.SIGTERM), (os.killpg, signal.SIGKILL)
    for (ask, number), patience in zip(asks, _GRACE, strict=True):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            ask(process.pid, number)
            process.wait(patience)


def read_outcomes(out: Path) -> dict[str, Outcome]:
    """Read how the stages of earlier calls ended.

    Raises:
        DataError: the file holds something else.
    """
    file = out / "state.json"
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text())
        return {name: Outcome(**one) for name, one in found.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{file} was not written by fastsiam bench gpu: delete it") from error


def results_folder(config: GpuConfig) -> Path:
    """Return the campaign's folder: ``--out``, else gpu/ in $OUT if that is set, else runs/gpu."""
    return Path(config.out or Path(os.environ.get("OUT") or "runs", "gpu")).absolute()


def _setup(config: GpuConfig) -> Setup:
    gpu = config.device != "cpu" and torch.cuda.is_available()
    card = torch.cuda.get_device_properties(0) if gpu else None
    fed: tuple[Pipeline, ...] = ("dali", "native")
    return Setup(
        out=results_folder(config),
        gpu=gpu,
        gpu_name=card.name if card else "",
        gpu_bytes=card.total_memory if card else math.inf,
        pipelines=tuple(name for name in fed if BACKENDS[name].installed),
        data=str(Path(config.data).absolute()) if config.data else "",
        cifar10=str(Path(config.cifar10).absolute()) if config.cifar10 else "",
        test_workers=min(4, cores() // 2) if gpu and find_spec("xdist") else 0,
        test_timeout=150 if find_spec("pytest_timeout") else 0,
    )


def _environment(stage: Stage) -> dict[str, str]:
    """Return the variables of a stage's process."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH")]
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    own |= {"PYTHONUNBUFFERED": "1", "COLUMNS": "160"}
    if "bench" in stage.arguments:
        own["FASTSIAM_DEBUG"] = "1"  # the runners' output goes into the log
    if "-n" in stage.arguments:  # tests side by side share the cores
        each = str(max(1, cores() // int(stage.arguments[-1])))
        own |= {"OMP_NUM_THREADS": each, "TORCHINDUCTOR_COMPILE_THREADS": each}
    return own


def write_page(setup: Setup, stages: Sequence[Stage], outcomes: Mapping[str, Outcome]) -> Path:
    """Write ``page.md`` about the stages and how they ended into the campaign's folder.

    Raises:
        FastSiamError: the page cannot be written.
    """
    page, records, rows = setup.out / "page.md", {}, []
    for one in stages:
        with contextlib.suppress(DataError):  # missing, or cut
            records[one.name] = read(setup.records(one.name))
        ended = outcomes.get(one.name)
        how = [ended.status, ended.said] if ended else ["not yet", ""]
        rows.append([one.name, *how, f"python {' '.join(one.arguments)}"])
    metrics = read_metrics(setup.run) if setup.cifar10 and setup.gpu else ()
    parts = [
        "# Measured on a GPU" if setup.gpu else "# Tried on a CPU: everything is small",
        f"The authors' step and the step in float32 use batch {setup.float32_batch}.",
        "## Expected, and measured",
        table(Found(records, metrics), gpu=setup.gpu_name),
        "## Stages",
        markdown(["stage", "", "last line", "command"], rows),
    ]
    for name, ended in outcomes.items():
        log = setup.out / "logs" / f"{name}.txt"
        if ended.status != "done" and log.exists():
            lines = log.read_text(errors="replace").splitlines()
            shown = [x for x in lines[:-25] if "not measured" in x] + lines[-25:]
            end = "\n".join(f"    {line[:200]}" for line in shown)
            parts.append(f"## The end of {name}'s output\n\n{end}")
    for name, of in records.items():
        parts += [f"## {name}", records_block(of)]
    if evaluations := [line for line in metrics if line["kind"] == "knn"]:
        keys = ("epoch", "top1", "k", "temperature")
        cells = [[f"{line[key]:g}" for key in keys] for line in evaluations]
        parts += ["## kNN on CIFAR-10", markdown(["epoch", "top-1", "k", "T"], cells)]
    with written_for_user(page) as temporary:
        temporary.write_text("\n\n".join(parts) + "\n")
    return page
