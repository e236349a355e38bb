"""How fast ``fastsiam convert`` is, beside copying the same bytes and FFCV's own writer.

All read from the page cache and write to the same disk; none waits for the disk at the end.

FFCV's writer does what its documentation shows: a torchvision ``ImageFolder``, ``RGBImageField`` in
mode "jpg" at the same quality, as many processes. It encodes every image again.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from fastsiam.bench.contest import Work
from fastsiam.bench.images import Silent, write_tar
from fastsiam.bench.records import Record, record
from fastsiam.bench.session import Session
from fastsiam.config import ConvertConfig
from fastsiam.pipelines.convert import convert
from fastsiam.pipelines.convert.prepare import UNCHANGED, prepare
from fastsiam.pipelines.store import open_store

CONVERTERS = ("cp", "fastsiam", "ffcv")


def measure(session: Session) -> list[Record]:
    """Measure conversion of a folder of files, and of one tar of those that keep their bytes."""
    images = session.images(session.loaded_batch)
    tar = images.folder.with_suffix(".tar")
    sources = [images.folder]
    if tar.exists() or _archive(images.folder, tar):
        sources.append(tar)
    else:
        session.console.say("a tar: not measured: conversion keeps none of these images as it is")
    records = []
    for source in sources:
        store = open_store(source, "train", sources=True)
        size = int(store.sizes().sum())
        with session.contest() as contest:
            for name in CONVERTERS:
                if name == "ffcv" and source == tar:
                    continue  # its writer reads none
                contest.enter(
                    name,
                    build_convert,
                    name=name,
                    source=source,
                    target=session.folder / f"converted-{name}",
                    workers=session.workers,
                )
            timings = contest.run(session.config.repeats)
        cp = timings.get(("cp", "convert"))
        records += [
            record(
                "convert",
                f"{name}, {'a tar' if source == tar else 'files'}",
                timing,
                baseline=("cp", cp) if cp else None,
                facts={
                    "megabytes_per_second": size / 1e6 / timing.median,
                    "images": len(store),
                },
                in_the_clock="opening the source, reading from the page cache, writing without "
                "waiting for the disk; not: starting python",
                config={
                    "source": "tar" if source == tar else "folder",
                    "bytes": size,
                    "workers": session.workers,
                    "data": images.about,
                },
            )
            for (name, _), timing in timings.items()
        ]
    return records


def _archive(folder: Path, tar: Path) -> bool:
    """Put the images that conversion leaves as they are into a tar; tell if there are any."""
    contents = ((path, path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file())
    kept = [
        (str(path.relative_to(folder)), data)
        for path, data in contents
        if prepare(data, None, ConvertConfig()).how == UNCHANGED
    ]
    if kept:
        write_tar(tar, kept)
    return bool(kept)


def build_convert(*, name: str, source: Path, target: Path, workers: int) -> dict[str, Work]:
    """Convert a source, or copy it, into a target that is cleared before each time."""
    config = ConvertConfig(source=str(source), out=str(target), workers=workers)
    runs: dict[str, Callable[[], object]] = {
        "cp": lambda: subprocess.run(["cp", "-r", str(source), str(target)], check=True),
        "fastsiam": lambda: convert("folder", config, Silent()),
        "ffcv": lambda: _by_ffcv(source, target, workers, config.quality),
    }
    if name == "ffcv":
        import ffcv.writer  # noqa: F401  # missing, it is to be said now

    def clear() -> None:
        shutil.rmtree(target, ignore_errors=True)
        target.unlink(missing_ok=True)

    images = len(open_store(source, "train", sources=True))
    return {"convert": Work(runs[name], images, before=clear)}


def _by_ffcv(source: Path, target: Path, workers: int, quality: int) -> None:
    import multiprocessing

    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    image = RGBImageField(write_mode="jpg", jpeg_quality=quality)
    writer = DatasetWriter(str(target), {"image": image, "label": IntField()}, num_workers=workers)
    writer.from_indexed_dataset(ImageFolder(str(source)))
    for process in multiprocessing.active_children():
        process.join()  # or their processor time counts for the next
