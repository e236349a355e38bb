"""Which images a run trains on: all but those held out, at the places that they began with.

A run keeps the list of its images in its folder. If the data changed, a resumed run refuses or, by
``--data-changed accept``, continues with what is there.
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
from fastsiam.pipelines.shuffle import Window, described
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

_WAYS_OUT = "restore the data, or choose another --out for a new run"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunImages:
    """The images that a run trains on."""

    store: Store | None = None
    """The images, each at its place; None if the pipeline reads none."""
    remembered: Remembered | None = None
    """What the run is to remember."""
    notes: tuple[str, ...] = ()
    """What a user has to know."""
    shown: NDArray[np.int64] | None = None
    """Where images are gone since the run was last at work: for each place the place of the image
    that is shown there from now on."""

    shuffle: Window | Mixture | None = None
    """How they are shuffled; None means a full shuffle."""

    def __len__(self) -> int:
        """Count the images, those of noise where the pipeline reads none."""
        return len(self.store) if self.store is not None else BACKENDS[CEILING].noise_images or 0

    def survey(self) -> list[str]:
        """Say how many images --exif, --alpha or scaling to 8 bits affect."""
        return [] if self.store is None else survey(self.store, self.store.rules)

    def about_shuffle(self, config: TrainConfig) -> str:
        """Say how good the shuffle of a window or a mixture is; "" for a full shuffle."""
        if isinstance(self.shuffle, Mixture):
            return self.shuffle.described([str(place) for place in config.data.places])
        if self.shuffle is None or self.store is None:
            return ""
        batch, seed = config.optim.batch, config.numerics.seed
        return described(self.shuffle, self.store.labels, batch=batch, seed=seed)

    def moves_rows(self, start: Checkpoint) -> bool:
        """Tell whether a method keeps rows of images that are shown at another place now."""
        return self.shown is not None and bool(image_rows(start.config.model))

    def with_rows(self, start: Checkpoint) -> Checkpoint:
        """Return a checkpoint in which each place has the row of the image that is shown there.

        An image that comes back later gets the row of its place, whatever was shown there.
        """
        if not self.moves_rows(start):
            return start
        shown = torch.from_numpy(self.shown)
        rows = {name: start.model[name][shown] for name in image_rows(start.config.model)}
        return replace(start, model=start.model | rows)

    def keep(self, folder: RunFolder) -> None:
        """Write into a run's folder what it is to remember.

        Raises:
            FastSiamError: the folder cannot be written.
        """
        if self.remembered is not None:
            folder.keep(FILE, self.remembered.to_bytes())


def run_images(config: TrainConfig, begun: Path | None) -> RunImages:
    """Open the training images, each at the place that it had when the run began.

    Args:
        config: the run's.
        begun: folder of the run that continues; None for a new one.

    Raises:
        BackendError: the pipeline's package is missing.
        DataError: the data cannot be read.
        CheckpointError: the data changed since the run began, and that is not accepted.
    """
    if not config.data.loads_images:
        return RunImages()
    return _shuffled(_run_images(config, begun), config.data)


def _shuffled(images: RunImages, data: DataConfig) -> RunImages:
    """Settle how a run is shuffled: by the blocks and data sets that its images began with."""
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
            "none of the images has the name that it had when the run began, as in another "
            f"container: the {len(kept):,} that are there are taken for the same, in this order"
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


def names_begun_with(run: Path) -> tuple[str, ...]:
    """Return the names of the images that a run began with; none if it keeps no list.

    Raises:
        CheckpointError: the list is damaged.
    """
    remembered = Remembered.load(run)
    return () if remembered is None else remembered.names


def _require_the_same(now: int, then: int, data: DataConfig) -> None:
    """Refuse images that nobody knows by name, if they are more or fewer, or some are held out."""
    none = f"the data changed: none of the {then:,} images that the run began with is there by its"
    if now != then:
        raise CheckpointError(f"{none} name, and there are {now:,}; {_WAYS_OUT}")
    if data.holdout:
        raise CheckpointError(
            f"{none} name, by which --holdout {data.holdout} knows those that it holds out; "
            f"{_WAYS_OUT}"
        )


def _require_consent(change: Change, config: TrainConfig, *, named: bool) -> None:
    """Refuse changed data, if the user does not accept them or nobody can tell what changed."""
    if not named:
        raise CheckpointError(
            f"the data changed since the run began, and a file of FFCV's own making names no "
            f"image, so that nobody can tell which are gone; {_WAYS_OUT}"
        )
    if config.run.data_changed == "refuse":
        raise CheckpointError(
            f"the data changed since the run began: {change}; restore the data, continue with what "
            "is there by --data-changed accept, or choose another --out for a new run"
        )


def _opened(
    data: DataConfig, remembered: Remembered | None
) -> tuple[Store, NDArray[np.int64], NDArray[np.int64]]:
    """Open the images; if that fails, name the file that the run last used and that is gone."""
    try:
        return open_training(data)
    except DataError as error:
        lost = [remembered.missing_files(place) for place in data.places] if remembered else []
        gone = list(chain.from_iterable(lost))
        if not gone:
            raise
        more = f" and {len(gone) - 1:,} more are gone" if len(gone) > 1 else " is gone"
        raise DataError(f"{gone[0]}{more}, in which the run's images were; {_WAYS_OUT}") from error


def _other_files(
    remembered: Remembered, files: tuple[DataFile, ...], config: TrainConfig
) -> tuple[str, ...]:
    """Refuse a container of another size that names the same images, if it is not accepted.

    Returns:
        What a user has to know. A copy of a file may have another time: that is no more than said.
    """
    others = remembered.other_files(files)
    grown = next(((then, now) for then, now in others if then.bytes != now.bytes), None)
    if grown is None:
        return tuple(
            f"warning: {now.path} was written since the run was last at work; it has as many bytes "
            "and names the same images, so it is taken for the same"
            for _, now in others[:1]
        )
    then, now = grown
    said = (
        f"{now.path} is another file than the run was last at work with: it has {now.bytes:,} "
        f"bytes, and had {then.bytes:,}"
    )
    if config.run.data_changed == "refuse":
        raise CheckpointError(
            f"{said}; restore it, continue with what it holds by --data-changed accept, or choose "
            "another --out for a new run"
        )
    return (f"{said}, as accepted",)


def _changed(change: Change) -> str:
    """Say what changed, and what becomes of it."""
    parts = [f"the data changed since the run began, as accepted: {change}"]
    if change.gone:
        parts.append("the next one there is shown in place of each that is gone")
    if change.new:
        parts.append("new ones take no part until a new run")
    return "; ".join(parts)


def _held_out(
    data: DataConfig, store: Store, held: NDArray[np.int64], trained: NDArray[np.int64]
) -> tuple[str, ...]:
    """Say how many images are held out, and whether the run trains on some of them."""
    if not data.holdout:
        return ()
    whole = "each class" if store.classes else "all"
    note = f"holding out {len(held):,} images ({data.holdout} of {whole}) for validation"
    if both := len(np.intersect1d(held, trained)):
        note += f"; {both:,} of them took part before the data changed, and still do"
    return (note,)
