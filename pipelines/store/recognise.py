"""Detection of the data format at a path."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fastsiam.config import AUTOMATIC, ColumnNames
from fastsiam.config.urls import Url
from fastsiam.console import format_count
from fastsiam.errors import DataError, NoImagesError, NoSplitError
from fastsiam.files import os_errors_as, tilde_hint

from ..remote.path import Place, RemotePath, open_place
from .archive import ArchiveStore
from .base import Store, is_hidden, is_image_name, warn_once
from .beton import BetonStore
from .cifar import ARCHIVES as CIFAR_ARCHIVES
from .cifar import CifarStore
from .folder import CSV, FolderStore, ListedStore, is_broken
from .labels import number_classes, validation_wnids
from .mapped_files import require_local_path
from .parquet import PARQUET, ParquetStore, open_parquet
from .splits import (
    ALL_SPLIT_NAMES,
    SPLIT_NAMES,
    Split,
    choose_split,
    find_split,
    list_visible,
    words,
)
from .table import ArrowStore, TableStore, is_saved_dataset

_KAGGLE = "ILSVRC/Data/CLS-LOC"
_PART = re.compile(r"\w+-(\d{5})-of-(\d{5})\.beton")
_COMPRESSED = (".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".zip")


def open_store(
    root: Path | Url, split: Split, *, sources: bool = False, columns: ColumnNames = AUTOMATIC
) -> Store:
    """Open a split of the data at ``root``.

    Args:
        root: a .beton, .tar or .parquet file, a CIFAR archive, a list of image files (.csv), or a
            folder. A folder is searched, in this order, for ``<split>.beton`` or its parts; a
            folder named after the split; tars; a CIFAR archive; parquet files; a data set written
            by ``save_to_disk`` or image files, which are training images. A URL may point to
            .beton files, tars or, for a conversion, parquet files.
        split: "train" or "val"; files and folders named "test" are also "val".
        sources: for a conversion: prefer the source images to .beton files in the same folder, and
            open them for reading each image once and in order.
        columns: names of the image and label columns of parquet, Arrow or a list, if the user
            passed any.

    Raises:
        DataError: the data or the split do not exist or cannot be read, or columns are named and
            the data have no columns.
    """
    with os_errors_as(DataError, f"cannot open the data at {root}"):
        root = open_place(root)
        if not root.exists():
            hint = root.hint() if isinstance(root, RemotePath) else tilde_hint(root)
            raise DataError(
                f"no data at {root}: name a folder of images, a .beton, a .tar, a .parquet or a "
                f".csv with --data or $FASTSIAM_DATA{hint}"
            )
        if root.is_file():
            store = _open_file(root, split, columns, in_order=sources)
        else:
            store = _open_folder(root, split, columns, sources)
        store.origin = root
        if not len(store):  # a single part of a conversion
            raise DataError(f"{store.root} holds no images")
        _check_columns(store, columns)
        if split == "val" and (store.labels < 0).all() and (wnids := validation_wnids(store)):
            classes: tuple[str, ...] = ()
            # The cache does not have to hold the training images too.
            uncached = replace(root, cache=None) if isinstance(root, RemotePath) else root
            with contextlib.suppress(DataError):  # there are only validation images
                classes = open_store(uncached, "train", columns=columns).classes
            store.labels, store.classes = number_classes(wnids, store.root, classes)
        return store


def _check_columns(store: Store, columns: ColumnNames) -> None:
    """Raise a ``DataError`` if the user named columns, but the data have no columns."""
    if any(columns) and not isinstance(store, TableStore | ListedStore):
        options = [f"--{role}-column" for role, name in columns._asdict().items() if name]
        raise DataError(
            f"{store} has no columns: leave out {' and '.join(options)}, or pass "
            f"{' '.join(f'{option}=' for option in options)} if a run's settings name them"
        )


def beton_files(folder: Place, split: Split) -> Sequence[Place]:
    """Return the .beton file of a split, or all of its parts; may be empty.

    Raises:
        DataError: parts are missing, or the folder cannot be listed.
    """
    with os_errors_as(DataError, f"cannot list {folder}"):
        file = folder / f"{split}.beton"
        if file.is_file():
            return [file]
        parts = {
            (int(match[2]), int(match[1])): path
            for path in folder.glob(f"{split}-*.beton")
            if (match := _PART.fullmatch(path.name))
        }
    if not parts:
        return []
    count, _ = max(parts)
    if any(part_count != count for part_count, _ in parts):
        raise DataError(f"{folder} holds parts of several conversions of {split} images")
    if missing := [str(n) for n in range(1, count + 1) if (count, n) not in parts]:
        raise DataError(
            f"{folder} has {len(parts)} of {count} parts of its {split} images; missing: "
            f"{', '.join(missing)} (convert with --part)"
        )
    return [parts[key] for key in sorted(parts)]


def _open_file(path: Place, split: Split, columns: ColumnNames, in_order: bool) -> Store:
    if path.suffix == ".beton":
        if split == "train":
            return BetonStore(path)
        sibling = path.with_name(path.name.replace("train", "val"))
        if sibling == path or not sibling.is_file():
            raise NoSplitError(f"{path} has no {split} split beside it")
        return BetonStore(sibling)
    if path.name in CIFAR_ARCHIVES:
        return CifarStore(require_local_path(path), split)
    if path.suffix == ".tar":
        return ArchiveStore(find_split(path, split))
    if path.suffix == PARQUET:
        return open_parquet(path, split, columns, in_order=in_order)
    if path.suffix.lower() == CSV:
        return ListedStore(require_local_path(path), split, columns)
    if path.name.endswith(_COMPRESSED):
        raise DataError(f"{path} is compressed: unpack it, or gunzip it to a plain .tar")
    raise DataError(
        f"{path} is neither a folder of images nor a .beton, .tar, .parquet or .csv file"
    )


def _open_folder(root: Place, split: Split, columns: ColumnNames, sources: bool) -> Store:
    if sources:
        with contextlib.suppress(NoImagesError, NoSplitError):
            return _open_unconverted(root, split, columns, in_order=True)
    if files := beton_files(root, split):
        return BetonStore(*files)
    return _open_unconverted(root, split, columns, in_order=sources)


def _open_unconverted(root: Place, split: Split, columns: ColumnNames, in_order: bool) -> Store:
    if isinstance(root, Path) and (root / _KAGGLE / "train").is_dir():
        root = root / _KAGGLE
    folders = dict[str, Place]()
    for path in _folders(root):
        other = folders.setdefault(path.name.lower(), path)
        if other != path and path.name.lower() in ALL_SPLIT_NAMES:
            raise DataError(
                f"{root} has folders {other.name}/ and {path.name}/ for one split: move the images "
                "from one to the other"
            )
    val = [folders[name].name for name in SPLIT_NAMES["val"] if name in folders]
    for name in SPLIT_NAMES[split]:
        if name in folders and (val or name != "training"):  # "training" alone may be a class
            if split == "train":
                _warn_of_unused_folders(root, folders[name], folders, val)
            return _open_images(folders[name], columns, in_order)
    with _unless_images(root):
        if tars := list_visible(root, ".tar"):
            return _beside_folders(ArchiveStore(choose_split(split, tars, root)), root)
        for name in CIFAR_ARCHIVES:
            if (root / name).is_file():
                return CifarStore(require_local_path(root / name), split)
        if any(map(_tables, (root, *folders.values()))):
            return _beside_folders(open_parquet(root, split, columns, in_order=in_order), root)
        if split == "train" and isinstance(root, Path) and is_saved_dataset(root):
            return ArrowStore(root, columns)
    if split == "val":
        raise NoSplitError(f"{root} has no val/ or test/ folder and no val.beton")
    for folder in folders.values():
        if (folder / "train").is_dir():
            raise DataError(f"{root} holds separate data sets: pass one of them, such as {folder}")
    if val:
        warn_once(
            f"{root} has a folder {val[0]}/ but no train/, so the images in {val[0]}/ are also "
            "training images; move the others into a folder train/"
        )
    for_training, for_validation = (
        [name for name in folders if not words(name).isdisjoint(SPLIT_NAMES[one])]
        for one in ("train", "val")
    )
    if for_training and for_validation:
        warn_once(
            f"{root} has folders {for_training[0]}/ and {for_validation[0]}/, which are read as "
            "classes; if they are splits, rename them to train/ and val/, or pass one of them"
        )
    return _open_files(require_local_path(root))


def _folders(root: Place) -> list[Place]:
    """Return the visible folders in a folder, sorted, without a stat call per file.

    Raises:
        DataError: a link named after a split is broken.
    """
    entries: Iterable[Place]
    if isinstance(root, Path):
        with contextlib.closing(os.scandir(root)) as listing:
            paths = [
                root / entry.name for entry in listing if not entry.is_file(follow_symlinks=False)
            ]
        for path in paths:
            if path.name.lower() in ALL_SPLIT_NAMES and is_broken(path):
                raise DataError(f"{path} is a broken link: mount its target, or remove the link")
        entries = paths
    else:
        entries = root.iterdir()
    return sorted(path for path in entries if path.is_dir() and not is_hidden(path.name))


def _warn_of_unused_folders(
    root: Place, train: Place, folders: Mapping[str, Place], val: Sequence[str]
) -> None:
    """Warn if folders next to ``train`` contain images: all of them may be classes."""
    splits = ALL_SPLIT_NAMES if val else ()
    others = [path for name, path in folders.items() if path != train and name not in splits]
    if names := [path.name for path in others if isinstance(path, Path) and _has_image(path)]:
        advice = (
            "to train on them too, pass them with another --data"
            if val
            else f"if {train.name}/ is a class, move all class folders into a folder train/"
        )
        warn_once(
            f"{root} has a folder {train.name}/ with the training images, so the images in "
            f"{format_count(len(names), 'other folder')}, such as {names[0]}/, are not used; "
            f"{advice}"
        )


def _has_image(folder: Path, *, depth: int = 1) -> bool:
    """Return whether a folder has images, tars or parquet files, or is a saved data set.

    So do its subfolders, down to ``depth``.
    """
    folders = list[Path]()
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if is_image_name(entry.name) or entry.name.endswith((".tar", PARQUET)):
                return True
            if depth and entry.is_dir():
                folders.append(folder / entry.name)
    return is_saved_dataset(folder) or any(_has_image(path, depth=depth - 1) for path in folders)


def _open_images(folder: Place, columns: ColumnNames, in_order: bool) -> Store:
    """Open a folder's tars, saved data set, parquet files or image files as one split."""
    with _unless_images(folder):
        if tars := list_visible(folder, ".tar"):
            return _beside_folders(ArchiveStore(tars), folder)
        if isinstance(folder, Path) and is_saved_dataset(folder):
            return ArrowStore(folder, columns)
        if tables := _tables(folder):
            store = ParquetStore(folder, tables, columns, in_order=in_order)
            return _beside_folders(store, folder)
    return _open_files(require_local_path(folder))


