"""What ``fastsiam eval`` found of runs, as tables: kNN over k and T, classifiers by their rates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastsiam.console import rounded
from fastsiam.report import html as page
from fastsiam.run.records import DataFacts, ImageFacts, Record

_FEATURES = {"trained": "trained", "untrained": "untrained", "pixels": "raw pixels"}
"""What kNN compares, in the order of the rows."""
_HEADS = ("run", "epoch", "measure", "best top-1 (%)", "top-5 (%)", "rate: top-1", "images", "on")


_DETECTION_HEADS = (
    "run", "epoch", "task", "detector", "AP50", "AP", "AP75", "trials", "not the protocol's", "on",
)  # fmt: skip


def evaluations(found: Mapping[str, Sequence[Record]]) -> str:
    """Return the section of a page, HTML; empty if nothing was evaluated.

    Args:
        found: the records of each run, by the run's name.
    """
    parts = [part for run, records in found.items() for part in _knn_of(run, records)]
    trained = [
        _trained_row(run, record)
        for run, records in found.items()
        for record in records
        if record.kind not in ("knn", "detect")
    ]
    if trained:
        parts.append(page.subheading("Trained with labels") + page.table(trained, _HEADS))
    detected = [
        row
        for run, records in found.items()
        for record in records
        if record.kind == "detect"
        for row in _detection_rows(run, record)
    ]
    if detected:
        parts.append(page.subheading("Detection") + page.table(detected, _DETECTION_HEADS))
    return "<h2>Evaluations</h2>" + "".join(parts) if parts else ""


@dataclass(frozen=True, slots=True)
class _Figure:
    """One accuracy of kNN."""

    features: str
    epoch: float | None
    k: int
    temperature: float
    top1: float

    @property
    def row(self) -> tuple[int, float, int]:
        """What decides the row in a grid, and the order of the rows."""
        return list(_FEATURES).index(self.features), self.epoch or 0.0, self.k

    @property
    def heads(self) -> tuple[str, str, str]:
        epoch = "" if self.epoch is None else rounded(self.epoch)
        return _FEATURES[self.features], epoch, f"{self.k}"


def _knn_of(run: str, records: Iterable[Record]) -> list[str]:
    """Return a grid of a run's kNN accuracies for each set of images."""
    alike: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.kind == "knn":
            images = _images(record.data, record.images)
            alike.setdefault((images, record.images.precision), []).append(record)
    parts = []
    for (images, _), group in alike.items():
        figures = [
            _Figure(
                line["features"],
                line.get("epoch"),
                line["k"],
                line["temperature"],
                line["top1"],
            )
            for record in group
            for line in record.results
        ]
        dates = " to ".join(dict.fromkeys((group[0].date, group[-1].date)))
        parts.append(page.subheading(f"kNN top-1 (%) of {run}", f"{images}; {dates}"))
        parts.append(_grid(figures))
    return parts


def _grid(figures: Sequence[_Figure]) -> str:
    """Return accuracies as rows of k and columns of T; the best of trained features is marked."""
    temperatures = sorted({figure.temperature for figure in figures})
    best = {
        kind: max(figure.top1 for figure in figures if figure.features == kind)
        for kind in {figure.features for figure in figures}
    }
    rows: dict[Any, dict[float, _Figure]] = {}
    for figure in sorted(figures, key=lambda figure: figure.row):
        rows.setdefault(figure.heads, {})[figure.temperature] = figure
    table = [
        [
            *heads,
            *(
                page.Cell(
                    f"{row[t].top1:.2f}" if t in row else "",
                    best=t in row and row[t].top1 == best[row[t].features],
                )
                for t in temperatures
            ),
        ]
        for heads, row in rows.items()
    ]
    return page.table(table, ("features", "epoch", "k", *(f"T {t:g}" for t in temperatures)))


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
    rates = ", ".join(f"{line['lr']:g}: {line['top1']:.2f}" for line in record.results)
    epoch = record.network.epoch
    return [
        run,
        "" if epoch is None else rounded(epoch),
        ", ".join(how),
        f"{best['top1']:.2f}",
        f"{best['top5']:.2f}",
        rates,
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
