"""Conversions that the operating system stops: one line, and no half file with a real name."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fastsiam.errors import DataError
from tests.conftest import write_images
from tests.conversions import checked, failing, run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_images(tmp_path / "images", classes=1, each=2)
    return tmp_path / "images"


@pytest.mark.parametrize("name", ["train.beton.partial", "manifest.json"])
def test_a_folder_in_the_place_of_a_file(name: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    with pytest.raises(DataError, match=r"^cannot write .*: Is a directory; check the path"):
        run("folder", source, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json.tmp").exists()


@pytest.mark.parametrize(("where", "number"), [("start", errno.EDQUOT), ("replace", errno.ENOSPC)])
def test_a_disk_that_fills_up(
    where: str, number: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        if where == "start":
            patch.setattr("fastsiam.pipelines.convert.journal.resume", failing(number))
        else:
            patch.setattr(os, where, failing(number))
        with pytest.raises(DataError, match=r"^no space for .*train\.beton \(.*to resume$"):
            run("folder", source, tmp_path / "out")
    assert not (tmp_path / "out" / "train.beton").exists()
    run("folder", source, tmp_path / "out")
    assert checked(tmp_path / "out") == []


def test_nothing_to_verify(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = checked(tmp_path / "nowhere")
    assert "does not exist: name a .beton file or a folder" in line
    (line,) = checked(tmp_path / ("x" * 300))
    assert line.endswith(": File name too long; choose a shorter path")
    run("folder", source, tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()
    (tmp_path / "out" / "manifest.json").mkdir()
    (line,) = checked(tmp_path / "out")
    assert "manifest.json cannot be read" in line and "convert again" in line
    monkeypatch.setattr(Path, "glob", failing(errno.EACCES))
    (line,) = checked(tmp_path / "out")
    assert "Permission denied; check the permissions" in line
