"""Execution of a study's runs in subprocesses, several in parallel with ``--parallel``.

Settings, images and the machine are checked before the first run starts.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import cycle, islice

from fastsiam.child_process import FASTSIAM, Child
from fastsiam.config.study import StudyRunConfig
from fastsiam.console import Console, duration
from fastsiam.environment import gpu_count
from fastsiam.errors import DataError, FastSiamError, Interrupted
from fastsiam.files import atomic_write_for_user
from fastsiam.kernels import cores
from fastsiam.signals import handle_stop_signals, signal_name
from fastsiam.study.record import Result, read_result
from fastsiam.study.runs import Run, images_digest

_TICK = 0.1
"""Seconds between two polls of the processes."""


def check(runs: Sequence[Run]) -> None:
    """Check that the unfinished runs can start, and that all runs use the same images.

    Raises:
        ValueError: a batch cannot be divided among the GPUs.
        FastSiamError: images, labels or devices are missing, or the folder has runs that were
            trained on other images.
    """
    left = {run.variant: run for run in runs if not run.is_done}
    if not left:
        return
    import torch

    from fastsiam.distributed import Place
    from fastsiam.evaluate.subject import EvalImages
    from fastsiam.train.command import preflight
    from fastsiam.train.image_list import fingerprint
    from fastsiam.train.run_images import run_images

    for run in left.values():
        preflight(run.config, world=run.config.run.gpus)
    scale, config, place = runs[0].scale, runs[0].config, Place(0, 1, torch.device("cpu"))
    images = EvalImages(
        data=config.data, augment=config.augment, resize=config.eval_resize, place=place
    )
    images.loader("val")  # its error does not suggest --holdout, which studies lack
    bank, _ = images.loaders()
    actual = f"{config.data.root} has {bank.images:,} training images of {len(bank.classes):,}"
    expected = f"--scale {scale.name} expects {scale.images:,} of {scale.classes:,}, {scale.title}"
    if len(bank.classes) != scale.classes:
        raise DataError(f"{actual} classes; {expected}")
    if bank.images != scale.images:
        Console().warn(f"{actual} classes; {expected}")
    image_list = run_images(config, None).image_list
    digest = fingerprint(image_list.names) if image_list else ""
    for folder in sorted(runs[0].folder.parent.glob("*-seed-*")):
        if images_digest(folder) not in ("", digest):
            raise DataError(
                f"{folder} was trained on different images than those in {config.data.root}; pass "
                "its --data, or choose another --out"
            )


def execute_runs(runs: Sequence[Run], config: StudyRunConfig) -> None:
    """Execute the unfinished runs; resume those that were started earlier.

    Raises:
        Interrupted: on SIGINT, SIGTERM or SIGHUP; active runs save their state first.
        FastSiamError: a run failed, its folder has other settings, or another process trains it.
    """
    runs = [*{run.folder: run for run in runs}.values()]
    for run in runs:
        run.check_settings()
    left = [run for run in runs if not run.is_done]
    Console().say(f"{len(runs):,} runs, {len(runs) - len(left):,} already finished")
    # Limit by all runs, including finished ones: a resumed run then gets the same number of cores.
    config = replace(config, parallel=min(config.parallel, len(runs)))
    environments, work = slots(config, _gpus(config)), _Scheduler(left)
    with handle_stop_signals(work.stop, again=work.kill):
        asyncio.run(work.finish(environments))


def _gpus(config: StudyRunConfig) -> list[str]:
    """Return the names of the machine's GPUs; empty if the runs use the CPU."""
    if config.device == "cpu" or not (count := gpu_count()):
        return []
    visible_gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible_gpus.split(",") if visible_gpus else [str(number) for number in range(count)]


