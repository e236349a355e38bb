"""Verification of converted files: bytes match their checksums, and every image decodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastsiam.console import Console, Tally
from fastsiam.errors import DataError, ImageError
from fastsiam.files import os_errors_as

from ..remote.path import Place
from ..store import BetonStore, beton_files
from ..workers import process_pool
from .manifest import read_manifests

_PER_TASK = 512
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
    first_parts: dict[Place, Place] = {}
    manifest: dict[str, Any] = {}
    with os_errors_as(DataError, f"cannot look for .beton files in {path}"):
        if not path.exists():
            raise DataError(f"{path} does not exist: name a .beton file or a folder of them")
        files = [path]
        if not path.is_file():
            files = sorted(x for x in path.glob("*.beton") if x.stem.startswith(("train", "val")))
            for parts in (beton_files(path, "train"), beton_files(path, "val")):
                first_parts |= {part: parts[0] for part in parts[1:]}
            manifest = read_manifests(path)
    if not files and not manifest:
        raise DataError(
            f"{path} contains no .beton files whose names start with train or val; create them "
            "with fastsiam convert, or pass the path of one file"
        )
    reports, unreadable = [], set[Place]()
    for file in files:
        report = Report(file)
        reports.append(report)
        try:
            store = BetonStore(file)
        except DataError as error:
            report.bad.append(str(error))
            unreadable.add(file)
            continue
        if manifest and file.name not in manifest:
            report.bad.append(f"{file} is not in the manifest")
        elif manifest and manifest[file.name] != store.about:
            report.bad.append(f"{file} does not match its description in the manifest")
        if (first := first_parts.get(file)) and first not in unreadable:
            try:
                BetonStore(first, file)
            except DataError as error:
                report.bad.append(str(error))
        report.images, report.bytes = len(store), int(store.size.sum())
        checks = {
            "manifest": bool(manifest),
            "checksums": store.crc is not None,
            "decoded": decoding,
        }
        report.checked = ", ".join(name for name, is_on in checks.items() if is_on) or "structure"
        with console.tally(f"{file.name}: images", report.images) as done:
            report.bad += _bad_images(store, decoding, workers, done)
    for name in sorted(manifest.keys() - {file.name for file in files}):
        reports.append(Report(path / name, bad=[f"{path / name} is in the manifest but missing"]))
    return reports


def _bad_images(store: BetonStore, decoding: bool, workers: int, done: Tally) -> list[str]:
    """Check every image in several processes; return a message for each bad one."""

    def check(task: range) -> list[str]:
        messages = []
        for index in task:
            try:
                if not store.is_intact(index, store.read(index)):
                    messages.append(f"{store.where(index)}: its bytes do not match their checksum")
                elif decoding:
                    store.decode(index)
            except ImageError as error:
                messages.append(f"{store.where(index)}: {error.reason}")
        return messages

    tasks = [range(i, min(i + _PER_TASK, len(store))) for i in range(0, len(store), _PER_TASK)]
    messages: list[str] = []
    with process_pool(workers, check) as run:
        for task, bad in zip(tasks, run(tasks), strict=True):
            messages += bad
            done.add(len(task))
    return messages
