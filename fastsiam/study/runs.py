"""The runs of a study: their folders, settings and state.

A run's folder is ``OUT/SCALE/VARIANT-seed-N``. Its ``study.toml`` has the settings as requested,
with each ``auto`` unresolved.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastsiam.config import TrainConfig
from fastsiam.config.evaluate import LinearConfig
from fastsiam.config.settings_files import RunSettings, merge, read_settings, to_toml
from fastsiam.config.study import StudyConfig
from fastsiam.config.train import changes_text, differences
from fastsiam.errors import FastSiamError
from fastsiam.files import atomic_write_for_user
from fastsiam.run.log import read_metrics
from fastsiam.run.records import Record, TrainingDataFacts, read_records
from fastsiam.study.catalogue import Study
from fastsiam.study.scales import Scale

_NUMBERS = {
    "train": ("step", "epoch", "loss", "z_std", "rank"),
    "knn": ("epoch", "top1", "bank"),
}
"""Numbers that studies need in each metrics line, by kind of line."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training run: a variant with a seed, at a scale."""

    folder: Path
    variant: str
    seed: int
    scale: Scale
    config: TrainConfig
    linear: bool = False
    """Whether the run needs a linear evaluation in addition to kNN."""

    @property
    def settings_file(self) -> Path:
        """TOML file with the requested settings."""
        return self.folder / "study.toml"

    @property
    def log_file(self) -> Path:
        """File with the output of the run's processes."""
        return self.folder / "study.log"

    @property
    def diverged_file(self) -> Path:
        """Marker file of a run that ended because its loss was not finite."""
        return self.folder / "diverged"

    @property
    def is_diverged(self) -> bool:
        """Whether the run ended because its loss was not finite; it is not retried."""
        return self.diverged_file.exists()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The run's metrics lines; raises ``DataError`` if a line lacks a required number."""
        return read_metrics(self.folder, numbers=_NUMBERS)

    @property
    def is_trained(self) -> bool:
        """Whether the metrics include the kNN evaluation after the last epoch."""
        return any(
            line["kind"] == "knn" and line["epoch"] >= self.config.optim.epochs
            for line in self.metrics
        )

    @property
    def is_done(self) -> bool:
        """Whether the run diverged, or has all results that the table needs."""
        needs_linear = self.linear or self.scale.measure == "linear top-1"
        return self.is_diverged or (
            self.is_trained and not (needs_linear and self.linear_top1 is None)
        )

    @property
    def linear_top1(self) -> float | None:
        """Top-1 of the linear evaluation after the last epoch; None without one.

        Evaluations on a subset of the training images, or with other settings or data than the
        study's, do not count.
        """
        for record in read_records(self.folder):
            data, ranks = record.data, record.images.ranks
            if record.kind != "linear" or not isinstance(data, TrainingDataFacts):
                continue
            linear = LinearConfig(cached=self.scale.cached).with_defaults(data.train)
            batch = min(linear.batch, data.train // ranks * ranks)
            if (
                record.network.epoch == self.config.optim.epochs
                and data.chosen_crc32 is None
                and record.protocol == replace(linear, batch=batch).protocol()
                and self.has_usual_images(record)
            ):
                return float(record.headline["top1"])
        return None

    def has_usual_images(self, record: Record) -> bool:
        """Return whether an evaluation used the run's own images, cropped and normalised alike.

        The images may have moved since training, if ``study run --data`` named the new place.
        """
        run_config, requested_config = RunSettings.read(self.folder).config, self._read_config()
        full_root = requested_config.data.full_root if requested_config else None
        images, augment = record.images, run_config.augment
        return record.data == replace(
            record.data,
            holdout=run_config.data.holdout or None,
            image_column=run_config.data.image_column or None,
            other_data=record.data.other_data and full_root,
        ) and images == replace(
            images,
            crop=augment.crop,
            resize=run_config.eval_resize,
            mean=augment.mean,
            std=augment.std,
            exif=run_config.data.exif,
            alpha=run_config.data.alpha,
        )

    def prepare(self) -> None:
        """Write the requested settings into the run's folder."""
        with atomic_write_for_user(self.settings_file) as temporary:
            temporary.write_text(to_toml(self.config, recipe=self.scale.recipe))

    def check_settings(self) -> None:
        """Check that a run that was started earlier has the same settings.

        Raises:
            FastSiamError: settings differ; the message names them.
        """
        requested_config = self._read_config()
        changes = differences(requested_config, self.config) if requested_config else {}
        if changes and (read_metrics(self.folder) or self.is_diverged):
            raise FastSiamError(
                f"{self.folder} contains a run with different settings ({changes_text(changes)}); "
                "choose another --out, or delete the folder"
            )

    def _read_config(self) -> TrainConfig | None:
        """Read the settings that the last ``study run`` wrote; None before the first."""
        if not self.settings_file.exists():
            return None
        try:
            return TrainConfig.from_flags(merge(read_settings(self.settings_file)).flags)
        except ValueError as error:
            raise FastSiamError(f"{error}; choose another --out, or delete the folder") from error


def images_digest(run: Path) -> str:
    """Return the hash of the names of a run's training images; "" if unknown."""
    from fastsiam.train.image_list import ImageList, fingerprint

    image_list = ImageList.load(run)
    return fingerprint(image_list.names) if image_list else ""


def run_command(study: str, config: StudyConfig) -> str:
    """Return the command that trains a study's runs, without ``--seeds``."""
    epochs = f" --epochs {config.epochs}" if config.epochs else ""
    return f"fastsiam study run {study} --scale {config.scale}{epochs}"


def folder_of(config: StudyConfig) -> Path:
    """Return the parent folder of all runs at a scale."""
    suffix = f"-{config.epochs}-epochs" if config.epochs else ""
    return Path(config.out) / f"{config.scale}{suffix}"


def runs_of(
    studies: Iterable[Study],
    scale: Scale,
    folder: Path,
    *,
    seeds: Iterable[int],
    linear: bool = False,
) -> list[Run]:
    """List the runs of studies: all variants with the first seed, then with the next.

    Variants that several studies share are listed once. Variants with the same settings share a
    folder in ``folder``.
    """
    names = dict.fromkeys(row.variant for study in studies for row in study.rows)
    variants = {name: (scale.shared_variant(name), scale.settings(name)) for name in names}
    return [
        Run(
            folder / f"{shared_variant}-seed-{seed}",
            variant,
            seed,
            scale,
            replace(settings, numerics=replace(settings.numerics, seed=seed)),
            linear,
        )
        for seed in seeds
        for variant, (shared_variant, settings) in variants.items()
    ]


def seeds_in(folder: Path) -> list[int]:
    """Return the seeds of the runs in a folder."""
    matches = (re.fullmatch(r".+-seed-(\d+)", path.name) for path in folder.glob("*-seed-*"))
    return sorted({int(match[1]) for match in matches if match})
