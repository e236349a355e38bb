"""The images that a run trains on: all except the holdout set, in the order of the run's start.

A run saves the list of its images in its folder. If the data changed, a resumed run stops with an
error or, with ``--data-changed accept``, continues with the images that still exist.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fastsiam.config import DataConfig, TrainConfig
from fastsiam.errors import CheckpointError, DataError
from fastsiam.methods import image_rows
from fastsiam.pipelines import Store
from fastsiam.pipelines.backends import BACKENDS, CEILING, backend_of
from fastsiam.pipelines.mixture import Mixture, shuffle_of
from fastsiam.pipelines.shuffle import Window
from fastsiam.pipelines.store import picked
from fastsiam.pipelines.subsets import open_training
from fastsiam.pipelines.survey import survey
from fastsiam.run.checkpoint import Checkpoint
from fastsiam.run.folder import RunFolder
from fastsiam.train.remembered import (
    FILE,
    Change,
    DataFile,
    Remembered,
    files_of,
    has_names,
    names_of,
    set_numbers,
)

_ADVICE = "restore the data, or choose another --out for a new run"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunImages:
    """The images that a run trains on."""

    store: Store | None = None
    """The images, each at its place; None if the pipeline generates noise."""
    remembered: Remembered | None = None
    """The list that is saved in the run's folder."""
    notes: tuple[str, ...] = ()
    """Messages for the user."""
    shown: NDArray[np.int64] | None = None
    """(N,) for each place, the place of the image that is shown there; None unless images are
    missing since the run was last started."""

    shuffle: Window | Mixture | None = None
    """How the images are shuffled; None means a full shuffle."""

    def __len__(self) -> int:
        """Return the number of images, or of noise images if the pipeline reads no files."""
        return len(self.store) if self.store is not None else BACKENDS[CEILING].noise_images or 0

    def survey(self) -> list[str]:
        """Return messages on how many images --exif, --alpha or scaling to 8 bits affect."""
        return [] if self.store is None else survey(self.store, self.store.rules)

    def about_shuffle(self, config: TrainConfig) -> str:
        """Describe the shares of a mixture of data sets; "" without one."""
        if isinstance(self.shuffle, Mixture):
            return self.shuffle.described([str(place) for place in config.data.places])
        return ""

    def moves_rows(self, start: Checkpoint) -> bool:
        """Return whether the method keeps a row per image and images are now at other places."""
        return self.shown is not None and bool(image_rows(start.config.model))

    def with_rows(self, start: Checkpoint) -> Checkpoint:
        """Return the checkpoint with each place's row replaced by that of the image shown there.

        If a missing image comes back later, it gets the row of its place.
        """
        if not self.moves_rows(start):
            return start
        shown = torch.from_numpy(self.shown)
        rows = {name: start.model[name][shown] for name in image_rows(start.config.model)}
        return replace(start, model=start.model | rows)

    def keep(self, folder: RunFolder) -> None:
        """Write the list of images into a run's folder.

        Raises:
            FastSiamError: the folder cannot be written.
        """
        if self.remembered is not None:
            folder.keep(FILE, self.remembered.to_bytes())


def run_images(config: TrainConfig, begun: Path | None) -> RunImages:
    """Open the training images, each at the place that it had when the run started.

    Args:
        config: the run's.
        begun: folder of the run that is resumed; None for a new run.

    Raises:
        BackendError: the pipeline's package is missing.
        DataError: the data cannot be read.
        CheckpointError: the data changed since the run started, and --data-changed is "refuse".
    """
    if not config.data.loads_images:
        return RunImages()
    return _shuffled(_run_images(config, begun), config.data)


def _shuffled(images: RunImages, data: DataConfig) -> RunImages:
    """Set the shuffle, from the blocks and data sets that the images had at the run's start."""
    store, remembered = images.store, images.remembered
    if store is None or remembered is None:
        return images
    if data.window and remembered.blocks is None:
        remembered = replace(remembered, blocks=store.blocks().astype(np.int32))
    blocks = remembered.blocks
    shuffle = shuffle_of(
        data,
        store,
        images=len(store),
        sets=None if store.sets is None else set_numbers(remembered.names),
        blocks=None if blocks is None else blocks.astype(np.int64),
    )
    return replace(images, remembered=remembered, shuffle=shuffle)


