"""Records of evaluations: ``RUN/eval/*.json``, which the report and the model card show.

An ``Evaluation`` says what is evaluated and how; a ``Record`` is one with what came out.
"""

from __future__ import annotations

import errno
import json
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from fastsiam.environment import environment
from fastsiam.errors import DataError, FastSiamError
from fastsiam.files import explained, parsed_json

Kind = Literal["knn", "linear", "finetune", "detect"]
_RECORD = 1 << 16
"""Bytes that a disk should have for a record, which are tried before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    """Which network an evaluation is of."""

    backbone: str
    stem: str
    layout: str
    """Whose file it is: fastsiam's, or another program's."""
    file: str
    epoch: float | None
    """Epochs that it was trained for; None where the file does not say."""
    untrained: bool
    """Whether its weights are fresh ones."""
    fingerprint: str
    """Hash of its weights and statistics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """Which images a network is evaluated on."""

    root: str
    train: int
    """Training images that are used."""
    val: int
    """Validation images."""
    classes: int
    labels_crc32: str
    """Checksum of all labels, in the order of the images."""
    holdout: str | None = None
    """Share of each class of the training images that is validated on; None: there is a split."""
    image_column: str | None = None
    """Column of the data that holds the images; None: none was named."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; without those that are None and that version 0.2 had not."""
        plain = asdict(self)
        for name in ("holdout", "image_column"):
            if plain[name] is None:
                del plain[name]
        return plain


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDataFacts(DataFacts):
    """Images of an evaluation that trains with labels, perhaps on a part of them."""

    percent: float
    """Share of the training images that was asked for."""
    subset: str | None
    """File with the names of those to use."""
    chosen_crc32: str | None
    """Checksum of their positions; None if all are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """How images are made ready, and where the network takes them."""

    crop: int
    """Side of the central crop, in pixels."""
    resize: int
    """Shorter side before that crop, in pixels."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pipeline: str
    precision: str
    ranks: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is evaluated and how: all that its figures depend on."""

    kind: Kind
    network: NetworkFacts
    data: DataFacts
    images: ImageFacts
    protocol: dict[str, Any]
    """The measure's settings."""

    @property
    def identity(self) -> str:
        """What evaluations by the same protocol on the same images share, wherever these lie."""
        data, images = self.data.to_dict(), asdict(self.images)
        for elsewhere in ("pipeline", "ranks"):
            del images[elsewhere]
        del data["root"]
        return json.dumps([data, images, self.protocol], sort_keys=True)

    def path(self, run: Path, *details: str) -> Path:
        """Return where the record goes within a run.

        The file's name ends in a hash of ``identity``: another evaluation has another name.

        Args:
            run: the run's folder.
            details: of the protocol, for people; empty ones are left out.
        """
        mark = f"{zlib.crc32(self.identity.encode()):08x}"[:6]
        parts = [self.kind, *filter(None, details), f"epoch{self.network.epoch:g}", mark]
        return run / "eval" / f"{'-'.join(parts)}.json"

    def record(
        self,
        *,
        results: list[dict[str, Any]],
        summary: list[str],
        per_class: dict[str, float | None],
        speed: dict[str, float],
        images_validated: int | None = None,
    ) -> Record:
        """Return the record of what came out, here and today."""
        return Record(
            **{f.name: getattr(self, f.name) for f in fields(Evaluation)},
            results=results,
            summary=summary,
            per_class=per_class,
            speed=speed,
            images_validated=images_validated,
            environment=environment(),
            date=time.strftime("%Y-%m-%d"),
        )


