"""Images to measure with."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from fastsiam.config import ConvertConfig
from fastsiam.pipelines.convert.prepare import UNCHANGED, prepare


class Silent:
    """A conversion's watcher that says nothing."""

    def say(self, text: str) -> None:
        """Say nothing."""

    def begin(self, name: str, images: int, size: int) -> None:
        """Say nothing."""

    def progress(self, images: int, size: int) -> None:
        """Say nothing."""


def gather(folder: Path, copies: int, target: Path, *, as_tar: bool = False) -> Path:
    """Return the folder with each image so many times, or a tar of the JPEGs among them."""
    if copies == 1 and not as_tar:
        return folder
    target.mkdir()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if as_tar and prepare(path.read_bytes(), None, ConvertConfig()).how != UNCHANGED:
            continue
        own = target / path.relative_to(folder)
        own.parent.mkdir(parents=True, exist_ok=True)
        for number in range(copies):
            shutil.copyfile(path, own.with_stem(f"{own.stem}-{number}"))
    if not as_tar:
        return target
    archive = target.with_suffix(".tar")
    subprocess.run(["tar", "-cf", str(archive), "-C", str(target), "."], check=True)
    shutil.rmtree(target)
    return archive
