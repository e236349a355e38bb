"""``fastsiam bench gpu``: test and measure a GPU in stages, within a time limit.

Each stage is a process. Its outcome is saved when it ends, so a later call continues where this one
stopped. ``page.md`` has the figures of all stages.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import torch

from fastsiam.bench.charts import plain_name
from fastsiam.bench.config import AUTHORS, GpuConfig
from fastsiam.bench.measurements import read
from fastsiam.bench.report import records_block
from fastsiam.bench.session import NOT_MEASURED
from fastsiam.child_process import Child
from fastsiam.config import DataConfig, RunConfig
from fastsiam.console import Console, duration
from fastsiam.distributed import check_devices
from fastsiam.errors import DataError, FastSiamError
from fastsiam.files import (
    atomic_write_for_user,
    os_errors_as,
    require_local,
    value_errors_as_data_error,
    write_json,
)
from fastsiam.kernels.cores import cores
from fastsiam.markdown import markdown
from fastsiam.pipelines.backends import BACKENDS
from fastsiam.signals import exit_after_signal, handle_stop_signals

ROOT = Path(__file__).resolve().parents[1]
"""Root of the checkout, if this module is part of one."""
_GRACE = 15.0
"""Seconds between SIGTERM, at which a run saves its state, and SIGKILL."""
_MARGIN = 20.0
"""Seconds reserved for writing the page and for the caller."""
_FLOAT32_BYTES = 90e9
"""GPU memory for float32 steps at batch 512: 86 GB, computed from activations, plus a margin."""
_TEST_BYTES = 5.5e9
"""GPU memory per test process."""
_SMALL: dict[str, Any] = {
    "recipe": "demo", "batch": 8, "variants": "eager", "images": 16, "workers": 1, "steps": 2,
    "repeats": 1,
}  # fmt: skip
"""Options that make measurements on a CPU small."""
_TELLING = re.compile(rf"{NOT_MEASURED}|rror\b|\d (passed|failed|skipped)\b")
"""Log lines that the page can quote."""
_SKIPPED = re.compile(r"SKIPPED \[\d+\] \S+ (?!needs \w+ GPUs$|this GPU )")
"""pytest's lines about skipped tests, except tests that this machine's GPUs cannot run."""


class Stage(NamedTuple):
    """A stage of ``bench gpu``: one Python process."""

    name: str
    seconds: int
    """Approximate duration on an H100. The stage starts only if that much time is left. 0: it uses
    all remaining time, and resumes in the next call."""
    arguments: tuple[str, ...]
    """Command-line arguments of Python."""

    @property
    def limit(self) -> float:
        """Seconds after which the stage counts as failed."""
        return 2 * self.seconds + 60 if self.seconds else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a stage ended."""

    status: Literal["done", "partly", "failed", "stopped"]
    """``partly``: tests that such a machine can run were skipped because something is missing.
    ``stopped``: time ran out."""
    seconds: float
    said: str
    """The last line of its log that says what went wrong or which tests passed."""
    device: str = ""
    """Name of the GPU, or cpu; empty in files of earlier versions."""


