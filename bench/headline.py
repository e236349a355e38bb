"""``fastsiam bench headline``: time that FastSiam and SimSiam take to reach a kNN accuracy.

Each method trains on CIFAR-10 with its recipe until its kNN accuracy reaches the goal. The command
trains for some minutes and stops; the next call resumes. The record has the accuracy over training
time, which is summed over all calls and excludes evaluations.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastsiam.bench.config import HeadlineConfig
from fastsiam.bench.measurements import circumstances
from fastsiam.child_process import FASTSIAM, Child
from fastsiam.config import DataConfig
from fastsiam.config.recipes import RECIPES
from fastsiam.config.settings_files import RunSettings
from fastsiam.console import Console, duration
from fastsiam.environment import environment, hardware
from fastsiam.errors import SIGNALLED, FastSiamError
from fastsiam.files import atomic_write_for_user, write_json
from fastsiam.report import drawing
from fastsiam.run.log import read_metrics
from fastsiam.run.records import check_targets
from fastsiam.signals import STOPS, exit_after_signal, handle_signals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECORD, PICTURE = "headline.json", "headline.png"
"""File names in the output folder."""
_RECIPES = {"fastsiam": "fastsiam_cifar10", "simsiam": "cifar10"}
"""The recipe of each method, in training order."""
_PROTOCOL = ("--set", "knn_k=200", "--set", "knn_temperature=0.1")
"""lightly's kNN settings, so that results are comparable with its published ones."""
_POLL = 0.5
"""Seconds between two reads of a run's log."""
_PUBLIC = (
    ("FastSiam, batch 128, 200 epochs", 164, 90.6),
    ("SimSiam, batch 512, 800 epochs", 334, 90.4),
)
"""lightly's published CIFAR-10 benchmark, ResNet-18 on one A6000: run, minutes, kNN top-1 in %."""
_COLOURS = {"fastsiam": drawing.VERMILION, "simsiam": drawing.BLUE}


@dataclass(frozen=True, slots=True)
class Training:
    """The training run of one method."""

    method: str
    config: HeadlineConfig

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.out) / self.method

    @property
    def command(self) -> list[str]:
        """The command that starts or resumes the run."""
        config = self.config
        options = {
            "recipe": _RECIPES[self.method], "data": config.data, "out": self.folder,
            "seed": config.seed, "device": config.device, "knn-every": config.knn_every,
            "tracker": "none", "width": config.width or None, "epochs": config.epochs or None,
        }  # fmt: skip
        arguments = [f"--{name}={value}" for name, value in options.items() if value is not None]
        arguments += ["--cuda-graphs"] * self._uses_graphs
        return [*FASTSIAM, "train", *arguments, *_PROTOCOL]

    @property
    def _uses_graphs(self) -> bool:
        """Whether steps are replayed as CUDA graphs."""
        return self.config.cuda_graphs and _has_gpu(self.config.device)

    @property
    def curve(self) -> list[dict[str, float]]:
        """The kNN evaluations of the run; see ``knn_curve``."""
        return knn_curve(self.folder)

    @property
    def _progress_lines(self) -> int:
        """Number of lines in the run's log that follow a training step."""
        return sum(line.get("epoch", 0) > 0 for line in read_metrics(self.folder))

    @property
    def seconds_to_goal(self) -> float | None:
        """Seconds of training until the goal was reached; None if it has not been reached."""
        times = (one["seconds"] for one in self.curve if one["top1"] >= self.config.goal)
        return next(times, None)

    @property
    def is_done(self) -> bool:
        """Whether the goal was reached or the last epoch evaluated."""
        epochs = self.config.epochs or RECIPES[_RECIPES[self.method]]().optim.epochs
        curve = self.curve
        return self.seconds_to_goal is not None or bool(curve and curve[-1]["epoch"] >= epochs)

    def check_continues(self) -> None:
        """Check that the settings match the run in the folder, if there is one.

        Raises:
            FastSiamError: an option differs; the message names it.
        """
        if not (self.folder / "config.json").exists():
            return
        settings, config = RunSettings.read(self.folder), self.config
        old, default = settings.config, RECIPES[_RECIPES[self.method]]()
        options: list[tuple[str, Any, Any]] = [
            ("--seed ", old.numerics.seed, config.seed),
            ("--epochs ", old.optim.epochs, config.epochs or default.optim.epochs),
            ("--width ", old.model.width, config.width or default.model.width),
        ]
        if self.is_done:  # otherwise train compares the images, which may have moved
            old_root, new_root = (DataConfig(data=x).root for x in (old.data.data, config.data))
            options += [("--data ", os.path.abspath(str(old_root)), os.path.abspath(str(new_root)))]
        elif self._progress_lines:  # the minutes of all calls are added up
            old_gpu, gpu = ((*x["gpus"], "none")[0] for x in (settings.environment, environment()))
            # A run that could not compile uses no graphs either, but they were asked for.
            old_graphs = settings.user_config.step.cuda_graphs
            flags = {True: "--cuda-graphs", False: "--no-cuda-graphs"}
            options += [
                ("", flags[old_graphs], flags[self._uses_graphs]),
                ("GPU ", old_gpu, gpu),
            ]
        for name, old_value, new_value in options:
            if old_value != new_value:
                raise FastSiamError(
                    f"{self.folder} was trained with {name}{old_value}, not {new_value}: use "
                    "the same, or another --out"
                )

    def train(self, until: float, signals: Sequence[int]) -> None:
        """Train until ``time.monotonic()`` passes ``until``, or to the goal or the last epoch.

        The run also ends, after it has saved, if ``signals`` gets an element.

        Raises:
            FastSiamError: the run failed; the message has its error and its log.
        """
        lines_before = self._progress_lines  # after kill -9, the run drops some of them
        # A second signal would end the run before it saves: it gets only the one sent below.
        child = Child(self.command, self.folder / "headline.log")
        process = child.process
        try:
            while process.poll() is None:
                lines = self._progress_lines
                has_begun, lines_before = lines > lines_before, min(lines, lines_before)
                is_over = time.monotonic() > until or self.seconds_to_goal is not None
                if signals or (has_begun and is_over):
                    process.send_signal(signal.SIGTERM if signals else signal.SIGUSR1)
                    process.wait()
                    break
                time.sleep(_POLL)
        finally:
            process.terminate()  # after an error; otherwise it has ended
            process.wait()
        if process.returncode not in (0, SIGNALLED + signal.SIGUSR1) and not signals:
            raise child.failure(f"training of {self.method}", "evaluation")