def slots(config: StudyRunConfig, gpus: Sequence[str]) -> list[dict[str, str]]:
    """Return the environment variables of each parallel slot: its GPUs and its share of the cores.

    ``gpus`` are the names of the machine's GPUs; empty to run on the CPU.
    """
    environments: list[dict[str, str]] = [{} for _ in range(config.parallel)]
    names = cycle(gpus)
    for env in environments:
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(islice(names, config.gpus)))
        if config.parallel > 1:
            share = str(cores.share(config.parallel * config.gpus))
            env |= {cores.SHARE: share, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", share)}
    return environments


class _Scheduler:
    """Scheduler that executes runs in parallel until all finish, one fails, or a signal arrives."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._console = Console()
        self._waiting, self._left = deque(runs), len(runs)
        self._active: set[Child] = set()
        self._failure: FastSiamError | None = None
        self._signal = 0

    async def finish(self, slots: Iterable[dict[str, str]]) -> None:
        """Execute the runs. After a failure or a signal, no further runs start."""
        try:
            await asyncio.gather(*map(self._work, slots))
        finally:
            self.kill()
        if self._signal and self._left:
            raise Interrupted(
                f"{signal_name(self._signal)}: stopped, runs left: {self._left:,}; run the same "
                "command to continue",
                self._signal,
            )
        if self._failure:
            raise self._failure

    def stop(self, number: int) -> None:
        """Ask the active runs to save their state and exit."""
        self._signal = number
        self._console.say(
            f"{signal_name(number)}: saving and stopping the runs; a second signal kills them "
            "without saving"
        )
        for child in self._active:
            child.process.terminate()

    def kill(self, _: int = signal.SIGKILL) -> None:
        """Kill the active runs without saving."""
        for child in self._active:
            child.kill()

    async def _work(self, slot: dict[str, str]) -> None:
        """Execute waiting runs one after the other; store an error until all active runs ended."""
        while self._waiting and not self._failure and not self._signal:
            try:
                await self._execute(self._waiting.popleft(), slot)
            except FastSiamError as error:
                self._failure = self._failure or error
                if self._active:  # otherwise the error ends the study now
                    self._console.say(f"{error}; no further run starts, active runs finish")
            await asyncio.sleep(_TICK)  # notice failures of other runs before the next one starts

    async def _execute(self, run: Run, slot: dict[str, str]) -> None:
        """Train a run, then evaluate it linearly if the study needs that."""
        run.prepare()
        verb = "resuming" if (run.folder / "checkpoints").exists() else "starting"
        self._console.say(f"{verb} {run.folder.name}; its output is in {run.log_file}")
        start = time.monotonic()
        while True:
            trains = not run.is_trained
            child = Child(_command(run), run.log_file, **slot)
            self._active.add(child)
            if self._signal:  # it arrived while the process was starting
                child.process.terminate()
            while child.process.poll() is None:
                await asyncio.sleep(_TICK)
            self._active.remove(child)
            if self._signal and not run.is_done:
                return
            if message := child.divergence():
                with atomic_write_for_user(run.diverged_file) as temporary:
                    temporary.write_text(f"{message}\n")
            if result := read_result(run):
                break
            if child.process.returncode or not (trains and run.is_trained):
                missing = "kNN evaluation after its last epoch"
                raise child.failure(run.folder.name, missing if trains else "linear evaluation")
        self._left -= 1
        elapsed = duration(time.monotonic() - start)
        self._console.say(
            f"{run.folder.name}: {_figures(result, run)} in {elapsed}; {self._left:,} left"
        )


def _figures(result: Result, run: Run) -> str:
    if result.diverged:
        return "diverged: its loss was not finite"
    return (
        f"{run.scale.measure} {result.top1:.1f}%, std {result.z_std:.2f}, "
        f"rank {result.rank:.0f}, loss {result.loss:.3f}"
    )


def _command(run: Run) -> list[str]:
    """Return the command of a run's next stage: training, or linear evaluation once trained."""
    if not run.is_trained:
        return [*FASTSIAM, "train", "--config", str(run.settings_file), "--out", str(run.folder)]
    config = run.config
    options = ["--cached"] if run.scale.cached else []
    options += ["--data", str(config.data.root), "--gpus", str(config.run.gpus)]
    return [*FASTSIAM, "eval", "linear", str(run.folder), *options, "--device", config.run.device]
