"""The images that a run trains on: all except the holdout set, in their order at the run's start.

A run saves the list of its images in its folder. If images are missing or new when it resumes, it
stops with an error or, with ``--data-changed accept``, continues with the images that still exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import DataConfig, TrainConfig
from fastsiam.errors import CheckpointError, DataError
from fastsiam.methods import image_rows
from fastsiam.pipelines import Store
from fastsiam.pipelines.backends import NOISE_IMAGES, backend_of
from fastsiam.pipelines.shuffle import Mixture, Window, shuffle_of
from fastsiam.pipelines.store import BetonStore, select_images
from fastsiam.pipelines.subsets import TrainingImages, open_training
from fastsiam.train.image_list import (
    DataFile,
    ImageList,
    files_of,
    fingerprint,
    names_of,
    with_replacements,
)

ADVICE = "restore the data, or train a new run with another --out"
"""What to do if the data of a run changed, in ``train`` and in ``verify``."""
_ADVICE_TO_ACCEPT = (
    "restore the data, continue training on the current images with --data-changed accept, or "
    "train a new run with another --out"
)
_MAX_NAMES = 3
"""Maximum number of names in a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunImages:
    """The images that a run trains on."""

    store: Store | None = None
    """The images, in the order of the list; None if the pipeline generates noise."""
    training: TrainingImages | None = None
    """The images of the data set today, for the kNN monitor; None for a mixture or noise."""
    image_list: ImageList | None = None
    """The list that is saved in the run's folder."""
    notes: tuple[str, ...] = ()
    """Messages for the user."""
    shuffle: Window | Mixture | None = None
    """How the images are shuffled; None means a full shuffle."""

    def __len__(self) -> int:
        """Return the number of images, or of noise images if the pipeline reads no files."""
        return len(self.store) if self.store is not None else NOISE_IMAGES


def run_images(config: TrainConfig, run: Path | None) -> RunImages:
    """Open the training images; for a resumed run in the order of the list in its folder ``run``.

    Raises:
        BackendError: the pipeline's package is missing.
        DataError: the data cannot be read.
        CheckpointError: the data changed since the run started, and the change is not accepted.
    """
    data = config.data
    if not data.loads_images:
        return RunImages()
    if data.pipeline != "auto":
        backend_of(data).check()
    image_list = None if run is None else ImageList.load(run)
    training = _open_images(data, image_list)
    full_store, train_positions, holdout_positions = training
    files, notes = files_of(full_store), list[str]()
    if image_list is None:  # a new run, or a run of a version that saved no list
        names = names_of(full_store)
        image_list = ImageList(tuple(names[i] for i in train_positions.tolist()))
    else:
        train_positions, image_list, notes = _locate_images(
            image_list, full_store, train_positions, holdout_positions, config
        )
        notes += _check_unmodified(image_list, files, config)
    if data.holdout:
        note = (
            f"holding out {len(holdout_positions):,} images ({data.holdout} of "
            f"{'each class' if full_store.classes else 'all'}) for validation"
        )
        if overlap := len(np.intersect1d(holdout_positions, train_positions)):
            note += f"; the run already trained on {overlap:,} of them and continues to do so"
        notes.append(note)
    store = select_images(full_store, train_positions)
    blocks = image_list.blocks
    if data.window and blocks is None:
        blocks = store.blocks().astype(np.int32)
    sets = None
    if store.sets is not None:
        sets = np.array([int(name.partition("/")[0]) for name in image_list.names], np.int64)
    shuffle = shuffle_of(
        data,
        sets=sets,
        blocks=None if blocks is None else blocks.astype(np.int64),
    )
    if isinstance(shuffle, Mixture):
        notes.append(shuffle.describe([str(place) for place in data.places]))
    return RunImages(
        store=store,
        training=None if data.mixed_with else training,
        image_list=replace(image_list, files=files, blocks=blocks),
        notes=tuple(notes),
        shuffle=shuffle,
    )