def _run_images(config: TrainConfig, begun: Path | None) -> RunImages:
    if config.data.pipeline != "auto":
        backend_of(config.data).require_package()
    remembered = None if begun is None else Remembered.load(begun)
    store, kept, held = _opened(config.data, remembered)
    names = names_of(store)
    own, files = tuple(names[i] for i in kept.tolist()), files_of(store)
    if remembered is None or remembered.names == own:  # without a list: a new run, or an old one
        notes = _other_files(remembered, files, config) if remembered else ()
        return RunImages(
            store=picked(store, kept),
            remembered=replace(remembered or Remembered(own), files=files),
            notes=(*notes, *_held_out(config.data, store, held, kept)),
        )
    change = Change.between(remembered, names, held)
    if change.all_gone:
        _require_the_same(len(kept), len(remembered.names), config.data)
        note = (
            "warning: all images have other names than when the run started, as in another "
            f"container: the {len(kept):,} images are assumed to be the same, in the same order"
        )
        notes = _other_files(remembered, files, config)
        remembered = replace(remembered, files=files)
        return RunImages(store=store, remembered=remembered, notes=(note, *notes))
    positions, shown = change.positions(), None
    notes = _held_out(config.data, store, held, positions)
    if change:
        if not remembered.accepts(names):
            _require_consent(change, config, named=has_names(store))
            remembered = remembered.accepting(names)
            shown = change.shown() if change.gone else None
        notes = (_changed(change), *notes)
    else:
        notes = (*_other_files(remembered, files, config), *notes)
    return RunImages(
        store=picked(store, positions),
        remembered=replace(remembered, files=files),
        notes=notes,
        shown=shown,
    )


def training_names(data: DataConfig) -> list[str]:
    """Return the names of the images that a new run would train on.

    Raises:
        DataError: the data cannot be read.
    """
    store, kept, _ = open_training(data)
    names = names_of(store)
    return [names[i] for i in kept.tolist()]


def recorded_names(run: Path) -> tuple[str, ...]:
    """Return the names of the images that a run started with; () if its folder has no list.

    Raises:
        CheckpointError: the list is corrupt.
    """
    remembered = Remembered.load(run)
    return () if remembered is None else remembered.names


def _require_the_same(now: int, then: int, data: DataConfig) -> None:
    """Check that renamed images can be the same: as many as before, without a holdout set."""
    renamed = f"the data changed: all {then:,} images of the run have other names now"
    if now != then:
        raise CheckpointError(f"{renamed}, and there are {now:,} images; {_ADVICE}")
    if data.holdout:
        raise CheckpointError(
            f"{renamed}, so --holdout {data.holdout}, which chooses images by name, would choose "
            f"others; {_ADVICE}"
        )


def _require_consent(change: Change, config: TrainConfig, *, named: bool) -> None:
    """Check that the user accepts changed data, and that the images have names to compare."""
    if not named:
        raise CheckpointError(
            "the data changed since the run started; files that FFCV wrote have no image names, so "
            f"the missing images are unknown; {_ADVICE}"
        )
    if config.run.data_changed == "refuse":
        raise CheckpointError(
            f"the data changed since the run started: {change}; restore the data, pass "
            "--data-changed accept to continue with the present images, or choose another --out "
            "for a new run"
        )


def _opened(
    data: DataConfig, remembered: Remembered | None
) -> tuple[Store, NDArray[np.int64], NDArray[np.int64]]:
    """Open the images; if that fails, name the files of the run that are missing."""
    try:
        return open_training(data)
    except DataError as error:
        lost = [remembered.missing_files(place) for place in data.places] if remembered else []
        gone = list(chain.from_iterable(lost))
        if not gone:
            raise
        more = f" and {len(gone) - 1:,} more files" if len(gone) > 1 else ""
        raise DataError(f"missing files of the run's images: {gone[0]}{more}; {_ADVICE}") from error


def _other_files(
    remembered: Remembered, files: tuple[DataFile, ...], config: TrainConfig
) -> tuple[str, ...]:
    """Check that containers have the size that they had, unless changed data are accepted.

    Returns:
        Messages for the user. Another modification time alone is only mentioned, because copies of
        a file have one.

    Raises:
        CheckpointError: a container has another size, and --data-changed is "refuse".
    """
    others = remembered.other_files(files)
    grown = next(((then, now) for then, now in others if then.bytes != now.bytes), None)
    if grown is None:
        return tuple(
            f"warning: {now.path} was modified since the run was last started; its size and image "
            "names are the same, so its content is assumed to be the same"
            for _, now in others[:1]
        )
    then, now = grown
    said = (
        f"{now.path} changed since the run was last started: it had {then.bytes:,} bytes and now "
        f"has {now.bytes:,}"
    )
    if config.run.data_changed == "refuse":
        raise CheckpointError(
            f"{said}; restore it, pass --data-changed accept to continue with its present content, "
            "or choose another --out for a new run"
        )
    return (f"{said} (accepted)",)


def _changed(change: Change) -> str:
    """Return a message on what changed, and how the run handles it."""
    parts = [f"the data changed since the run started (accepted): {change}"]
    if change.gone:
        parts.append("each missing image is replaced by the next one in the list")
    if change.new:
        parts.append("new images are ignored until a new run")
    return "; ".join(parts)


def _held_out(
    data: DataConfig, store: Store, held: NDArray[np.int64], trained: NDArray[np.int64]
) -> tuple[str, ...]:
    """Return a message on the holdout set, and on images of it that the run trains on."""
    if not data.holdout:
        return ()
    whole = "each class" if store.classes else "all"
    note = f"holding out {len(held):,} images ({data.holdout} of {whole}) for validation"
    if both := len(np.intersect1d(held, trained)):
        note += f"; the run already trained on {both:,} of them and continues to do so"
    return (note,)
