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
from fastsiam.pipelines.store import BetonStore, picked
from fastsiam.pipelines.subsets import open_training
from fastsiam.train.image_list import (
    DataFile,
    ImageList,
    files_of,
    fingerprint,
    names_of,
    with_replacements,
)

_ADVICE = "restore the data, or choose another --out for a new run"
_ADVICE_TO_ACCEPT = (
    "restore the data, pass --data-changed accept to continue with the current images, or choose "
    "another --out for a new run"
)
_NAMES = 3
"""Maximum number of names in a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunImages:
    """The images that a run trains on."""

    store: Store | None = None
    """The images, in the order of the list; None if the pipeline generates noise."""
    listed: ImageList | None = None
    """The list that is saved in the run's folder."""
    notes: tuple[str, ...] = ()
    """Messages for the user."""
    shuffle: Window | Mixture | None = None
    """How the images are shuffled; None means a full shuffle."""

    def __len__(self) -> int:
        """Return the number of images, or of noise images if the pipeline reads no files."""
        return len(self.store) if self.store is not None else NOISE_IMAGES


def run_images(config: TrainConfig, begun: Path | None) -> RunImages:
    """Open the training images; for a resumed run in the order of the list in its folder ``begun``.

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
    listed = None if begun is None else ImageList.load(begun)
    whole, kept, held = _opened(data, listed)
    files, notes = files_of(whole), list[str]()
    if listed is None:  # a new run, or a run of a version that saved no list
        names = names_of(whole)
        listed = ImageList(tuple(names[i] for i in kept.tolist()))
    else:
        kept, listed, notes = _places(listed, whole, kept, held, config)
        notes += _modified(listed, files, config)
    if data.holdout:
        note = (
            f"holding out {len(held):,} images ({data.holdout} of "
            f"{'each class' if whole.classes else 'all'}) for validation"
        )
        if both := len(np.intersect1d(held, kept)):
            note += f"; the run already trained on {both:,} of them and continues to do so"
        notes.append(note)
    store = picked(whole, kept)
    blocks = listed.blocks
    if data.window and blocks is None:
        blocks = store.blocks().astype(np.int32)
    sets = None
    if store.sets is not None:
        sets = np.array([int(name.partition("/")[0]) for name in listed.names], np.int64)
    shuffle = shuffle_of(
        data,
        sets=sets,
        blocks=None if blocks is None else blocks.astype(np.int64),
    )
    if isinstance(shuffle, Mixture):
        notes.append(shuffle.described([str(place) for place in data.places]))
    return RunImages(
        store=store,
        listed=replace(listed, files=files, blocks=blocks),
        notes=tuple(notes),
        shuffle=shuffle,
    )


def _opened(
    data: DataConfig, listed: ImageList | None
) -> tuple[Store, NDArray[np.int64], NDArray[np.int64]]:
    """Open the images; if that fails, raise an error that names the run's missing files."""
    try:
        return open_training(data)
    except DataError as error:
        # URLs are left out: opening one reports its missing files.
        roots = [place.resolve() for place in data.places if isinstance(place, Path)]
        files = [Path(file.path) for file in (listed.files if listed else ())]
        gone = [x for x in files if any(map(x.is_relative_to, roots)) and not x.exists()]
        if not gone:
            raise
        more = f" and {len(gone) - 1:,} more files" if len(gone) > 1 else ""
        raise DataError(
            f"files of the run's images are missing: {gone[0]}{more}; {_ADVICE}"
        ) from error


def _places(
    listed: ImageList,
    store: Store,
    kept: NDArray[np.int64],
    held: NDArray[np.int64],
    config: TrainConfig,
) -> tuple[NDArray[np.int64], ImageList, list[str]]:
    """Find the listed images in the data set.

    ``kept`` are the positions of the images that a new run would train on, ``held`` those of the
    holdout set.

    Returns:
        The position in the data set of the image that is used for each list entry, (listed,); the
        list, updated if the user accepts a change; messages.

    Raises:
        CheckpointError: images are missing or new, and the change is not accepted.
    """
    names = names_of(store)
    if listed.names == tuple(names[i] for i in kept.tolist()):
        return kept, listed, []
    places = listed.positions_in(names)
    gone = [listed.names[i] for i in np.flatnonzero(places < 0).tolist()]
    if len(gone) == len(kept) == len(listed.names) and not config.data.holdout:
        note = (
            "warning: all image names changed since the run started, as in another container; "
            f"the {len(kept):,} images are assumed to be the same, in the same order"
        )
        return kept, listed, [note]
    others = np.setdiff1d(np.arange(len(names)), np.concatenate([places, held]))
    new = [names[i] for i in others.tolist()]
    if not gone and not new:
        return places, listed, []
    parts = [(gone, f"of {len(listed.names):,} images missing"), (new, "new")]
    change = "the data changed since the run started: " + ", ".join(
        f"{len(some):,} {what} ({', '.join(some[:_NAMES])}{', ...' * (len(some) > _NAMES)})"
        for some, what in parts
        if some
    )
    has_names = not isinstance(store, BetonStore) or store.crc is not None  # FFCV writes no names
    if len(gone) == len(listed.names) or not has_names:
        raise CheckpointError(f"{change}; {_ADVICE}")
    accepted = fingerprint(names)
    if config.run.data_changed == "refuse" and listed.accepted != accepted:
        raise CheckpointError(f"{change}; {_ADVICE_TO_ACCEPT}")
    if gone and image_rows(config.model):
        raise CheckpointError(
            f"{change}; {config.model.method.name} stores a row per image with these settings, "
            f"so missing images cannot be replaced; {_ADVICE}"
        )
    note = (
        f"{change} (accepted); each missing image is replaced by the next one in the list, and new "
        "images are not used"
    )
    return with_replacements(places), replace(listed, accepted=accepted), [note]


def _modified(listed: ImageList, files: Sequence[DataFile], config: TrainConfig) -> list[str]:
    """Check that containers still have the same size; return a message about a changed one.

    A new modification time alone only gives a warning, because copying a file may change it.

    Raises:
        CheckpointError: the size of a container changed, and the change is not accepted.
    """
    known = {file.path: file for file in listed.files}
    changed = [(known[now.path], now) for now in files if known.get(now.path, now) != now]
    for then, now in changed:
        if then.bytes != now.bytes:
            change = (
                f"{now.path} changed since the run was last started: it had {then.bytes:,} bytes "
                f"and now has {now.bytes:,}"
            )
            if config.run.data_changed == "refuse":
                raise CheckpointError(f"{change}; {_ADVICE_TO_ACCEPT}")
            return [f"{change} (accepted)"]
    return [
        f"warning: {now.path} was modified since the run was last started; its size and image "
        "names are the same, so its content is assumed to be the same"
        for _, now in changed[:1]
    ]
