"""The soak: undisturbed and hurt runs in pairs, pipeline after pipeline, until the time is over."""

from __future__ import annotations

import datetime
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path

import numpy as np
from PIL import Image

from fastsiam.bench.config import SoakConfig
from fastsiam.bench.images import Silent
from fastsiam.bench.soak.faults import FAULTS, Fault, small_disk
from fastsiam.bench.soak.record import SoakRecord, SoakRun, write_record
from fastsiam.bench.soak.subject import EVERY, IMAGES, Plan, Subject
from fastsiam.bench.soak.vitals import Vitals, growth
from fastsiam.config import ConvertConfig, Pipeline
from fastsiam.console import Console, duration
from fastsiam.environment import environment
from fastsiam.errors import FastSiamError
from fastsiam.pipelines.convert import convert

_CLASSES = 4
_EACH = IMAGES // _CLASSES
_DISK_MB = 16
"""Of the disk that a run has to itself: room for its three checkpoints and little more."""
_PATIENCE = 180.0
"""Seconds that a run may take to end after a fault that ends it, and to be gone."""
_FIRST_STEPS = 120
"""Steps of the first run, by whose speed the length of the others is chosen."""
_LEAST_STEPS = 30
_MOST_STARTS = 60


def soak(config: SoakConfig) -> Path:
    """Hurt runs for so many minutes, write the record; return its path.

    Raises:
        FastSiamError: something went wrong with a run, which the record has; or a file cannot be
            written.
    """
    began, console = time.monotonic(), Console()
    with tempfile.TemporaryDirectory(prefix="fastsiam-soak-") as folder:
        work = _Work(config, Path(folder), console, began + 60 * config.minutes)
        for run in work.rounds():
            said = run.difference or "as the undisturbed one"
            console.say(
                f"{run.pipeline}: {run.steps:,} steps, {run.starts} starts, {len(run.faults)} "
                f"faults: {said}; {duration(max(0.0, work.deadline - time.monotonic()))} left"
            )
    record = SoakRecord(
        minutes=(time.monotonic() - began) / 60,
        seed=config.seed,
        ranks=config.ranks,
        runs=tuple(work.runs),
        findings=tuple(work.findings),
        growth=growth(work.stretches, seed=config.seed),
        command=shlex.join(["fastsiam", *sys.argv[1:]]),
        environment=environment(),
        date=datetime.date.today().isoformat(),
    )
    path = Path(config.out)
    write_record(path, record)
    grown = [name for name, one in record.growth.items() if not one.is_flat]
    if found := [*work.findings, *(f"{name} grows" for name in grown)]:
        raise FastSiamError(f"{len(found)} findings, the first: {found[0]}; see {path}")
    return path