def _open_files(folder: Path) -> Store:
    """Open a folder's image files; if it has none, the error names a folder with tars or tables."""
    try:
        return FolderStore(folder)
    except NoImagesError as error:
        others = [x for x in _folders(folder) if isinstance(x, Path) and _has_image(x)]
        if others:
            raise NoImagesError(
                f"{error}; to read tars, parquet files or a saved data set, pass their folder, "
                f"such as {others[0]}"
            ) from error
        if archives := sorted(x.name for x in folder.iterdir() if x.name.endswith(_COMPRESSED)):
            raise NoImagesError(
                f"{error}; {archives[0]} is compressed: unpack it, or gunzip it to a plain .tar"
            ) from error
        raise


def _beside_folders(store: Store, folder: Place) -> Store:
    """Warn if there are folders with images beside the tars or tables of a store; return it."""
    if not isinstance(folder, Path):  # another request for each folder
        return store
    paths = [path for path in _folders(folder) if isinstance(path, Path)]
    others = (path for path in paths if path.name.lower() not in SPLIT_NAMES["val"])
    if names := [path.name for path in others if _has_image(path) and not _tables(path)]:
        warn_once(
            f"{folder} is read from its tars or parquet files, so the images in "
            f"{format_count(len(names), 'folder')}, such as {names[0]}/, are not used; to use "
            "them too, pass them with another --data"
        )
    return store


