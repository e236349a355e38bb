"""What ``fastsiam eval`` measured of runs, as tables: kNN over k and T, classifiers, detection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fastsiam.console import rounded
from fastsiam.report.page import Best, Table
from fastsiam.run.records import DataFacts, ImageFacts, Record

_FEATURES = {"trained": "trained", "untrained": "untrained", "pixels": "raw pixels"}
"""What kNN compares, in the order of the rows."""
_TRAINED_HEADS = (
    "run", "epoch", "measure", "best top-1 (%)", "top-5 (%)", "rate: top-1", "images", "on",
)  # fmt: skip
_DETECTION_HEADS = (
    "run", "epoch", "task", "detector", "AP50", "AP", "AP75", "trials", "not the protocol's", "on",
)  # fmt: skip


def evaluation_tables(records: Mapping[str, Sequence[Record]]) -> list[Table]:
    """Return a kNN table for each run and set of images, and one table of each other kind.

    Args:
        records: evaluations of each run, by the run's name.
    """
    every = [(run, record) for run, of_run in records.items() for record in of_run]
    trained = [_trained_row(*one) for one in every if one[1].kind not in ("knn", "detect")]
    detected = [row for one in every if one[1].kind == "detect" for row in _detection_rows(*one)]
    tables = [table for run, of_run in records.items() for table in _knn_tables(run, of_run)]
    if trained:
        tables.append(Table(trained, _TRAINED_HEADS, "Trained with labels"))
    if detected:
        tables.append(Table(detected, _DETECTION_HEADS, "Detection"))
    return tables


def _knn_tables(run: str, records: Iterable[Record]) -> Iterator[Table]:
    """Yield a run's kNN accuracies for each set of images and precision."""
    alike: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.kind == "knn":
            images = _images(record.data, record.images)
            alike.setdefault((images, record.images.precision), []).append(record)
    for (images, _), group in alike.items():
        dates = " to ".join(dict.fromkeys((group[0].date, group[-1].date)))
        lines = [line for record in group for line in record.results]
        yield _grid(lines, f"kNN top-1 (%) of {run}", f"{images}; {dates}")


def _grid(lines: Iterable[Mapping[str, Any]], title: str, facts: str) -> Table:
    """Return accuracies in rows of k and columns of T; the best of each features is highlighted."""
    grid: dict[tuple[int, float, int], dict[float, float]] = {}
    best: dict[int, float] = {}
    heads: dict[tuple[int, float, int], tuple[str, str, str]] = {}
    for line in lines:
        kind, epoch = list(_FEATURES).index(line["features"]), line.get("epoch")
        row = kind, epoch or 0.0, line["k"]
        grid.setdefault(row, {})[line["temperature"]] = line["top1"]
        best[kind] = max(line["top1"], best.get(kind, 0.0))
        at = "" if epoch is None else rounded(epoch)
        heads[row] = _FEATURES[line["features"]], at, f"{line['k']}"
    columns = sorted({temperature for top1 in grid.values() for temperature in top1})

    def cell(row: tuple[int, float, int], temperature: float) -> str | Best:
        top1 = grid[row].get(temperature)
        if top1 is None:
            return ""
        return Best(f"{top1:.2f}") if top1 == best[row[0]] else f"{top1:.2f}"

    rows = [[*heads[row], *(cell(row, column) for column in columns)] for row in sorted(grid)]
    return Table(rows, ("features", "epoch", "k", *(f"T {t:g}" for t in columns)), title, facts)


def _trained_row(run: str, record: Record) -> list[Any]:
    """Return the row of a linear classifier, or of a network trained with labels."""
    best, protocol = record.best, record.protocol
    how = [
        record.kind,
        *([protocol["optimizer"]] if record.kind == "linear" else []),
        f"batch {protocol['batch']:,}",
        f"{protocol['epochs']} epochs",
        *(["cached features"] if protocol.get("cached") else []),
    ]
    epoch = record.network.epoch
    return [
        run,
        "" if epoch is None else rounded(epoch),
        ", ".join(how),
        f"{best['top1']:.2f}",
        f"{best['top5']:.2f}",
        ", ".join(f"{line['lr']:g}: {line['top1']:.2f}" for line in record.results),
        _images(record.data, record.images),
        record.date,
    ]


def _detection_rows(run: str, record: Record) -> Iterator[list[Any]]:
    """Yield the row of a detector's boxes, and of its masks if it has some."""
    epoch, protocol = record.network.epoch, record.protocol
    means, spread = record.over_trials
    for what in ("", "mask "):
        if f"{what}AP" not in means:
            continue
        figures = [
            f"{means[name]:.1f}" + ("" if (sd := spread[name]) is None else f" ± {sd:.1f}")
            for name in (f"{what}AP50", f"{what}AP", f"{what}AP75")
        ]
        yield [
            run,
            "untrained" if record.network.untrained else "" if epoch is None else rounded(epoch),
            f"{protocol['task']}{', masks' if what else ''}",
            protocol["detector"],
            *figures,
            f"{len(record.results)}",
            "; ".join(protocol["differences"]),
            record.date,
        ]


def _images(data: DataFacts, images: ImageFacts) -> str:
    return (
        f"{data.train:,} images to train on, {data.val:,} to validate, of {data.root}; shorter "
        f"side {images.resize}, crop {images.crop}"
    )
