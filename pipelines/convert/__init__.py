"""Conversion of any supported data source to .beton files, which every pipeline reads.

command.py is the command line. prepare.py decides how an image is stored, writer.py writes images
in parallel, journal.py makes conversions resumable, manifest.py describes the files, and
verification.py checks them. parts.py converts in parts, as dask tasks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np

from fastsiam.config import ColumnNames, ConvertConfig
from fastsiam.config.urls import Url
from fastsiam.console import Console
from fastsiam.errors import DataError, NoLabelsError, NoSplitError
from fastsiam.files import os_errors_as, require_local, tilde_hint

from ..remote.path import Place, open_place
from ..store import BetonStore, Split, Store, open_parquet, open_store
from ..store.base import IMAGE_ENDINGS, JPEG_ENDINGS
from ..store.decode import ImageRules
from ..subsets import sample
from ..survey import survey
from .manifest import write_manifest
from .verification import Report, verify
from .writer import BadImagesError, write

__all__ = [
    "BadImagesError",
    "Kind",
    "OutputFile",
    "Report",
    "convert",
    "default_output",
    "find_source",
    "verify",
]

Kind = Literal["imagenet", "cifar10", "folder", "parquet"]
_LOSSY_ENDINGS = tuple({*IMAGE_ENDINGS} - {*JPEG_ENDINGS})


@dataclass(frozen=True)
class OutputFile:
    """An output file of a conversion."""

    path: Path
    about: dict[str, Any]
    """Its description in the manifest."""
    existed: bool = False
    """Whether it existed already and was left as it is."""


def convert(kind: Kind, config: ConvertConfig, console: Console) -> list[OutputFile]:
    """Convert each split of a data set to a file, and write a manifest of the files.

    Args:
        kind: the data set or its format.
        config: source, target and options.
        console: shows messages and progress.

    Returns:
        The files: train, then val if the source has it.

    Raises:
        BadImagesError: some images are bad and ``config.skip_bad`` is off.
        DataError: the source does not exist or cannot be read, a file cannot be written, or it
            exists and was converted from other images or with other options.
    """
    place = find_source(kind, config.root)
    sources = _open_splits(kind, place, config.columns, console.say)
    out = Path(config.out) if config.out else default_output(place)
    require_local(out)
    number, count = config.part_of
    part = "" if count == 1 else f"-{number:05d}-of-{count:05d}"
    with os_errors_as(DataError, f"cannot create the folder {out}"):
        out.mkdir(parents=True, exist_ok=True)
    files: list[OutputFile] = []
    failures: list[BadImagesError] = []
    for split, store in sources.items():
        images = np.arange(len(store))
        if 0 < config.limit < len(store):
            images = sample(store.labels, size=config.limit, seed=config.seed)
        path = out / f"{split}{part}.beton"
        if part:
            _check_parts(out, split, count)
            images = np.array_split(images, count)[number - 1]
        exists = path.exists()
        if split == "train" and number == 1 and not exists:
            for note in survey(store, ImageRules(config.exif, config.alpha)):
                console.say(note)
            if config.raw is None and _loses_detail(store):
                console.say(
                    "images that are not JPEGs are encoded as JPEGs of quality "
                    f"{config.quality}, which loses detail; --raw stores pixels instead"
                )
        try:
            files.append(OutputFile(path, write(store, images, path, config, console), exists))
        except BadImagesError as error:  # continue, to list the other split's bad images too
            failures.append(error)
    if failures:
        bad = [image for failure in failures for image in failure.bad]
        raise BadImagesError("; ".join(map(str, failures)), bad)
    descriptions = {file.path.name: file.about for file in files}
    write_manifest(out / f"manifest{part}.json", sources["train"].classes, descriptions)
    return files


def _check_parts(out: Path, split: Split, count: int) -> None:
    """Raise a ``DataError`` if existing files in a folder conflict with ``count`` parts."""
    if (single_file := out / f"{split}.beton").exists():
        raise DataError(
            f"{single_file} exists, and pipelines would read it instead of the parts; delete it or "
            "choose another --out"
        )
    with os_errors_as(DataError, f"cannot list {out}"):
        parts = sorted(out.glob(f"{split}-*-of-*.beton"))
    for part in parts:
        if not part.stem.endswith(f"-of-{count:05d}"):
            raise DataError(
                f"{part} is a part of another conversion and cannot be combined with these "
                f"{count} parts; delete the existing parts or choose another --out"
            )


def find_source(kind: Kind, root: Path | Url) -> Place:
    """Return the file or folder that contains a data set.

    ImageNet and CIFAR-10 may be in a subfolder ``imagenet`` or ``cifar10`` of the data root.

    Raises:
        DataError: the root does not exist or cannot be accessed.
    """
    with os_errors_as(DataError, f"cannot look for the data in {root}"):
        place = open_place(root)
        if not place.exists():
            hint = tilde_hint(place)
            raise DataError(f"no data at {place}; set --source or $FASTSIAM_DATA{hint}")
        is_below = kind in ("imagenet", "cifar10") and (place / kind).is_dir()
        return place / kind if is_below else place


def _open_splits(
    kind: Kind, place: Place, columns: ColumnNames, say: Callable[[str], None]
) -> dict[Split, Store]:
    """Open the splits that a data set has: "train", and "val" if it exists.

    Raises:
        DataError: the data set cannot be read.
    """
    open_split: Callable[[Split], Store] = partial(open_store, place, sources=True, columns=columns)
    if kind == "parquet":
        open_split = partial(open_parquet, place, names=columns, in_order=True)
    with os_errors_as(DataError, f"cannot look for the data in {place}"):
        splits: dict[Split, Store] = {"train": open_split("train")}
        try:
            splits["val"] = open_split("val")
        except NoLabelsError as error:
            say(f"no val.beton: {error}")
        except NoSplitError:
            pass
    return splits


def _loses_detail(store: Store) -> bool:
    """Return whether file names show that images will be re-encoded as JPEGs."""
    if isinstance(store, BetonStore):  # its names are those of the files it was converted from
        return False
    return any(store.name(index).lower().endswith(_LOSSY_ENDINGS) for index in range(len(store)))


def default_output(source: Place) -> Path:
    """Return the default output folder of a source: ``NAME-beton``, next to it.

    Inside the source folder, a .beton file would from then on be read instead of the images. For
    a remote source, the output folder is in the current folder.
    """
    if not isinstance(source, Path):
        return Path(f"{PurePath(source.name).stem}-beton")
    if source.name in ("", ".."):
        source = Path(os.path.abspath(source))
    if not source.name:
        raise DataError(f"cannot create a folder next to {source}; choose a folder with --out")
    name = source.name if source.is_dir() else source.name.partition(".")[0]
    return source.with_name(f"{name}-beton")
