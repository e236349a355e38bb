"""Write the images of class folders in every supported data set format."""

from __future__ import annotations

import csv
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fastsiam.pipelines.store import FolderStore
from tests.conversions import run
from tests.sources import folder_members, imagenet_train_tar, tar
from tests.tables import Row, dataset, saved, write_hub_splits

Write = Callable[[Path, Path], Path]
"""Writes the images of a folder below a root; returns the path for ``--data``."""


def rows_of(folder: Path) -> list[Row]:
    """Return the images of class folders as (bytes, file name, label)."""
    store = FolderStore(folder)
    return [
        (bytes(store.read(i)), store.name(i).split("/", 1)[1], int(store.labels[i]))
        for i in range(len(store))
    ]


def write_list(path: Path, header: str, rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header.split(","), *rows])
    return path


def write_csv_list(folder: Path, root: Path) -> Path:
    rows = [(str(folder / name), name.split("/")[0]) for name, _ in folder_members(folder)]
    return write_list(root / "list.csv", "path,label", rows)


def write_tar(kind: int, folder: Path, root: Path) -> Path:
    members = [(f"./top/{name}", data) for name, data in folder_members(folder)]
    return tar(root / "images.tar", members[::-1], kind=kind)


def write_shards(folder: Path, root: Path, *, split: str = "train", count: int = 2) -> Path:
    """Write WebDataset shards, with a ``.cls`` file next to each image."""
    rows = rows_of(folder)
    for shard in range(count):
        start, stop = (number * len(rows) // count for number in (shard, shard + 1))
        members = [
            (f"{row:03}.{extension}", content)
            for row in range(start, stop)
            for extension, content in (("jpg", rows[row][0] or b""), ("cls", b"%d" % rows[row][2]))
        ]
        tar(root / f"{split}-{shard:04}.tar", members)
    return root


def _splits(folder: Path, **more: Path) -> dict[str, Any]:
    folders = {"train": folder, **more}
    return {
        name: dataset(rows_of(path), FolderStore(path).classes) for name, path in folders.items()
    }


def write_saved_dataset(folder: Path, root: Path, **more: Path) -> Path:
    """Write with ``save_to_disk``; ``more`` are the folders of additional splits."""
    splits = _splits(folder, **more)
    shards = {name: min(3 if name == "train" else 1, len(rows)) for name, rows in splits.items()}
    return saved(root, splits, **shards)


def write_hub_dataset(folder: Path, root: Path, **more: Path) -> Path:
    splits = _splits(folder, **more)
    return write_hub_splits(root, splits, shards=min(2, len(splits["train"])))


def write_converted(folder: Path, root: Path, **options: object) -> Path:
    run("folder", folder, root, workers=1, **options)
    return root


def without_checksums(beton: bytes) -> bytes:
    """Return a converted file as FFCV would write it: without the arguments of its image field."""
    at = beton.index(b"fastsiam")
    return beton[:at] + bytes(1024) + beton[at + 1024 :]


def write_converted_parts(folder: Path, root: Path) -> Path:
    for number in (2, 1):
        run("folder", folder, root, workers=1, part=f"{number}/2")
    return root


FORMS: dict[str, Write] = {
    "folder": lambda folder, root: folder,
    "csv": write_csv_list,
    "tar": partial(write_tar, tarfile.GNU_FORMAT),
    "pax": partial(write_tar, tarfile.PAX_FORMAT),
    "ustar": partial(write_tar, tarfile.USTAR_FORMAT),
    "tar of tars": lambda folder, root: imagenet_train_tar(
        root / "train.tar", folder_members(folder)
    ),
    "shards": write_shards,
    "saved": write_saved_dataset,
    "hub": write_hub_dataset,
    "converted": write_converted,
    "parts": write_converted_parts,
    "pixels": partial(write_converted, raw=True),
}


def write_once(kind: str, folder: Path) -> Path:
    """Return the images of a folder in a format; the first call writes them next to the folder."""
    root = folder.with_name(kind)
    return root if root.exists() else FORMS[kind](folder, root)
