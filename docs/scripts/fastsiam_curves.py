"""Print the tables of docs/results.md on all of CIFAR-10, and draw their pictures.

    python docs/scripts/fastsiam_curves.py

The records are runs of ``fastsiam train`` and results of ``fastsiam bench lightly``, one per seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from fastsiam.bench.headline import knn_curve
from fastsiam.files import parse_json
from fastsiam.markdown import format_mean, markdown
from fastsiam.report import drawing

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "bench" / "results" / "fastsiam-cifar10"
LONG_RECORDS = ROOT / "bench" / "results" / "cifar10-50-epochs"
PICTURE = ROOT / "docs" / "fastsiam-lightly.png"
LONG_PICTURE = ROOT / "docs" / "cifar10-50-epochs.png"
COLOURS = {"fastsiam": drawing.VERMILION, "lightly": drawing.BLUE}
EPOCHS = (0, 2, 4, 8, 12, 16, 20)  # columns of the first table
LONG_EPOCHS = (0, 2, 10, 20, 30, 40, 50)  # and of the second one
IMAGES = 390 * 128  # images that an epoch trains on: full batches only

Curve = Sequence[dict[str, float]]
"""A run's evaluations: epoch, top-1 in percent, seconds of training before each."""


def curves() -> dict[str, list[Curve]]:
    """Return the curves of each program's runs, one per seed."""
    fastsiam = [knn_curve(run) for run in sorted(RECORDS.glob("fastsiam-*"))]
    results = [parse_json(path.read_bytes()) for path in sorted(RECORDS.glob("lightly-*.json"))]
    return {"fastsiam": fastsiam, "lightly": [result["knn"] for result in results]}


def long_curves() -> dict[str, list[Curve]]:
    """Return the curves of each method's runs of 50 epochs, one per seed."""
    runs = {
        method: [knn_curve(run) for run in sorted(LONG_RECORDS.glob(f"{method}-*"))]
        for method in ("simsiam", "fastsiam")
    }
    return {method: of_method for method, of_method in runs.items() if of_method}


def epoch_seconds(run: Curve) -> float:
    """Return the least time of an epoch: in others, the core did other work or the run paused."""
    return min((y["seconds"] - x["seconds"]) / (y["epoch"] - x["epoch"]) for x, y in pairwise(run))


def table() -> str:
    """Return the table: accuracy after some epochs, time and speed of each program."""
    rows = []
    for program, runs in curves().items():
        accuracies = _accuracies(runs, EPOCHS)
        seconds = [epoch_seconds(run) for run in runs]
        speeds = format_mean([IMAGES / one for one in seconds], 0)
        minutes = f"{EPOCHS[-1] * fmean(seconds) / 60:.0f}"
        rows.append([program, str(len(runs)), *accuracies, minutes, speeds])
    heads = ["", "seeds", *(f"epoch {epoch}" for epoch in EPOCHS), "minutes", "images/s"]
    return markdown(heads, rows)


def long_table() -> str:
    """Return the table of the runs of 50 epochs: accuracy of each method after some epochs."""
    rows = [
        [method, str(len(runs)), *_accuracies(runs, LONG_EPOCHS)]
        for method, runs in long_curves().items()
    ]
    return markdown(["", "seeds", *(f"epoch {epoch}" for epoch in LONG_EPOCHS)], rows)


def _accuracies(runs: Sequence[Curve], epochs: Sequence[int]) -> list[str]:
    """Return the mean and standard deviation over runs of the accuracy after each epoch."""
    return [
        format_mean([one["top1"] for run in runs for one in run if one["epoch"] == epoch], 1)
        for epoch in epochs
    ]


def draw() -> Figure:
    """Plot the accuracy over epochs and over minutes of training, one line per run."""
    figure = drawing.canvas(
        "FastSiam on CIFAR-10, by fastsiam and by lightly",
        "kNN top-1 accuracy in % (k 200, temperature 0.1). ResNet-18 with 8 channels, one core of "
        "an Intel Xeon per run. Minutes: epochs times the least time of an epoch.",
        2.4,
    )
    over_epochs, over_minutes = figure.subplots(1, 2, sharey=True)
    drawing.plain(over_epochs).set_xlabel("epochs")
    drawing.plain(over_minutes).set_xlabel("minutes of training")
    for program, runs in curves().items():
        for number, run in enumerate(runs):
            epochs, accuracies = ([one[key] for one in run] for key in ("epoch", "top1"))
            minutes = [epoch * epoch_seconds(run) / 60 for epoch in epochs]
            label = None if number else program
            for axes, across in ((over_epochs, epochs), (over_minutes, minutes)):
                axes.plot(across, accuracies, "o-", color=COLOURS[program], label=label, lw=1, ms=2)
    over_epochs.legend(frameon=False, fontsize=7)
    return figure


def draw_long() -> Figure:
    """Plot the accuracy over epochs of the runs of 50 epochs, and of FastSiam's of 20."""
    figure = drawing.canvas(
        "CIFAR-10: 50 epochs of training",
        "kNN top-1 accuracy in % (k 200, temperature 0.1). ResNet-18 with 8 channels; one line for "
        "each seed.",
        2.4,
    )
    axes = drawing.plain(figure.subplots())
    axes.set_xlabel("epochs")
    for runs, label, colour in (
        (long_curves().get("simsiam", ()), "SimSiam, 50 epochs", drawing.INK),
        (long_curves().get("fastsiam", ()), "FastSiam, 50 epochs", drawing.VERMILION),
        (curves()["lightly"], "FastSiam by lightly, 20 epochs", drawing.BLUE),
    ):
        for number, run in enumerate(runs):
            epochs, accuracies = ([one[key] for one in run] for key in ("epoch", "top1"))
            axes.plot(
                epochs, accuracies, "o-", color=colour, label=None if number else label, lw=1, ms=2
            )
    axes.legend(frameon=False, fontsize=7)
    return figure


if __name__ == "__main__":
    print(table(), long_table(), sep="\n\n")
    PICTURE.write_bytes(drawing.png(draw()))
    LONG_PICTURE.write_bytes(drawing.png(draw_long()))