def stages(config: GpuConfig, *, gpu_bytes: float, device: str = "cpu") -> list[Stage]:
    """Return the stages that can run here, the most informative first.

    Without CIFAR-10 the last stage trains on the demo's images. On a CPU, which has 0
    ``gpu_bytes``, all stages are small. ``device`` is the name of the GPU, or cpu.
    """
    gpu, out, files = gpu_bytes > 0, config.folder, _test_files()
    device_option, fitting = ("--device", "cuda" if gpu else "cpu"), int(gpu_bytes / _TEST_BYTES)

    def bench(name: str, seconds: int, case: str, **options: Any) -> Stage:
        words = ["-m", "fastsiam", "bench", case]
        for option, value in options.items():
            words += [f"--{option}", str(value if gpu else _SMALL.get(option, value))]
        return Stage(
            name, seconds, (*words, *device_option, "--json", str(out / f"records/{name}.json"))
        )

    named = config.data or os.environ.get("FASTSIAM_DATA")  # a stage starts in the checkout
    own_data = {"data": _absolute(config.data)} if named else {}
    loaders = [name for name in ("dali", "native") if BACKENDS[name].installed]
    feeder, pipelines = [*loaders, "torchvision"][0], ",".join(loaders) or "memory"
    step = {"recipe": "imagenet", "batch": 512, "repeats": 3}
    step_float32 = step | {"batch": 512 if gpu_bytes >= _FLOAT32_BYTES else 256}
    step_cifar10, large = step | {"recipe": "cifar10"}, step | {"batch": 4096}
    load = step | own_data | {"repeats": 2, "workers": -1}
    table = [
        bench("machine", 25, "machine", repeats=3),
        bench("step-512", 100, "step", **step, variants="default,eager"),
        bench("train", 350, "train", **load, images=32768, pipelines=pipelines),
        _tests("tests", 190, files, "gpu and not (dali or ffcv or alone)", min(14, fitting)),
        bench("photometric-512", 20, "photometric", **step),
        _tests("tests-loaders", 65, files, "gpu and not alone and (dali or ffcv)", min(6, fitting)),
        _tests("tests-alone", 30, files, "gpu and alone", 1),
        bench("loader", 180, "loader", **load, images=16384, pipelines=pipelines),
        bench("step-authors", 70, "step", **step_float32, variants=AUTHORS),
        bench("profile", 80, "profile", **own_data, recipe="imagenet", batch=512, steps=20,
              pipeline=feeder, out=out / "trace.json"),
        bench("jpeg-engine", 110, "sweep", **load, images=32768, pipelines="dali",
              over="jpeg-engine", values="0,65,90,100"),
        bench("step-fp32", 70, "step", **step_float32, variants="fp32"),
        bench("step-cifar10", 120, "step", **step_cifar10, variants="default,eager,cuda-graphs"),
        bench("step-graphs", 80, "step", **step, variants="cuda-graphs"),
        bench("geometric-512", 35, "geometric", **step),
        bench("photometric-4096", 35, "photometric", **large),
        bench("geometric-4096", 40, "geometric", **large),
        Stage("info", 30, ("-m", "fastsiam", "info")),
    ]  # fmt: skip
    missing = set() if gpu and "dali" in loaders else {"jpeg-engine"}
    missing |= set() if files else {"tests", "tests-loaders", "tests-alone"}
    table = [stage for stage in table if stage.name not in missing]
    small = "--recipe demo --epochs 2 --max-steps 4 --log-every 2 --knn-every 0"
    run = "--recipe cifar10 --knn-every 25" if gpu else small
    data = _absolute(config.cifar10 or str(out / "demo"))
    if not config.cifar10:
        convert = ("-m", "fastsiam", "convert", "demo", "--out", data)
        table.append(Stage("images", 15, convert))
    folder = out / plain_name(f"{'cifar10' if config.cifar10 else 'made'}-{device}")
    train = ["--data", data, "--out", str(folder), "--save-every", "2000", *device_option]
    return [*table, Stage("cifar10", 0, ("-m", "fastsiam", "train", *train, *run.split()))]


def _absolute(data: str) -> str:
    """Return the absolute path, with its symlinks, or the URL of data named as for train."""
    root = DataConfig(data=data).root
    return str(root.absolute() if isinstance(root, Path) else root)


def _tests(name: str, seconds: int, files: Sequence[str], marks: str, processes: int) -> Stage:
    """Return a stage that runs tests in at most ``processes`` processes."""
    words = ["-m", "pytest", *files, "-m", marks, "-v", "-ra", "-p", "no:cacheprovider"]
    if find_spec("xdist") and find_spec("pytest_timeout"):
        # The timeout of a test that hangs in compiled code kills its process; xdist replaces it.
        words += ["-n", str(max(1, min(processes, cores())))]
        words += ["--timeout", "150", "--timeout-method", "thread"]
    return Stage(name, seconds, tuple(words))


def _test_files() -> list[str]:
    """Return the files with tests that need a GPU; collecting all tests takes minutes.

    Tests of third-party loaders, which are not installed on such a machine, are left out.
    """
    files = [x for x in sorted((ROOT / "tests").rglob("test_*.py")) if x.name != "test_peers.py"]
    return [str(x.relative_to(ROOT)) for x in files if re.search(r"\bmark\.gpu\b", x.read_text())]


def run(config: GpuConfig) -> Path:
    """Run stages until time runs out; return the path of the page about all of them.

    The time limit counts from the start of this process, so it includes importing torch.

    Raises:
        DeviceError: the device is missing.
        FastSiamError: the folder cannot be written, its state.json is invalid, or ``--again`` names
            an unknown stage.
    """
    age = time.time() - psutil.Process().create_time()  # some systems use two clocks for these
    deadline = time.monotonic() - min(max(0.0, age), 60.0) + 60 * config.minutes - _MARGIN
    check_devices(RunConfig(device=config.device))
    require_local(Path(config.out))
    out, console = config.folder, Console()
    has_gpu = config.device != "cpu" and torch.cuda.is_available()
    card = torch.cuda.get_device_properties(0) if has_gpu else None
    if card is None:
        console.warn("running on a CPU: all stages are small, and their figures mean nothing")
    device = card.name if card else "cpu"
    table = stages(config, gpu_bytes=card.total_memory if card else 0, device=device)
    with os_errors_as(FastSiamError, f"cannot create the folder {out}"):
        for folder in ("logs", "records"):
            (out / folder).mkdir(parents=True, exist_ok=True)
    earlier = read_outcomes(out)  # stages that ran on another device are repeated
    outcomes = {name: one for name, one in earlier.items() if one.device == device}
    for name in config.again:
        if name not in (names := [one.name for one in table]):
            raise DataError(f"--again {name}: unknown stage; known stages: {', '.join(names)}")
        if name in outcomes:
            outcomes[name] = replace(outcomes[name], status="stopped")
    with handle_stop_signals(exit_after_signal, again=lambda _: None):
        for stage in in_turn(table, outcomes):
            left = deadline - time.monotonic()
            if left < stage.seconds + _GRACE:
                left = max(0.0, left)
                console.say(f"{stage.name}: left for another call: only {duration(left)} left")
                continue
            console.say(f"{stage.name}: starting, {duration(left)} left")
            if stage.name not in outcomes:
                (out / f"records/{stage.name}.json").unlink(missing_ok=True)  # from another device
            outcome = replace(perform(stage, out, seconds=left), device=device)
            outcomes[stage.name] = outcome
            elapsed = duration(outcome.seconds)
            console.say(f"{stage.name}: {outcome.status} after {elapsed}: {outcome.said}")
            state = {name: asdict(one) for name, one in (earlier | outcomes).items()}
            write_json(out / "state.json", state)
            write_page(config, table, outcomes, device)
    return write_page(config, table, outcomes, device)


