"""The runs of a study: where each lies, what it was asked to be, and what is left to do of it.

Runs lie in ``OUT/SCALE/VARIANT-seed-N``. ``study.toml`` in a run's folder holds the settings that
it was asked for, before ``auto`` became what the machine offers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fastsiam.config import TrainConfig
from fastsiam.config.files import merge, read_settings, to_toml
from fastsiam.config.flags import changes_text, differences, from_flags
from fastsiam.config.study import StudyConfig
from fastsiam.errors import FastSiamError
from fastsiam.files import written_for_user
from fastsiam.run.folder import user_of
from fastsiam.run.log import read_metrics
from fastsiam.run.records import read_records
from fastsiam.study.scales import Scale
from fastsiam.study.tables import Study
from fastsiam.study.variants import Change, Variant


@dataclass(frozen=True, slots=True)
class Run:
    """One training run: a variant with a seed, at a scale."""

    folder: Path
    variant: Variant
    seed: int
    scale: Scale
    config: TrainConfig
    linear: bool = False
    """Whether a linear evaluation is due where the table's measure is kNN."""

    @property
    def name(self) -> str:
        """What lines about it call it."""
        return self.folder.name

    @property
    def settings_file(self) -> Path:
        """The file with the settings that were asked for."""
        return self.folder / "study.toml"

    @property
    def log_file(self) -> Path:
        """The file with what its processes said."""
        return self.folder / "study.log"

    @property
    def diverged_file(self) -> Path:
        """The file that says that the loss was not finite, and so ended the run."""
        return self.folder / "diverged"

    @property
    def is_diverged(self) -> bool:
        """Whether the loss was not finite: the run has ended, and is not tried again."""
        return self.diverged_file.exists()

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return self.is_diverged or (self.is_trained and self.is_measured)

    @property
    def is_trained(self) -> bool:
        """Whether the last step was taken and the evaluation after it is there."""
        return any(
            line["kind"] == "knn" and line["epoch"] >= self.config.optim.epochs
            for line in read_metrics(self.folder)
        )

    @property
    def is_measured(self) -> bool:
        """Whether the figures of the table are there."""
        by_knn = self.scale.measure == "kNN top-1" and not self.linear
        return by_knn or self.linear_top1 is not None

    @property
    def linear_top1(self) -> float | None:
        """Top-1 of the linear evaluation after the last epoch, in percent; None without one.

        It is of the scale's kind: on cached features, or on random crops.
        """
        found = [
            record.headline["top1"]
            for record in read_records(self.folder)
            if record.kind == "linear"
            and record.network.epoch == self.config.optim.epochs
            and record.protocol["cached"] == self.scale.cached
        ]
        return found[-1] if found else None

    def prepare(self) -> None:
        """Write down what is asked for.

        Raises:
            FastSiamError: the folder cannot be written.
        """
        with written_for_user(self.settings_file) as temporary:
            temporary.write_text(to_toml(self.config, recipe=self.scale.recipe))

    def check_free(self) -> None:
        """Refuse a run that another process is doing.

        Raises:
            FastSiamError: says which process that is.
        """
        if who := user_of(self.folder):
            raise FastSiamError(
                f"{self.folder} is in use by {who}, as of another study; wait for it or end it, "
                "and begin again"
            )

    def check_settings(self) -> None:
        """Refuse the folder of a run that has begun with other settings.

        Raises:
            FastSiamError: says which settings differ.
        """
        if not self.settings_file.exists():
            return
        try:
            asked = from_flags(merge(files=[read_settings(self.settings_file)]).flags)
        except ValueError as error:
            raise FastSiamError(f"{error}; choose another --out, or delete the folder") from error
        changed = differences(asked, self.config)
        if changed and (read_metrics(self.folder) or self.is_diverged):
            raise FastSiamError(
                f"{self.folder} holds a run with other settings ({changes_text(changed)}); choose "
                "another --out, or delete the folder"
            )


def folder_of(config: StudyConfig) -> Path:
    """Return the folder with all runs at a scale."""
    own = f"-{config.epochs}-epochs" if config.epochs else ""
    return Path(config.out) / f"{config.scale}{own}"


def runs_of(
    studies: Iterable[Study],
    scale: Scale,
    folder: Path,
    *,
    seeds: Iterable[int],
    machine: Change = lambda config: config,
    linear: bool = False,
) -> list[Run]:
    """Return the runs of studies, each once: all rows with the first seed, then with the next.

    Args:
        studies: whose rows are run.
        scale: the recipe that they change.
        folder: where they go, each into a folder of its own.
        seeds: of each row.
        machine: gives settings what is this machine's: images, devices.
        linear: whether a linear evaluation is due where the scale is measured by kNN.
    """
    variants = {row.variant.name: row.variant for study in studies for row in study.rows}
    return [
        Run(
            folder / f"{variant.name}-seed-{seed}",
            variant,
            seed,
            scale,
            machine(scale.settings(variant, seed=seed)),
            linear,
        )
        for seed in seeds
        for variant in variants.values()
    ]


def seeds_in(folder: Path) -> list[int]:
    """Return the seeds of the runs that lie in a folder."""
    found = (re.fullmatch(r".+-seed-(\d+)", path.name) for path in folder.glob("*-seed-*"))
    return sorted({int(match[1]) for match in found if match})
