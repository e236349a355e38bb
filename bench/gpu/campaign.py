"""The campaign: stage after stage until the minutes are over; what is done is done for good."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from fastsiam.bench.config import GpuConfig
from fastsiam.bench.gpu.page import write_page
from fastsiam.bench.gpu.stages import ROOT, Setup, Stage, records_of, stages
from fastsiam.config import Pipeline, RunConfig
from fastsiam.console import Console, duration
from fastsiam.distributed import check_devices
from fastsiam.errors import DataError, FastSiamError
from fastsiam.files import explained, write_json
from fastsiam.kernels.cores import cores
from fastsiam.pipelines.backends import BACKENDS

_GRACE = 20.0
"""Seconds that a stage has to end in when it is told to: a run saves its state."""
_MARGIN = 10.0
"""Seconds kept for the page."""
_MEASURED: tuple[Pipeline, ...] = ("dali", "ffcv")
"""Pipelines that a GPU is fed by, where their packages are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a stage ended."""

    status: Literal["done", "failed", "cut"]
    """``cut``: the time was over first."""
    seconds: float
    said: str
    """The last line that it printed."""


def run(config: GpuConfig) -> Path:
    """Do what is not done yet, as far as the minutes go; return the page about all of it.

    Raises:
        DeviceError: the device is not there.
        FastSiamError: the folder cannot be written, or holds something else.
    """
    deadline = time.monotonic() + 60 * config.minutes - _MARGIN
    check_devices(RunConfig(device=config.device))
    setup, console = _setup(config), Console()
    with explained(FastSiamError, f"cannot make the folder {setup.out}"):
        for folder in ("logs", "records", "tests"):
            (setup.out / folder).mkdir(parents=True, exist_ok=True)
    outcomes = read_outcomes(setup.out)
    for name in filter(None, config.again.split(",")):
        outcomes.pop(name, None)
    table = stages(setup)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends its stage, too
    for stage in in_turn(table, outcomes):
        left = deadline - time.monotonic()
        if left < (stage.seconds if setup.gpu else 1):
            console.say(f"{stage.name}: left for another call: {duration(max(0.0, left))} are left")
            continue
        console.say(f"{stage.name}: begins, {duration(left)} left")
        outcome = perform(stage, setup.out, seconds=min(left, stage.most))
        outcomes[stage.name] = outcome
        said = "" if records_of(setup.out, stage.name).exists() else f": {outcome.said}"
        console.say(f"{stage.name}: {outcome.status} after {duration(outcome.seconds)}{said}")
        write_json(setup.out / "state.json", {n: asdict(one) for n, one in outcomes.items()})
        write_page(setup, table, {name: one.status for name, one in outcomes.items()})
    return write_page(setup, table, {name: one.status for name, one in outcomes.items()})


def in_turn(table: Sequence[Stage], outcomes: Mapping[str, Outcome]) -> Iterator[Stage]:
    """Yield the stages that are to be done: new and failed ones, then those that were cut.

    One that uses all the time that is left comes last. One that was cut may be cut again: others
    shall not wait for it.
    """
    status = {stage.name: outcomes[stage.name].status for stage in table if stage.name in outcomes}
    due = [stage for stage in table if status.get(stage.name) != "done" and not stage.endless]
    yield from (stage for stage in due if status.get(stage.name) != "cut")
    yield from (stage for stage in due if status.get(stage.name) == "cut")
    yield from (s for s in table if s.endless and status.get(s.name) != "done")


def perform(stage: Stage, out: Path, *, seconds: float) -> Outcome:
    """Do a stage in a process of its own, and end it and all that it started after some time.

    Args:
        stage: what is done.
        out: the campaign's folder; the stage's output is added to its log there.
        seconds: that it may take, the time to end in included.
    """
    began = time.monotonic()
    log = out / "logs" / f"{stage.name}.txt"
    paths = [str(ROOT), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= {"PYTHONUNBUFFERED": "1", "COLUMNS": "160"}
    with log.open("a") as output:
        print(f"$ python {' '.join(stage.arguments)}", file=output, flush=True)
        process = subprocess.Popen(
            [sys.executable, *stage.arguments],
            stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            cwd=ROOT, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(max(1.0, seconds - _GRACE))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                _end(process)
    status: Literal["done", "failed", "cut"] = (
        "cut" if code is None else "failed" if code else "done"
    )
    return Outcome(status=status, seconds=round(time.monotonic() - began, 1), said=_last_line(log))


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


def _setup(config: GpuConfig) -> Setup:
    gpu = config.device != "cpu" and torch.cuda.is_available()
    parallel = gpu and find_spec("xdist") is not None
    return Setup(
        out=Path(config.out).absolute(),
        gpu=gpu,
        pipelines=tuple(name for name in _MEASURED if BACKENDS[name].installed),
        data=str(Path(config.data).absolute()) if config.data else "",
        cifar10=str(Path(config.cifar10).absolute()) if config.cifar10 else "",
        test_workers=min(4, cores() // 2) if parallel else 0,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, first by asking."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)


def _last_line(log: Path) -> str:
    """Return the last line that says something; control characters of progress bars left out."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line[:300] for line in reversed(lines) if line), "")
