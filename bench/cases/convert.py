"""How fast ``fastsiam convert`` is, beside copying the same bytes and FFCV's own writer.

All read from the page cache and write to the same disk; none waits for the disk at the end.

FFCV's writer does what its documentation shows: a torchvision ``ImageFolder``, ``RGBImageField`` in
mode "jpg" at the same quality, as many processes. It encodes every image again.
"""

from __future__ import annotations

import multiprocessing
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fastsiam.bench.records import Record, Row
from fastsiam.bench.runner import Task, compare
from fastsiam.bench.session import Session
from fastsiam.config import ConvertConfig
from fastsiam.console import Console
from fastsiam.pipelines.convert import convert
from fastsiam.pipelines.store import open_store


def measure(session: Session) -> list[Record]:
    """Measure conversion of a folder of files."""
    images = session.images(session.loaded_batch)
    size = int(open_store(images.folder, "train", sources=True).sizes().sum())
    rows = (
        Row(
            case="convert",
            name=f"{name}, files",
            build=partial(
                build_convert,
                name=name,
                source=images.folder,
                target=session.folder / f"converted-{name}",
                workers=session.workers,
            ),
            baseline=("cp", "cp, files"),
            in_the_clock="opening the source, reading from the page cache, writing without "
            "waiting for the disk; not: starting python",
            config={"bytes": size, "workers": session.workers, "data": images.about},
        )
        for name in ("cp", "fastsiam", "ffcv")
    )
    records = compare(session, rows)
    for one in records:
        speed = size / 1e6 * one.images_per_second / one.images
        one.facts.update(megabytes_per_second=speed, images=one.images)
    return records


def build_convert(*, name: str, source: Path, target: Path, workers: int) -> Task:
    """Convert a source, or copy it, into a target that is cleared before each time."""
    config = ConvertConfig(source=str(source), out=str(target), workers=workers)
    runs: dict[str, Callable[[], object]] = {
        "cp": lambda: subprocess.run(["cp", "-r", str(source), str(target)], check=True),
        "fastsiam": lambda: convert("folder", config, Console(quiet=True)),
        "ffcv": lambda: _by_ffcv(source, target, workers, config.quality),
    }

    def clear() -> None:
        shutil.rmtree(target, ignore_errors=True)
        target.unlink(missing_ok=True)

    images = len(open_store(source, "train", sources=True))
    return Task(runs[name], images, before=clear)


def _by_ffcv(source: Path, target: Path, workers: int, quality: int) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    image = RGBImageField(write_mode="jpg", jpeg_quality=quality)
    writer = DatasetWriter(str(target), {"image": image, "label": IntField()}, num_workers=workers)
    writer.from_indexed_dataset(ImageFolder(str(source)))
    for process in multiprocessing.active_children():
        process.join()  # or their processor time counts for the next
