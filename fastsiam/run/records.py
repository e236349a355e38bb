"""Records of evaluations (``RUN/eval/*.json``), which the report and the model card show.

An ``Evaluation`` describes the network, data and protocol; a ``Record`` adds the results.
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
from typing import Any, Literal

from fastsiam.config.setting import convert_value, require
from fastsiam.environment import environment
from fastsiam.errors import DataError, FastSiamError, as_one_line
from fastsiam.files import os_errors_as, parse_json, require_local

Kind = Literal["knn", "linear", "finetune", "detect"]
_FIGURES: dict[str, tuple[str, ...]] = {
    "knn": ("top1", "top5", "k", "temperature", "bank"),
    "linear": ("top1",),
    "finetune": ("top1",),
    "detect": ("AP",),
}
"""Names of the numbers that every result has, by kind of evaluation."""
_RECORD_BYTES = 1 << 16
"""Free disk space that a record needs, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    """The evaluated network."""

    backbone: str
    stem: str
    layout: str
    """Program that wrote the file: fastsiam or another one."""
    file: str
    epoch: float | None
    """Epochs of training; None if the file does not say."""
    untrained: bool
    """Whether the weights are randomly initialised."""
    fingerprint: str
    """Hash of the network's state dict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """The images of an evaluation."""

    root: str
    train: int
    """Number of training images used."""
    val: int
    """Number of validation images."""
    classes: int
    labels_crc32: str
    """Checksum of all labels, in the order of the images."""
    holdout: str | None = None
    """Share of each class of the training images used for validation; None if the data set has a
    validation split."""
    image_column: str | None = None
    """Column of the data with the images; None if the user did not name one."""
    other_data: str | None = None
    """Absolute path of the data if the network was not trained on them, because other data may have
    the same labels; None for the run's own data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDataFacts(DataFacts):
    """The images of an evaluation that trains with labels, on all or some training images."""

    percent: float
    """Value of --percent: 100 with --subset, whose number of images is ``train``."""
    subset: str | None
    """File with the names of the images to use."""
    chosen_crc32: str | None
    """Checksum of the positions of the images used; None if all are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """Preprocessing of the images, and how the network was run."""

    crop: int
    """Side of the central crop, in pixels."""
    resize: int
    """Shorter side before that crop, in pixels."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pipeline: str
    precision: str
    ranks: int
    exif: str = "ignore"
    alpha: str = "drop"


