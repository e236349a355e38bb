"""What ``fastsiam eval`` measured of runs, as tables: one for each kind of evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastsiam.console import rounded
from fastsiam.report.page import Table, text_of
from fastsiam.run.records import Record

_TITLES = {"knn": "kNN", "linear": "Linear", "finetune": "Fine-tuning", "detect": "Detection"}
_COLUMNS = {"top1": "top-1 (%)", "top5": "top-5 (%)", "temperature": "T", "lr": "base rate"}
"""What the page calls figures of a record; others keep their names."""
_PROTOCOL = ("task", "detector", "optimizer", "batch", "epochs", "cached", "trials", "differences")
"""What the page says of a protocol."""


def evaluation_tables(records: Mapping[str, Sequence[Record]]) -> list[Table]:
    """Return a table for each kind of evaluation, with a row for each result.

    Args:
        records: evaluations of each run, by the run's name.
    """
    every = [(run, record) for run, of_run in records.items() for record in of_run]
    tables = []
    for kind, title in _TITLES.items():
        rows = [row for run, record in every if record.kind == kind for row in _rows(run, record)]
        heads = list(dict.fromkeys(name for row in rows for name in row))
        if rows:
            tables.append(Table([[row.get(x, "") for x in heads] for row in rows], heads, title))
    return tables


def _rows(run: str, record: Record) -> Iterator[dict[str, str]]:
    """Yield a row for each result; of a detector's trials their mean and standard deviation."""
    network, data, images, protocol = record.network, record.data, record.images, record.protocol
    epoch = "untrained" if network.untrained else rounded(network.epoch or 0)
    results: list[dict[str, Any]] = record.results
    if record.kind == "detect":
        means, spread = record.over_trials
        results = [
            {
                name: f"{mean:.1f}" + ("" if (sd := spread[name]) is None else f" ± {sd:.1f}")
                for name, mean in means.items()
            }
        ]
    how = {name: text_of(protocol[name]) for name in _PROTOCOL if protocol.get(name)}
    for result in results:
        figures = {
            _COLUMNS.get(name, name): f"{value:.2f}" if "top" in name else text_of(value)
            for name, value in result.items()
            if name != "epoch"
        }
        yield {
            "run": run,
            "epoch": epoch if result.get("features", "trained") == "trained" else "",
            **figures,
            **how,
            "images": (
                f"{data.train:,} to train on, {data.val:,} to validate, of {data.root}; shorter "
                f"side {images.resize}, crop {images.crop}"
            ),
            "on": record.date,
        }
