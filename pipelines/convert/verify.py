"""Checks converted files: every byte is the one that was written, and every image decodes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastsiam.errors import DataError
from fastsiam.files import explained

from ..processes import forked
from ..store import BetonStore, beton_files
from ..store.decode import decode
from .manifest import read_manifests

_AT_ONCE = 512
"""Images of one task."""


@dataclass
class Report:
    """The result of checking one file."""

    path: Path
    images: int = 0
    bytes: int = 0
    compared: list[str] = field(default_factory=list)
    """What the file was compared with besides its own checksums: the manifest, or nothing."""
    checked: str = ""
    """What the images were compared with."""
    bad: list[str] = field(default_factory=list)
    """What is wrong, a line each."""


def verify(
    path: Path,
    *,
    decoding: bool = False,
    workers: int = -1,
    begin: Callable[[str, int, int], None],
    progress: Callable[[int, int], None],
) -> list[Report]:
    """Check a .beton file, or all of a folder with its manifest.

    Args:
        path: the file or the folder.
        decoding: also decode every image and compare its size with the recorded one.
        workers: processes; -1 is one for each core.
        begin: called with name, images and bytes of each file.
        progress: called with the images and bytes that are done.

    Raises:
        DataError: no file to check.
    """
    with explained(DataError, f"cannot look for .beton files in {path}"):
        if not path.exists():
            raise DataError(f"{path} does not exist: name a .beton file or a folder of them")
        files = [path] if path.is_file() else _files(path)
        manifests, known = ([], {}) if path.is_file() else read_manifests(path)
    if not files and not known:
        raise DataError(f"{path} holds no .beton files; fastsiam convert makes them")
    reports = []
    for file in files:
        report = Report(file)
        reports.append(report)
        try:
            store = BetonStore(file)
        except DataError as error:
            report.checked = "nothing"
            report.bad.append(str(error))
            continue
        if manifests:
            report.compared.append("manifest")
            _compare(report, store, known)
        begin(file.name, len(store), int(store.size.sum()))
        _check(report, store, decoding, workers, progress)
    for name in known.keys() - {file.name for file in files}:
        reports.append(Report(path / name, bad=[f"{path / name} is in the manifest and not there"]))
    return reports


def _files(folder: Path) -> list[Path]:
    """List the files and parts of a folder; DataError if parts are missing."""
    for split in ("train", "val"):
        beton_files(folder, split)
    return sorted(path for path in folder.glob("*.beton") if path.stem.startswith(("train", "val")))


def _compare(report: Report, store: BetonStore, known: dict[str, Any]) -> None:
    """Report differences between the file and its manifest."""
    told = known.get(report.path.name)
    if told is None:
        report.bad.append(f"{report.path} is not in the manifest")
    elif told != store.about:
        report.bad.append(f"{report.path} is another file than its manifest describes")


def _check(
    report: Report,
    store: BetonStore,
    decoding: bool,
    workers: int,
    progress: Callable[[int, int], None],
) -> None:
    """Compare every image with its checksum, in several processes."""
    report.images, report.bytes = len(store), int(store.size.sum())
    what = [*report.compared, *(["checksums"] if store.crc is not None else [])]
    report.checked = ", ".join([*what, *(["decoded"] if decoding else [])]) or "structure"
    tasks = [range(i, min(i + _AT_ONCE, len(store))) for i in range(0, len(store), _AT_ONCE)]
    found: list[tuple[int, str]] = []
    done = size = 0
    with forked(workers, _begin, store, decoding) as run:
        for task, bad in run(_check_images, tasks):
            found += bad
            done += len(task)
            size += int(store.size[task.start : task.stop].sum())
            progress(done, size)
    report.bad += [f"{store.where(index)}: {reason}" for index, reason in sorted(found)]
    if not found and store.crc is not None:
        report.bad += _check_blocks(store)


def _check_blocks(store: BetonStore) -> list[str]:
    """Compare the checksum of each block with those of its images."""
    assert store.crc is not None
    bad = []
    for number, block in enumerate(store.about.get("blocks", [])):
        crc = store.crc[block["first"] : block["first"] + block["images"]]
        if zlib.crc32(crc.tobytes()) != block["crc32"]:
            bad.append(f"{store.root}: block {number} has another checksum than its images")
    return bad


_shared: tuple[BetonStore, bool]
"""The file of this worker, and whether to decode its images."""


def _begin(store: BetonStore, decoding: bool) -> None:
    global _shared
    _shared = store, decoding


def _check_images(task: range) -> tuple[range, list[tuple[int, str]]]:
    """Check some images in a worker; return them, and those that are bad with the reason."""
    store, decoding = _shared
    bad = []
    for index in task:
        data = store.read(index)
        if not store.is_intact(index, data):
            bad.append((index, "its bytes are not those that were written"))
        elif decoding:
            try:
                image = decode(data, store.raw_size(index))
            except ValueError as error:
                bad.append((index, str(error)))
                continue
            size = int(store.width[index]), int(store.height[index])
            if image.size != size:
                bad.append((index, f"it has {image.size} pixels, not {size} as recorded"))
    return task, bad
