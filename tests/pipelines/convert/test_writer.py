"""Files that cannot be written, or are there already."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from pathlib import Path

import pytest

from fastsiam import cli
from fastsiam.config import ConvertConfig
from fastsiam.errors import DataError
from fastsiam.pipelines.convert import convert
from tests.conftest import write_images
from tests.conversions import Quiet, checked, run
from tests.processes import Forked, fastsiam


def test_an_existing_file_is_never_overwritten(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("folder", images, out)
    before = (out / "train.beton").read_bytes()
    with pytest.raises(DataError, match=r"exists already and was made with another --max-side"):
        run("folder", images, out, max_side=10)
    os.utime(images / "train" / "class0" / "000.jpg", (1, 1))
    with pytest.raises(DataError, match="of other images, or of files with other times"):
        run("folder", images, out)
    assert (out / "train.beton").read_bytes() == before


def test_a_full_disk_is_one_line_and_no_half_file(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk's end; afterwards it goes on."""
    write_images(tmp_path / "images", classes=2, each=100, side=80)
    out = tmp_path / "out"
    arguments = ("convert", "folder", "--source", str(tmp_path / "images"), "--out", str(out))
    done = Forked(with_small_files, arguments).wait(120)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert "no space for" in line and "to resume" in line
    assert "Traceback" not in done.stderr and not (out / "train.beton").exists()
    fastsiam(*arguments)
    assert checked(out) == []


def with_small_files(arguments: tuple[str, ...]) -> None:
    """Run a command that may not write a file of more than 200 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    sys.argv = ["fastsiam", *arguments]
    cli.main()


def test_a_disk_too_small_is_said_at_once(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    quiet = Quiet()
    convert("folder", ConvertConfig(source=str(images), out=str(tmp_path / "out")), quiet)
    assert "has 0 MB free and train.beton may take" in quiet.said[0]


def test_a_folder_that_cannot_be_written(images: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot make the folder"):
        run("folder", images, tmp_path / "file" / "out")
