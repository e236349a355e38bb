"""Conversion of any source to one verified data set file that every pipeline reads.

sources.py opens the source, prepare.py decides how an image is stored, writer.py writes images in
parallel and completes the file, journal.py lets a conversion resume, layout.py places images and
tables, manifest.py describes the file, and verify.py checks it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.config import ConvertConfig
from fastsiam.errors import DataError
from fastsiam.files import explained

from ..remote.path import Place
from ..store import BetonStore, Store
from ..store.base import JPEG_ENDINGS, is_image_name
from ..store.decode import ImageRules
from ..subsets import sample
from ..survey import survey
from .manifest import read_manifests, write_manifest
from .prepare import is_lossy
from .sources import Kind, open_sources
from .verify import Report, verify
from .writer import BadImagesError, Watcher, write

__all__ = [
    "BadImagesError",
    "Kind",
    "Report",
    "Watcher",
    "Written",
    "beside",
    "convert",
    "encoded_again",
    "read_manifests",
    "verify",
]


@dataclass(frozen=True)
class Written:
    """One file of a conversion."""

    path: Path
    about: dict[str, Any]
    """Its description in the manifest."""
    there: bool = False
    """Whether it existed before, so that nothing was done."""


def convert(kind: Kind, config: ConvertConfig, watcher: Watcher) -> list[Written]:
    """Convert a data set: each of its splits to a file, and a manifest of all of them.

    Args:
        kind: which data set, or in which form.
        config: source, target and options.
        watcher: shows the progress.

    Returns:
        The files, in the order train, val.

    Raises:
        BadImagesError: some images are bad and ``config.skip_bad`` is off.
        DataError: the source does not exist or cannot be read, or the file cannot be written, or
            exists and was made of other images or with other options.
    """
    found, sources = open_sources(kind, config.root, config.columns, watcher.say)
    out = Path(config.out) if config.out else beside(found)
    number, count = config.part_of
    part = "" if count == 1 else f"-{number:05d}-of-{count:05d}"
    with explained(DataError, f"cannot make the folder {out}"):
        out.mkdir(parents=True, exist_ok=True)
    written: list[Written] = []
    failures: list[BadImagesError] = []
    told = config.raw is True
    for split, store in sources.items():
        images = np.arange(len(store))
        if 0 < config.limit < len(store):
            images = sample(store.labels, size=config.limit, seed=config.seed)
        path = out / f"{split}{part}.beton"
        if len(images) >= count:
            images = np.array_split(images, count)[number - 1]
        elif number == 1:  # too few to share: the first part has them all
            path = out / f"{split}.beton"
        else:
            continue
        there = path.exists()
        if split == "train" and number == 1 and not there:
            for note in survey(store, ImageRules(config.exif, config.alpha)):
                watcher.say(note)
        if not there and not told and _some_lose_detail(store, images):
            told = True
            watcher.say(
                f"images that are not JPEGs are encoded as JPEGs of quality {config.quality}, "
                "which loses detail; --raw stores pixels instead"
            )
        watcher.begin(path.name, len(images), int(store.sizes()[images].sum()))
        try:
            written.append(Written(path, write(store, images, path, config, watcher), there))
        except BadImagesError as error:  # those of the other split are listed too
            failures.append(error)
    if failures:
        bad = [image for failure in failures for image in failure.bad]
        raise BadImagesError("; ".join(map(str, failures)), bad)
    if written:
        abouts = {file.path.name: file.about for file in written}
        write_manifest(out / f"manifest{part}.json", sources["train"].classes, abouts)
    return written


def encoded_again(about: dict[str, Any]) -> int:
    """Count the images of a file in a manifest that became JPEGs unasked, and so lost detail."""
    return sum(count for how, count in about["stored"].items() if is_lossy(how))


def _some_lose_detail(store: Store, images: NDArray[np.int64]) -> bool:
    """Tell, if file names show it, whether images will be encoded as JPEGs unasked."""
    if isinstance(store, BetonStore):  # it has the names of its own source
        return False
    names = ((index, store.name(index).rpartition("/")[2]) for index in images.tolist())
    return any(
        is_image_name(name)
        and not name.lower().endswith(JPEG_ENDINGS)
        and store.raw_size(index) is None
        for index, name in names
    )


def beside(source: Place) -> Path:
    """Return the default target of a source: a folder beside it, its name with ``-beton``.

    A .beton file among the source's images would be taken for the data from then on. The target
    of a remote source is in the current folder.
    """
    if not isinstance(source, Path):
        return Path(f"{PurePath(source.name).stem}-beton")
    if source.name in ("", ".."):
        source = Path(os.path.abspath(source))
    if not source.name:
        raise DataError(f"there is nothing beside {source}: name a folder with --out")
    name = source.name if source.is_dir() else source.name.partition(".")[0]
    return source.with_name(f"{name}-beton")
