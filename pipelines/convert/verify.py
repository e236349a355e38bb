"""Verification of converted files: bytes match their checksums, and every image decodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fastsiam.console import Console, Tally
from fastsiam.errors import DataError, ImageError
from fastsiam.files import os_errors_as

from ..remote.path import Place
from ..store import BetonStore, Split, beton_files
from ..workers import process_pool
from .manifest import read_manifests

_AT_ONCE = 512
"""Number of images per task."""


@dataclass
class Report:
    """The result of checking one file."""

    path: Path
    images: int = 0
    bytes: int = 0
    checked: str = "nothing"
    """The checks that were made, separated by commas."""
    bad: list[str] = field(default_factory=list)
    """Messages of the problems found."""


def verify(path: Path, *, decoding: bool, workers: int, console: Console) -> list[Report]:
    """Check a .beton file, or all .beton files of a folder and its manifests.

    Args:
        path: the file or the folder.
        decoding: also decode every image and compare its size with the recorded one.
        workers: number of processes; -1 means one per core.
        console: shows the progress.

    Raises:
        DataError: there is no file to check, parts are missing, or a manifest is corrupt.
    """
    with os_errors_as(DataError, f"cannot look for .beton files in {path}"):
        if not path.exists():
            raise DataError(f"{path} does not exist: name a .beton file or a folder of them")
        files, known = (
            ({path: path}, {}) if path.is_file() else (_files(path), read_manifests(path))
        )
    if not files and not known:
        raise DataError(f"{path} contains no .beton files; create them with fastsiam convert")
    reports = []
    for file, first in files.items():
        report = Report(file)
        reports.append(report)
        try:
            store = BetonStore(file)
        except DataError as error:
            report.bad.append(str(error))
            continue
        if known and file.name not in known:
            report.bad.append(f"{file} is not in the manifest")
        elif known and known[file.name] != store.about:
            report.bad.append(f"{file} does not match its description in the manifest")
        if file != first:
            try:
                BetonStore(first, file)
            except DataError as error:
                report.bad.append(str(error))
        report.images, report.bytes = len(store), int(store.size.sum())
        checks = {"manifest": bool(known), "checksums": store.crc is not None, "decoded": decoding}
        report.checked = ", ".join(name for name, used in checks.items() if used) or "structure"
        with console.tally(f"{file.name}: images", report.images) as done:
            report.bad += _bad_images(store, decoding, workers, done)
    for name in known.keys() - {file.name for file in files}:
        reports.append(Report(path / name, bad=[f"{path / name} is in the manifest but missing"]))
    return reports


def _files(folder: Path) -> dict[Path, Place]:
    """Map each .beton file of a folder to the first part of its split, or to itself if single.

    Raises:
        DataError: parts are missing.
    """
    files = sorted(x for x in folder.glob("*.beton") if x.stem.startswith(("train", "val")))
    splits: tuple[Split, ...] = ("train", "val")
    parts = [beton_files(folder, split) for split in splits]
    first_of = {part: own[0] for own in parts for part in own}
    return {file: first_of.get(file, file) for file in files}


def _bad_images(store: BetonStore, decoding: bool, workers: int, done: Tally) -> list[str]:
    """Check every image in several processes; return a message for each bad one."""

    def check(task: range) -> tuple[range, list[tuple[int, str]]]:
        return task, [(i, reason) for i in task if (reason := _trouble(store, i, decoding))]

    tasks = [range(i, min(i + _AT_ONCE, len(store))) for i in range(0, len(store), _AT_ONCE)]
    found: list[tuple[int, str]] = []
    with process_pool(workers, check) as run:
        for task, bad in run(tasks):
            found += bad
            done.add(len(task))
    return [f"{store.where(index)}: {reason}" for index, reason in found]


def _trouble(store: BetonStore, index: int, decoding: bool) -> str:
    """Return what is wrong with an image, or ""."""
    if not store.is_intact(index, store.read(index)):
        return "its bytes do not match their checksum"
    try:
        if decoding:
            store.decode(index)
    except ImageError as error:
        return error.reason
    return ""
