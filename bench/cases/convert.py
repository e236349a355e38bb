"""Speed of ``fastsiam convert``, compared with copying the same bytes and with FFCV's writer.

All three read from the page cache and write to the same disk. At the end only fastsiam waits until
its file is on the disk.

FFCV's writer is used as in its documentation: a torchvision ``ImageFolder``, and ``RGBImageField``
in mode "jpg" with the same quality and number of processes. It re-encodes every image.
"""

from __future__ import annotations

import multiprocessing
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fastsiam.bench.measurements import Record, Row
from fastsiam.bench.runner import Task, compare
from fastsiam.bench.session import Session
from fastsiam.config import ConvertConfig
from fastsiam.console import Console
from fastsiam.pipelines.convert import convert
from fastsiam.pipelines.store import open_store


def measure(session: Session) -> list[Record]:
    """Measure the conversion of a folder of images."""
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
            in_the_clock="opening the source, reading from the page cache, writing (only fastsiam "
            "waits for the disk at the end); not: starting python",
            config={"bytes": size, "workers": session.workers, "data": images.about},
        )
        for name in ("cp", "fastsiam", "ffcv")
    )
    records = compare(session, rows)
    for one in records:
        one.facts["megabytes_per_second"] = size / 1e6 * one.images_per_second / one.images
    return records


def build_convert(*, name: str, source: Path, target: Path, workers: int) -> Task:
    """Build a task that converts or copies a folder; each repeat clears the target first."""
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
        process.join()  # otherwise their CPU time counts for the next