@dataclass(frozen=True, kw_only=True)
class Record(Evaluation):
    """An evaluation and what came out of it."""

    results: list[dict[str, Any]]
    """A line of figures for each features, k and temperature (kNN), for each trial (detect), or for
    each rate (the others). Accuracies and average precisions are percent."""
    summary: list[str]
    """The results for people; those of kNN line by line."""
    per_class: dict[str, float | None]
    """Top-1 of each class in percent, of ``headline``; None for a class without images."""
    speed: dict[str, float]
    images_validated: int | None = None
    """Validation images that were counted, each once; None for kNN, which takes them all."""
    environment: dict[str, Any]
    """Machine, versions, commit."""
    date: str
    """Day of the evaluation."""

    @property
    def best(self) -> dict[str, Any]:
        """The line of ``results`` with the highest top-1 (detect: AP)."""
        figure = "AP" if self.kind == "detect" else "top1"
        return max(self.results, key=lambda line: line[figure])

    @property
    def headline(self) -> dict[str, Any]:
        """The line of ``results`` that stands for the network: the best, or kNN's first vote."""
        if self.kind != "knn":
            return self.best
        return self.first_with(self.results[-1]["features"])

    def first_with(self, features: str) -> dict[str, Any]:
        """Return kNN's first result with these features: pixels, untrained or trained."""
        return next(line for line in self.results if line["features"] == features)

    @property
    def over_trials(self) -> tuple[dict[str, float], dict[str, float | None]]:
        """Means and standard deviations (None of a single trial) of a detector's figures."""
        columns = {
            name: [line[name] for line in self.results]
            for name in self.results[0]
            if name not in ("trial", "seed", "seconds")
        }
        means = {name: statistics.fmean(values) for name, values in columns.items()}
        spread = {
            name: statistics.stdev(values) if len(values) > 1 else None
            for name, values in columns.items()
        }
        return means, spread

    def class_lines(self) -> list[str]:
        """Return the accuracies of the classes for people, a line each below a heading."""
        heading = self.summary[self.results.index(self.headline)]
        return [f"of each class, {heading}:"] + [
            f"  {name}: " + ("no images" if top1 is None else f"{top1:.2f}%")
            for name, top1 in self.per_class.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; what scripts look for most stands there by its own name."""
        plain = asdict(self) | {"data": self.data.to_dict()}
        if self.kind == "knn":
            del plain["images_validated"]
            kinds = dict.fromkeys(line["features"] for line in self.results)
            return plain | {kind: self.first_with(kind) for kind in kinds}
        if self.kind == "detect":
            return plain | {"mean": self.over_trials[0], "deviation": self.over_trials[1]}
        return plain | {"best": self.best}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Record:
        """Rebuild a record out of ``to_dict``; names that are none of its fields are passed over.

        Raises:
            KeyError, TypeError, ValueError: it is no record.
        """
        data_kind = DataFacts if plain["kind"] in ("knn", "detect") else TrainingDataFacts
        if plain["kind"] not in get_args(Kind) or not plain["results"]:
            raise ValueError("an evaluation of no kind that is known, or without results")
        images = plain["images"]
        nested = {
            "network": NetworkFacts(**plain["network"]),
            "data": data_kind(**plain["data"]),
            "images": ImageFacts(
                **images | {"mean": tuple(images["mean"]), "std": tuple(images["std"])}
            ),
        }
        known = {f.name: plain[f.name] for f in fields(cls) if f.name in plain}
        return cls(**known | nested)


def check_targets(*targets: Path) -> None:
    """Make the folders of files that will be written, before hours are spent on what goes in.

    Raises:
        FastSiamError: one cannot be written.
    """
    for target in targets:
        with explained(FastSiamError, f"cannot write {target}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=target.parent, buffering=0) as probe:
                probe.write(bytes(_RECORD))
            if target.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))


def read_records(run: Path) -> list[Record]:
    """Return the records of a run's evaluations, in the order of their files' names.

    Raises:
        DataError: a file is no record.
    """
    found = []
    for path in sorted((run / "eval").glob("*.json")):
        try:
            found.append(Record.from_dict(parsed_json(path.read_text())))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is no record of an evaluation: move it elsewhere") from error
    return found
