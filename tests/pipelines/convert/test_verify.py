"""Detection of corrupt converted files."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from fastsiam.console import Console
from fastsiam.pipelines.convert import prepare
from fastsiam.pipelines.convert.verification import verify
from tests.conftest import write_images
from tests.conversions import find_problems, run, stub_raising
from tests.processes import fastsiam


def test_corruption_inside_jpeg_is_detected_by_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a conversion, and by verify --decode in files of versions that kept such images."""
    write_images(tmp_path / "images", classes=1, each=3)
    bad = tmp_path / "images" / "class0" / "001.jpg"
    data = bad.read_bytes()
    # Without tables, the header and the end marker are intact, but the image cannot be decoded.
    start = data.index(b"\xff\xdb")
    end = data.index(b"\xff\xc0")
    bad.write_bytes(data[:start] + data[end:])
    (conversion,) = run("folder", tmp_path / "images", tmp_path / "left", skip_bad=True)
    assert [bad_image["name"] for bad_image in conversion.about["left_out"]] == ["class0/001.jpg"]
    assert find_problems(tmp_path / "left", decode=True) == []
    monkeypatch.setattr(prepare, "is_certain_to_decode", lambda *_: True)
    run("folder", tmp_path / "images", tmp_path / "out")
    assert find_problems(tmp_path / "out", decode=False) == []
    (line,) = find_problems(tmp_path / "out", decode=True)
    assert "image 1 of" in line and "class0/001.jpg" in line
    result = fastsiam("convert", "verify", str(tmp_path / "out"), "--decode", code=1)
    assert "class0/001.jpg" in result.stderr and "NOT intact (1 fault)" in result.stdout


def test_manifests_of_deleted_files_are_ignored(images: Path, tmp_path: Path) -> None:
    """A folder whose files are deleted to convert the images in other parts stays valid."""
    out = tmp_path / "out"
    for parts in (["1/2", "2/2"], [""], ["1/3", "2/3", "3/3"]):
        for part in parts:
            run("folder", images, out, part=part)
        assert find_problems(out) == []
        for file in out.glob("*.beton"):
            file.unlink()


def test_unreadable_first_part_is_fault_of_that_part_alone(images: Path, tmp_path: Path) -> None:
    first, *_ = files = [tmp_path / f"train-0000{n}-of-00003.beton" for n in (1, 2, 3)]
    for number in (1, 2, 3):
        run("folder", images, tmp_path, part=f"{number}/3")
    first.write_bytes(b"XX" + first.read_bytes()[2:])
    reports = {
        one.path: one
        for one in verify(tmp_path, decoding=False, workers=1, console=Console(quiet=True))
    }
    assert [len(reports[file].bad) for file in files] == [1, 0, 0]
    assert str(first) in reports[first].bad[0]


def test_verify_compares_files_with_manifest(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also says in one line if there is nothing to verify."""
    out = tmp_path / "out"
    run("folder", images, out)
    run("folder", images, tmp_path / "other", limit=9)
    shutil.copy(tmp_path / "other" / "train.beton", out / "train.beton")
    assert find_problems(out) == [
        f"{out / 'train.beton'} does not match its description in the manifest"
    ]
    (out / "val.beton").unlink()
    assert f"{out / 'val.beton'} is in the manifest but missing" in find_problems(out)
    (out / "manifest.json").write_text("{")
    assert "cannot read" in find_problems(out)[0]
    (out / "manifest.json").unlink()
    (out / "manifest.json").mkdir()
    (named := tmp_path / "named").mkdir()
    shutil.copy(out / "train.beton", named / "photos.beton")
    assert not find_problems(named / "photos.beton")
    for path, message in (
        (out, f"cannot read {out / 'manifest.json'}"),
        (images, "no .beton files"),
        (named, "names start with train or val; create them with fastsiam convert, or pass"),
        (tmp_path / "nowhere", "does not exist: name a .beton file or a folder"),
        (tmp_path / ("x" * 300), ": File name too long; choose a shorter path"),
    ):
        (line,) = find_problems(path)
        assert message in line
    monkeypatch.setattr(Path, "glob", stub_raising(errno.EACCES))
    (line,) = find_problems(out)
    assert "Permission denied; check the permissions" in line
