"""Conversion at work: copying files, ``fastsiam convert``, and FFCV's own writer.

FFCV's writer does what its documentation shows: a torchvision ``ImageFolder``, ``RGBImageField`` in
mode "jpg" at the same quality, as many processes. It encodes every image anew, which is what it is.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from fastsiam.bench.contest import Work
from fastsiam.bench.images import Silent
from fastsiam.config import ConvertConfig
from fastsiam.pipelines.convert import convert
from fastsiam.pipelines.store import open_store


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
