"""Disks for tests: a small one that can be filled, and a read-only one."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[Path]:
    """Mount a tmpfs of a few MB inside the context; skip the test if mounting is not permitted."""
    path.mkdir(parents=True, exist_ok=True)
    with _mounted(path, "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs"):
        yield path


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[Path]:
    """Make a folder read-only inside the context, by file modes, or for root by a bind mount."""
    if os.geteuid():
        folders = [path, *(subfolder for subfolder in path.rglob("*") if subfolder.is_dir())]
        for folder in folders:
            folder.chmod(0o555)
        try:
            yield path
        finally:
            for folder in folders:
                folder.chmod(0o755)
        return
    with _mounted(path, "--bind", str(path)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(path)], check=True)
        yield path


def fill(disk: Path) -> Path:
    """Fill a small disk to its last byte; return the filler file."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return filler


@contextlib.contextmanager
def _mounted(path: Path, *options: str) -> Iterator[None]:
    result = subprocess.run(["mount", *options, str(path)], capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"cannot mount a disk: {result.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