def _has_gpu(device: str) -> bool:
    import torch

    return device != "cpu" and torch.cuda.is_available()


def knn_curve(run: Path) -> list[dict[str, float]]:
    """Return a run's kNN evaluations: epoch, top-1 in percent, seconds of training before each.

    An epoch may end between two log lines; the seconds are interpolated. A run that was stopped
    after an evaluation may have no later line; its speed is then taken to be the average.
    """
    lines = read_metrics(run)
    logged = [(0.0, 0.0)]
    logged += [(x["epoch"], x["seconds"]) for x in lines if x["kind"] == "train"]
    # No evaluation is further away: the next line would come first.
    logged.append((2 * logged[-1][0], 2 * logged[-1][1]))
    epochs, seconds = zip(*logged, strict=True)
    return [
        {
            "epoch": line["epoch"],
            "top1": line["top1"],
            "seconds": float(np.interp(line["epoch"], epochs, seconds)),
        }
        for line in lines
        if line["kind"] == "knn"
    ]


def run(config: HeadlineConfig) -> dict[str, Any]:
    """Train for the configured number of minutes; write and return the record.

    Raises:
        FastSiamError: a run failed, or the folder cannot be written.
    """
    console, until = Console(), time.monotonic() + 60 * config.minutes
    trainings = [Training(method, config) for method in config.only]
    out = Path(config.out)
    check_targets(out / RECORD, out / PICTURE)
    for one in trainings:
        one.check_continues()
    signals: list[int] = []
    with handle_signals(STOPS, lambda number, _: signals.append(number)):
        for one in trainings:
            if not one.is_done and time.monotonic() < until:
                one.train(until, signals)
            if signals:
                exit_after_signal(signals[0])
            console.say(_progress(one))
    others = (Training(method, config) for method in _RECIPES if method not in config.only)
    record = _record(config, [*trainings, *(one for one in others if one.curve)])
    write_json(out / RECORD, record)
    with atomic_write_for_user(out / PICTURE) as temporary:
        temporary.write_bytes(drawing.png(draw(record)))
    if not all(one.is_done for one in trainings):
        console.say("run the same command again to continue")
    return record


def _progress(training: Training) -> str:
    curve, goal = training.curve, training.config.goal
    if (seconds := training.seconds_to_goal) is not None:
        return f"{training.method}: {goal:g}% kNN after {duration(seconds)} of training"
    if not curve:
        return f"{training.method}: not evaluated yet"
    last, elapsed = curve[-1], duration(curve[-1]["seconds"])
    return (
        f"{training.method}: {last['top1']:.2f}% kNN at epoch {last['epoch']:g}, after {elapsed} "
        f"of training; the goal is {goal:g}%"
    )


def _record(config: HeadlineConfig, trainings: list[Training]) -> dict[str, Any]:
    runs = []
    for one in trainings:
        run: dict[str, Any] = {"method": one.method, "recipe": _RECIPES[one.method], "knn": {}}
        for line in read_metrics(one.folder):
            if line["kind"] == "knn":
                run["knn"] = {name: line[name] for name in ("k", "temperature", "bank")}
        if (one.folder / "config.json").exists():
            settings = RunSettings.read(one.folder)
            run |= {"config": settings.config.to_dict(), "environment": settings.environment}
        runs.append(run | {"seconds_to_goal": one.seconds_to_goal, "curve": one.curve})
    return {
        "case": "headline",
        "goal": config.goal,
        "runs": runs,
        "in_the_clock": "training: loading, forward, backward, optimizer; without evaluations",
        **circumstances(),
    }


def draw(record: dict[str, Any]) -> Figure:
    """Plot kNN accuracy over minutes of training, with published runs for comparison."""
    environments = [run["environment"] for run in record["runs"] if "environment" in run]
    machines = " and ".join(dict.fromkeys(map(hardware, environments)))
    figure = drawing.canvas(
        f"CIFAR-10 to {record['goal']:g}% kNN",
        f"Minutes of training without evaluations, on {machines or 'no machine yet'}. Crosses: "
        "lightly's published runs on one A6000.",
        3.2,
    )
    axes = drawing.plain(figure.subplots())
    for one in record["runs"]:
        minutes = [point["seconds"] / 60 for point in one["curve"]]
        tops = [point["top1"] for point in one["curve"]]
        axes.plot(minutes, tops, "o-", color=_COLOURS[one["method"]], label=one["method"], ms=3)
    for name, minute, top1 in _PUBLIC:
        axes.plot([minute], [top1], "x", color=drawing.GRAY)
        axes.annotate(
            name, (minute, top1), (0, -9), textcoords="offset points", ha="center", size=6
        )
    axes.axhline(record["goal"], color=drawing.GRAY, lw=0.8, ls=":")
    axes.set_xlabel("minutes of training")
    axes.set_ylabel("kNN top-1 accuracy, %", fontsize=7)
    axes.legend(frameon=False, fontsize=7)
    return figure
