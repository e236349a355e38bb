"""Conversions that the operating system stops: one line, and no half file with a real name."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import get_args

import pytest

from fastsiam.config import ConvertConfig
from fastsiam.demo import convert_demo
from fastsiam.errors import DataError
from fastsiam.pipelines.convert import Kind
from tests.conftest import write_images
from tests.conversions import checked, failing, run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_images(tmp_path / "images", classes=1, each=2)
    return tmp_path / "images"


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("method", ["exists", "is_dir", "glob", "rglob", "iterdir"])
def test_a_source_that_cannot_be_looked_into(
    kind: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train").mkdir()
    monkeypatch.setattr(Path, method, failing(errno.EIO))
    with pytest.raises(DataError) as caught:
        run(kind, tmp_path, tmp_path / "out")
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["train.beton.partial", "train.beton.journal", "manifest.json"])
def test_a_folder_in_the_place_of_a_file(name: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    with pytest.raises(DataError, match=r"^cannot write .*: Is a directory; check the path"):
        run("folder", source, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json.tmp").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("where", ["start", "replace", "disk_usage"])
def test_a_disk_that_fills_up(
    number: int, where: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        if where == "start":
            patch.setattr("fastsiam.pipelines.convert.journal.resume", failing(number))
        else:
            patch.setattr(shutil if where == "disk_usage" else os, where, failing(number))
        with pytest.raises(DataError, match=r"^no space for .*train\.beton \(.*to resume$"):
            run("folder", source, tmp_path / "out")
    assert not (tmp_path / "out" / "train.beton").exists()
    run("folder", source, tmp_path / "out")
    assert checked(tmp_path / "out") == []


def test_no_room_for_the_manifest_leaves_the_old_one(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run("folder", source, out)
    before = (out / "manifest.json").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", failing(errno.ENOSPC))
        with pytest.raises(
            DataError, match=r"^cannot write .*manifest\.json: No space .*free some space"
        ):
            run("folder", source, out)
    assert (out / "manifest.json").read_text() == before
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "train.beton"]


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


def test_no_place_for_the_demos_images(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("in the way")
    with pytest.raises(DataError, match=r"^cannot write images in .*: .*; check the p"):
        convert_demo(ConvertConfig(out=str(tmp_path / "out")))
