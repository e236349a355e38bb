"""The campaign: stage after stage until the minutes are over; what is done is done for good."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from fastsiam.bench.config import GpuConfig
from fastsiam.bench.gpu.page import has_skipped_tests, write_page
from fastsiam.bench.gpu.stages import ROOT, Setup, Stage, stages
from fastsiam.config import Pipeline, RunConfig
from fastsiam.console import Console, duration
from fastsiam.distributed import check_devices
from fastsiam.errors import DataError, FastSiamError
from fastsiam.files import explained, write_json
from fastsiam.kernels.cores import cores
from fastsiam.pipelines.backends import BACKENDS

_GRACE = 15.0, 8.0, 5.0
"""Seconds that a stage has to end in after SIGINT, by which a run saves its state and pytest writes
what it has found, after SIGTERM to all that it started, and after SIGKILL."""
_MARGIN = 20.0
"""Seconds kept for the page, and for what the caller does with it."""
_TEST_TIMEOUT = 150
"""Seconds that a test may take, where pytest-timeout is there."""
_NOT_MEASURED = ": not measured: "
"""How a contest says that a contender failed."""
_MEASURED: tuple[Pipeline, ...] = ("dali", "ffcv")
"""Pipelines that a GPU is fed by, where their packages are there."""

Status = Literal["done", "partly", "failed", "stopped", "cut"]
"""``partly``: something could not be measured, or a test was skipped; ``stopped``: the minutes were
over; ``cut``: it took longer than it may."""
_LAST: tuple[Status, ...] = ("partly", "failed", "cut")
"""Stages that ended so are repeated after those that are new, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a stage ended."""

    status: Status
    seconds: float
    said: str
    """The last line that it printed."""


def run(config: GpuConfig) -> Path:
    """Do what is not done yet, as far as the minutes go; return the page about all of it.

    The minutes begin with this process.

    Raises:
        DeviceError: the device is not there.
        FastSiamError: the folder cannot be written, or holds something else; a stage is not there.
    """
    deadline = time.monotonic() - _age() + 60 * config.minutes - _MARGIN
    check_devices(RunConfig(device=config.device))
    setup, console = _setup(config), Console()
    if setup.float32_batch_note:
        console.say(setup.float32_batch_note)
    if not setup.gpu:
        console.warn("no GPU is used: everything is small, and the figures say nothing")
    with explained(FastSiamError, f"cannot make the folder {setup.out}"):
        for folder in ("logs", "records", "tests"):
            (setup.out / folder).mkdir(parents=True, exist_ok=True)
    outcomes = read_outcomes(setup.out)
    table = stages(setup)
    for name in filter(None, config.again.split(",")):
        if name not in (names := [one.name for one in table]):
            raise DataError(f"--again {name}: there is no such stage, only {', '.join(names)}")
        outcomes.pop(name, None)
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
        write_page(setup, table, {name: one.status for name, one in outcomes.items()})
    return write_page(setup, table, {name: one.status for name, one in outcomes.items()})


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
    """Do a stage in a process of its own, and end it and all that it started after some time.

    Args:
        stage: what is done.
        out: the campaign's folder; the stage's output is added to its log there.
        seconds: that are left, for it and for its end.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A script's shell starts what it leaves in the background deaf to SIGINT, and that would be
        # inherited: stages are ended by it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    log = out / "logs" / f"{stage.name}.txt"
    before = log.stat().st_size if log.exists() else 0
    allowed = max(1.0, min(seconds - sum(_GRACE), stage.most))
    with log.open("a") as output:
        print(f"$ python {' '.join(stage.arguments)}", file=output, flush=True)
        process = subprocess.Popen(
            [sys.executable, *stage.arguments],
            stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            cwd=ROOT, env=_environment(stage), process_group=0,
        )  # fmt: skip
        try:
            code: int | None = process.wait(allowed)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                _end(process)
    said = log.read_bytes()[before:].decode(errors="replace")
    lacks_something = _NOT_MEASURED in said or has_skipped_tests(out, stage)
    status: Status = "failed" if code else "partly" if lacks_something else "done"
    if code is None:
        status = "cut" if allowed == stage.most else "stopped"
    return Outcome(
        status=status, seconds=round(time.monotonic() - began, 1), said=_said(stage, said)
    )


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
        raise DataError(f"{file} is none of fastsiam bench gpu's: delete it") from error


def results_folder(config: GpuConfig) -> Path:
    """Return the campaign's folder: ``--out``, else gpu/ in $OUT if that is set, else runs/gpu."""
    return Path(config.out or Path(os.environ.get("OUT") or "runs", "gpu")).absolute()


def _setup(config: GpuConfig) -> Setup:
    gpu = config.device != "cpu" and torch.cuda.is_available()
    card = torch.cuda.get_device_properties(0) if gpu else None
    parallel = gpu and find_spec("xdist") is not None
    return Setup(
        out=results_folder(config),
        gpu=gpu,
        gpu_name=card.name if card else "",
        gpu_bytes=card.total_memory if card else math.inf,
        pipelines=tuple(name for name in _MEASURED if BACKENDS[name].installed),
        data=str(Path(config.data).absolute()) if config.data else "",
        cifar10=str(Path(config.cifar10).absolute()) if config.cifar10 else "",
        test_workers=min(4, cores() // 2) if parallel else 0,
        test_timeout=_TEST_TIMEOUT if find_spec("pytest_timeout") is not None else 0,
    )


def _environment(stage: Stage) -> dict[str, str]:
    """Return the variables of a stage's process."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH")]
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    own |= {"PYTHONUNBUFFERED": "1", "COLUMNS": "160"}
    if "bench" in stage.arguments:
        own["FASTSIAM_DEBUG"] = "1"  # what a contender has to say goes into the log
    if "-n" in stage.arguments:  # tests side by side share the cores
        each = str(max(1, cores() // int(stage.arguments[-1])))
        own |= {"OMP_NUM_THREADS": each, "TORCHINDUCTOR_COMPILE_THREADS": each}
    return own


def _age() -> float:
    """Return how many seconds ago this process began: importing torch takes some of them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    up = float(Path("/proc/uptime").read_text().split()[0])
    age = up - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return min(max(0.0, age), 60.0)  # some systems have these by two clocks


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, first by asking."""
    asks = (os.kill, signal.SIGINT), (os.killpg, signal.SIGTERM), (os.killpg, signal.SIGKILL)
    for (ask, number), patience in zip(asks, _GRACE, strict=True):
        with contextlib.suppress(ProcessLookupError):
            ask(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def _said(stage: Stage, output: str) -> str:
    """Return the last line that says something: of a measurement, the last that went wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if "bench" in stage.arguments:
        lines = [line for line in lines if _NOT_MEASURED in line or "rror" in line] or ["measured"]
    return lines[-1][:300]