@contextlib.contextmanager
def _unless_images(folder: Place) -> Iterator[None]:
    """Suppress a ``NoImagesError`` in the block, with a warning, if the folder has image files.

    The caller then reads the image files instead of the tars or tables without images.

    Raises:
        NoImagesError: raised by the block, and there are no image files in the folder or below it.
    """
    try:
        yield
    except NoImagesError as error:
        if not isinstance(folder, Path):
            raise
        with contextlib.suppress(NoImagesError):
            FolderStore(folder)
            warn_once(f"{error}: the image files in {folder} are read instead")
            return
        raise


def _tables(folder: Place) -> list[Place]:
    """Return a folder's parquet files, or none if it has image files; stop at the first image.

    They may be in folders ``x.parquet``, as Spark writes them.
    """
    with os_errors_as(DataError, f"cannot list {folder}"):
        listing = os.scandir(folder) if isinstance(folder, Path) else folder.iterdir()
        with contextlib.closing(listing):
            has_tables = False
            for entry in listing:
                if is_image_name(entry.name):
                    return []
                has_tables = has_tables or entry.name.endswith(PARQUET)
        if not has_tables:
            return []
        parts = sorted(path for path in folder.glob(f"[!.]*{PARQUET}") if path.is_dir())
        return [table for place in (folder, *parts) for table in list_visible(place, PARQUET)]