def _plain(facts: DataFacts | ImageFacts) -> dict[str, Any]:
    """Return plain values, without fields at their default: version 0.2 lacks these fields."""
    defaults = {f.name: f.default for f in fields(facts)}
    return {name: x for name, x in asdict(facts).items() if x != defaults[name]}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Everything that the results of an evaluation depend on."""

    kind: Kind
    network: NetworkFacts
    data: DataFacts
    images: ImageFacts
    protocol: dict[str, Any]
    """Settings of the evaluation."""

    @property
    def identity(self) -> str:
        """Key that is equal for evaluations with the same protocol and images."""
        data, images = _plain(self.data), _plain(self.images)
        for key in ("pipeline", "ranks"):
            del images[key]
        del data["root"]
        return json.dumps([data, images, self.protocol], sort_keys=True)

    def path(self, run: Path, *details: str) -> Path:
        """Return the path of the record in a run's folder.

        The file name ends in a hash of ``identity``, so different evaluations have different names.

        Args:
            run: the run's folder.
            details: parts of the protocol to show in the name; empty ones are left out.
        """
        digest = f"{zlib.crc32(self.identity.encode()):08x}"[:6]
        parts = [self.kind, *filter(None, details), f"epoch{self.network.epoch:g}", digest]
        return run / "eval" / f"{'-'.join(parts)}.json"

    def record(self, **results: Any) -> Record:
        """Return a record of the results, with this machine's environment and the date.

        Args:
            results: the other fields of a record.
        """
        today = time.strftime("%Y-%m-%d")
        return Record(**vars(self), **results, environment=environment(), date=today)


@dataclass(frozen=True, kw_only=True)
class Record(Evaluation):
    """An evaluation and its results."""

    results: list[dict[str, Any]]
    """One entry for each combination of features, k and temperature (kNN), for each trial (detect),
    or for each learning rate (linear, finetune). Accuracies and average precisions are in
    percent."""
    summary: list[str]
    """The results as text; for kNN one line per entry of ``results``."""
    per_class: dict[str, float | None]
    """Top-1 of each class for ``headline``, in percent; None for a class without images."""
    speed: dict[str, float]
    """Seconds that the last call evaluated or trained (kNN: with the extraction of features), and
    the images, epochs or steps in that time."""
    images_validated: int | None = None
    """Number of distinct validation images evaluated; None for kNN, which uses all."""
    environment: dict[str, Any]
    """Machine, versions and commit."""
    date: str
    """Day of the evaluation."""

    @property
    def best(self) -> dict[str, Any]:
        """The entry of ``results`` with the highest top-1 (detect: AP)."""
        metric = "AP" if self.kind == "detect" else "top1"
        return max(self.results, key=lambda line: line[metric])

    @property
    def headline(self) -> dict[str, Any]:
        """The entry of ``results`` that represents the network: the best, or kNN's first."""
        if self.kind != "knn":
            return self.best
        return self.first_with(self.results[-1]["features"])

    def first_with(self, features: str) -> dict[str, Any]:
        """Return kNN's first result with these features ("pixels", "untrained" or "trained")."""
        return next(line for line in self.results if line["features"] == features)

    @property
    def over_trials(self) -> tuple[dict[str, float], dict[str, float | None]]:
        """Means and standard deviations over a detector's trials; None for a single trial."""
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
        """Return the accuracies of the classes as text, one line each below a heading."""
        heading = self.summary[self.results.index(self.headline)]
        return [f"per class, {heading}:"] + [
            f"  {as_one_line(name)}: " + ("no images" if top1 is None else f"{top1:.2f}%")
            for name, top1 in self.per_class.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with additional keys for the main results."""
        plain = asdict(self) | {"data": _plain(self.data), "images": _plain(self.images)}
        if self.kind == "knn":
            del plain["images_validated"]
            kinds = dict.fromkeys(line["features"] for line in self.results)
            return plain | {kind: self.first_with(kind) for kind in kinds}
        if self.kind == "detect":
            return plain | {"mean": self.over_trials[0], "deviation": self.over_trials[1]}
        return plain | {"best": self.best}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Record:
        """Rebuild a record from the result of ``to_dict``; unknown keys are ignored.

        Raises:
            LookupError, TypeError, ValueError: it is not a record.
        """
        data_kind = DataFacts if plain["kind"] in ("knn", "detect") else TrainingDataFacts
        if plain["kind"] not in _FIGURES or not plain["results"]:
            raise ValueError("the evaluation has an unknown kind or no results")
        for line in plain["results"]:
            for name in {*line, *_FIGURES[plain["kind"]]} - {"features"}:
                require(type(line[name]) in (int, float), f"{name} must be a number")
        require(isinstance(plain["protocol"], dict), "protocol must be an object")
        nested = {
            "network": convert_value(NetworkFacts, plain["network"], "network"),
            "data": convert_value(data_kind, plain["data"], "data"),
            "images": convert_value(ImageFacts, plain["images"], "images"),
        }
        values = {f.name: plain[f.name] for f in fields(cls) if f.name in plain}
        record = cls(**values | nested)
        if record.kind == "knn" and not record.network.untrained:
            require(any(x["features"] == "trained" for x in record.results), "no trained features")
        record.to_dict()  # raises an error if any other main result is missing
        return record


def check_targets(*targets: Path) -> None:
    """Check that files can be written, before a long evaluation; create their folders.

    Raises:
        FastSiamError: a file cannot be written.
    """
    for target in targets:
        require_local(target)
        if target.exists() and not target.is_file() and not target.is_dir():
            continue  # a device or a pipe, which is written directly
        with os_errors_as(FastSiamError, f"cannot write {target}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=target.parent, buffering=0) as probe:
                probe.write(bytes(_RECORD_BYTES))
            if target.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))


def read_records(run: Path) -> list[Record]:
    """Return the records of a run's evaluations, in the order of their files' names.

    Raises:
        DataError: a file cannot be read, or is not a record.
    """
    return [read_record(path) for path in sorted((run / "eval").glob("*.json"))]


def read_record(path: Path) -> Record:
    """Read the record of an evaluation.

    Raises:
        DataError: the file cannot be read, or is not a record.
    """
    with os_errors_as(DataError, f"cannot read {path}"):
        content = path.read_bytes()
    try:
        return Record.from_dict(parse_json(content))
    except (ValueError, LookupError, TypeError) as error:
        message = f"{path} is not an evaluation record; move it out of this folder"
        raise DataError(message) from error