def in_turn(table: Sequence[Stage], outcomes: Mapping[str, Outcome]) -> list[Stage]:
    """Return the stages that are not done, in the order in which they run.

    New stages come before those that ran out of time, because these may do so again. Stages that
    failed or skipped tests follow. The stage that uses all remaining time is the last one.
    """
    statuses = {name: one.status for name, one in outcomes.items()}
    left = [stage for stage in table if statuses.get(stage.name) != "done"]
    ranks = {None: 0, "stopped": 1}
    return sorted(left, key=lambda x: (not x.seconds, ranks.get(statuses.get(x.name), 2)))


def perform(stage: Stage, out: Path, *, seconds: float) -> Outcome:
    """Run a stage in its own process, and end its process group when its time is up.

    ``seconds`` are left for the stage, including its shutdown. Its log is written below ``out``.
    """
    start, log, left = time.monotonic(), out / "logs" / f"{stage.name}.txt", seconds - _GRACE
    variables = {"PYTHONUNBUFFERED": "1", "COLUMNS": "160"}
    if "pytest" in stage.arguments:  # many processes in parallel
        variables |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    elif "bench" in stage.arguments:
        variables |= {"FASTSIAM_DEBUG": "1"}  # runners print into the log
    with os_errors_as(FastSiamError, f"cannot write {log}"):
        log.write_text(f"$ python {' '.join(stage.arguments)}\n")
    child = Child([sys.executable, *stage.arguments], log, ROOT, **variables)
    try:
        is_over = child.wait(max(1.0, min(left, stage.limit))) is None and left < stage.limit
    finally:
        child.end(_GRACE)
    code = child.process.returncode
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    skipped = [line for line in lines if _SKIPPED.match(line)]
    telling = [f"exit code {code}", *filter(_TELLING.search, lines), *([] if code else skipped)]
    failed = code or any(NOT_MEASURED in line for line in lines)
    return Outcome(
        status="stopped" if is_over else "failed" if failed else "partly" if skipped else "done",
        seconds=round(time.monotonic() - start, 1),
        said=telling[-1][:300],
    )


def read_outcomes(out: Path) -> dict[str, Outcome]:
    """Read how the stages of earlier calls ended.

    Raises:
        DataError: state.json cannot be read, or is invalid.
    """
    file = out / "state.json"
    with os_errors_as(DataError, f"cannot read {file}"):
        if not file.exists():
            return {}
        text = file.read_text()
    with value_errors_as_data_error(file):
        return {name: Outcome(**one) for name, one in json.loads(text).items()}


def write_page(
    config: GpuConfig, stages: Sequence[Stage], outcomes: Mapping[str, Outcome], device: str
) -> Path:
    """Write ``page.md`` into the output folder: figures, and how the stages ended.

    ``outcomes`` are those on ``device``, which is the name of a GPU, or cpu.

    Raises:
        FastSiamError: the page cannot be written.
    """
    out, records, rows = config.folder, {}, []
    for one in stages:
        if outcome := outcomes.get(one.name):
            with contextlib.suppress(DataError):  # missing or truncated
                records[one.name] = read(out / f"records/{one.name}.json")
        status_cells = [outcome.status, outcome.said] if outcome else ["not yet", ""]
        rows.append([one.name, *status_cells, f"python {' '.join(one.arguments)}"])
    parts = [
        "# Measured on a GPU" if device != "cpu" else "# Test run on a CPU: all stages are small",
        "## Stages",
        "The folder `logs` has the output of each stage.",
        markdown(["stage", "", "from its log", "command"], rows),
    ]
    for name, stage_records in records.items():
        parts += [f"## {name}", records_block(stage_records)]
    page = out / "page.md"
    with atomic_write_for_user(page) as temporary:
        temporary.write_text("\n\n".join(parts) + "\n")
    return page