def _open_images(data: DataConfig, image_list: ImageList | None) -> TrainingImages:
    """Open the images; if that fails, raise an error that names the run's missing files."""
    try:
        return open_training(data)
    except DataError as error:
        # URLs are left out: opening one reports its missing files.
        roots = [place.resolve() for place in data.places if isinstance(place, Path)]
        files = [Path(file.path) for file in (image_list.files if image_list else ())]
        missing = [x for x in files if any(map(x.is_relative_to, roots)) and not x.exists()]
        if not missing:
            raise
        more = f" and {len(missing) - 1:,} more files" if len(missing) > 1 else ""
        raise DataError(
            f"files of the run's images are missing: {missing[0]}{more}; {ADVICE}"
        ) from error


def _locate_images(
    image_list: ImageList,
    store: Store,
    train_positions: NDArray[np.int64],
    holdout_positions: NDArray[np.int64],
    config: TrainConfig,
) -> tuple[NDArray[np.int64], ImageList, list[str]]:
    """Find the listed images in the data set.

    ``train_positions`` are the positions of the images that a new run would train on,
    ``holdout_positions`` those of the holdout set.

    Returns:
        The position in the data set of the image that is used for each list entry, (listed,); the
        list, updated if the user accepts a change; messages.

    Raises:
        CheckpointError: images are missing or new, and the change is not accepted.
    """
    names = names_of(store)
    if image_list.names == tuple(names[i] for i in train_positions.tolist()):
        return train_positions, image_list, []
    places = image_list.positions_in(names)
    missing_names = [image_list.names[i] for i in np.flatnonzero(places < 0).tolist()]
    if (
        len(missing_names) == len(train_positions) == len(image_list.names)
        and not config.data.holdout
    ):
        note = (
            "warning: all image names changed since the run started, as in another container; "
            f"the {len(train_positions):,} images are assumed to be the same, in the same order"
        )
        return train_positions, image_list, [note]
    new_positions = np.setdiff1d(np.arange(len(names)), np.concatenate([places, holdout_positions]))
    new_names = [names[i] for i in new_positions.tolist()]
    if not missing_names and not new_names:
        return places, image_list, []
    groups = [(missing_names, f"of {len(image_list.names):,} images missing"), (new_names, "new")]
    change = "the data changed since the run started: " + ", ".join(
        f"{len(group):,} {label} "
        f"({', '.join(group[:_MAX_NAMES])}{', ...' * (len(group) > _MAX_NAMES)})"
        for group, label in groups
        if group
    )
    has_names = not isinstance(store, BetonStore) or store.crc is not None  # FFCV writes no names
    if len(missing_names) == len(image_list.names) or not has_names:
        raise CheckpointError(f"{change}; {ADVICE}")
    data_fingerprint = fingerprint(names)
    if config.run.data_changed == "refuse" and image_list.accepted != data_fingerprint:
        raise CheckpointError(f"{change}; {_ADVICE_TO_ACCEPT}")
    if missing_names and image_rows(config.model):
        raise CheckpointError(
            f"{change}; {config.model.method.name} stores a row per image with these settings, "
            f"so missing images cannot be replaced; {ADVICE}"
        )
    note = (
        f"{change} (accepted); each missing image is replaced by the next one in the list, and new "
        "images are not used"
    )
    return with_replacements(places), replace(image_list, accepted=data_fingerprint), [note]


def _check_unmodified(
    image_list: ImageList, files: Sequence[DataFile], config: TrainConfig
) -> list[str]:
    """Check that containers still have the same size; return a message about a changed one.

    A new modification time alone only gives a warning, because copying a file may change it.

    Raises:
        CheckpointError: the size of a container changed, and the change is not accepted.
    """
    old_files = {file.path: file for file in image_list.files}
    changes = [(old_files[new.path], new) for new in files if old_files.get(new.path, new) != new]
    for old, new in changes:
        if old.bytes != new.bytes:
            change = (
                f"{new.path} changed since the run was last started: it had {old.bytes:,} bytes "
                f"and now has {new.bytes:,}"
            )
            if config.run.data_changed == "refuse":
                raise CheckpointError(f"{change}; {_ADVICE_TO_ACCEPT}")
            return [f"{change} (accepted)"]
    return [
        f"warning: {new.path} was modified since the run was last started; its size and image "
        "names are the same, so its content is assumed to be the same"
        for _, new in changes[:1]
    ]