@dataclass(slots=True)
class _Work:
    """The soak under way, and what came of it so far."""

    config: SoakConfig
    folder: Path
    console: Console
    deadline: float
    runs: list[SoakRun] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    stretches: list[list[tuple[float, Vitals]]] = field(default_factory=list)
    _deck: list[Fault] = field(default_factory=list)
    """Faults that are still to come before one of them comes again."""
    _chance: random.Random = field(init=False)
    _steps: int = _FIRST_STEPS

    def __post_init__(self) -> None:
        self._chance = random.Random(self.config.seed)

    def rounds(self) -> Iterator[SoakRun]:
        """Do a pair of runs for each pipeline in turn, as long as there is time for one."""
        took = 0.0
        for number, pipeline in zip(count(), cycle(self.config.names), strict=False):
            began = time.monotonic()
            if number and began + took > self.deadline:
                return
            yield self._pair(number, pipeline)
            took = max(took, time.monotonic() - began)

    def _pair(self, number: int, pipeline: Pipeline) -> SoakRun:
        """Do an undisturbed run, and one that is hurt, of the same settings."""
        seed = 1000 * self.config.seed + number
        plan = Plan(
            pipeline=pipeline,
            data=self._data(pipeline),
            steps=self._steps,
            ranks=self.config.ranks,
            seed=seed,
        )
        place = self.folder / f"{number}-{pipeline}"
        calm = self._subject(plan, place / "calm" / "run")
        self._go_on(calm)
        self._steps = max(_LEAST_STEPS, round(calm.speed * self.config.seconds))
        with small_disk(place / "hurt", _DISK_MB):
            hurt = self._subject(plan, place / "hurt" / "run")
            faults = self._hurt(hurt, random.Random(seed))
            left, steps = self._left_behind(hurt), hurt.step
            difference = hurt.difference(calm)
            if difference or left:
                self._note(hurt, difference or f"it left {', '.join(left)}")
        self.stretches += calm.stretches + hurt.stretches
        run = SoakRun(
            pipeline=pipeline,
            seed=seed,
            steps=steps,
            starts=hurt.starts,
            faults=tuple(faults),
            difference=difference,
            left=tuple(left),
        )
        self.runs.append(run)
        return run

    def _subject(self, plan: Plan, out: Path) -> Subject:
        mark = f"FASTSIAM_SOAK={os.getpid()}-{out.parent.parent.name}-{out.parent.name}"
        return Subject(plan, out, mark)

    def _go_on(self, run: Subject) -> None:
        """Start a run and look at it until it ends; it has to end well."""
        at_start = run.step
        run.start()
        while not self._watch(run, EVERY, at_start):
            pass
        run.interrupt_looks()
        self._check_end(run, None)

    def _hurt(self, run: Subject, chance: random.Random) -> list[str]:
        """Do a run with faults, start after start; return what was done to it."""
        done: list[str] = []
        while run.starts < _MOST_STARTS:
            at_start, last = run.step, None
            run.start()
            while run.poll() is None:
                pause = chance.uniform(1, 2 * self.config.every)
                if self._watch(run, pause, at_start) or time.monotonic() > self.deadline:
                    break
                if (fault := self._next(run)) is None:
                    continue
                done.append(fault.name)
                last = fault
                run.interrupt_looks()
                fault.does(run, chance)
                if fault.ends and run.wait(_PATIENCE) is None:
                    self._note(run, f"still at work {_PATIENCE:.0f} s after {fault.name}")
                    run.kill()
                run.interrupt_looks()
            while not self._watch(run, EVERY, at_start):  # the time for faults is over
                pass
            run.interrupt_looks()
            self._check_end(run, last)
            if run.exit_code == 0:
                return done
        self._note(run, f"it did not end within {_MOST_STARTS} starts")
        return done

    def _watch(self, run: Subject, seconds: float, at_start: int) -> bool:
        """Look at a run for some time; tell whether it ended."""
        until = time.monotonic() + seconds
        while run.poll() is None and time.monotonic() < until:
            run.look(step_at_start=at_start)
            time.sleep(min(EVERY, seconds))
        return run.poll() is not None

    def _check_end(self, run: Subject, fault: Fault | None) -> None:
        """Note an exit code that a fault does not explain, and processes that stay."""
        what = fault.name if fault else "no fault"
        if run.exit_code not in (0, *(fault.codes if fault else ())):
            self._note(run, f"exit code {run.exit_code} after {what}")
        if stayed := run.wait_for_all(_PATIENCE):
            self._note(run, f"processes {stayed} stayed after {what}")
            run.kill()

    def _next(self, run: Subject) -> Fault | None:
        """Draw the next fault that can be done to a run now: each comes once before any again."""
        if not any(fault.needs(run) for fault in self._deck):
            fresh = [fault for fault in FAULTS if fault not in self._deck]
            self._chance.shuffle(fresh)
            self._deck += fresh
        fault = next((fault for fault in self._deck if fault.needs(run)), None)
        if fault:
            self._deck.remove(fault)
        return fault

    def _left_behind(self, run: Subject) -> list[str]:
        left = [f"process {one}" for one in run.wait_for_all(30)]
        return [*left, *run.left_behind()]

    def _note(self, run: Subject, what: str) -> None:
        line = f"{run.plan.pipeline}, seed {run.plan.seed}: {what}"
        self.findings.append(line)
        self.console.warn(line)
        tail = run.log.read_text(errors="replace").splitlines()[-12:] if run.log.exists() else []
        for text in tail:
            self.console.say(f"  {text}")

    def _data(self, pipeline: Pipeline) -> Path:
        """Return images for a pipeline, made when first asked for."""
        images = self.folder / "images"
        if not images.exists():
            _write_images(images / "train", _EACH, seed=0)
            _write_images(images / "val", _EACH // 4, seed=1)
        if pipeline != "ffcv":
            return images
        converted = self.folder / "images-beton"
        if not converted.exists():
            convert("folder", ConvertConfig(source=str(images), out=str(converted)), Silent())
        return converted


def _write_images(folder: Path, each: int, *, seed: int) -> None:
    """Write small JPEGs of noise around a colour of each class."""
    generator = np.random.default_rng(seed)
    for label in range(_CLASSES):
        (folder / f"class{label}").mkdir(parents=True)
        colour = np.linspace(40, 200, _CLASSES)[label]
        for number in range(each):
            pixels = generator.normal(colour, 40, size=(40, 48, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"class{label}" / f"{number:03}.jpg", quality=90)
