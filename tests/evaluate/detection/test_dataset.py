"""Files of a data set: by name alone, in folders and zips."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from fastsiam.errors import DataError
from fastsiam.evaluate.detection.dataset import Root, has_file, open_zip, read_file

NAMES = {"VOC2007/a.xml": b"first", "VOC2007/deep/b.jpg": b"second" * 100, "names.txt": b"x"}


def opened(kind: str, folder: Path) -> Root:
    """Write the files in a folder or a zip, and open it."""
    if kind == "folder":
        for name, content in NAMES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return folder
    with zipfile.ZipFile(folder / "x.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in NAMES.items():
            file.writestr(name, content)
    return open_zip(folder / "x.zip")


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_files_are_found_by_their_names(kind: str, tmp_path: Path) -> None:
    root = opened(kind, tmp_path)
    for name, content in NAMES.items():
        assert has_file(root, name) and read_file(root, name) == content
    for name in ("VOC2007", "VOC2007/c.xml", "nowhere/a.xml", "a.xml"):
        assert not has_file(root, name)
        with pytest.raises(DataError):
            read_file(root, name)
    with pytest.raises(DataError, match="too large for what it is"):
        read_file(root, "VOC2007/deep/b.jpg", limit=599)
    assert len(read_file(root, "VOC2007/deep/b.jpg", limit=600)) == 600


def test_a_device_is_not_read_for_ever(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").symlink_to("/dev/zero")
    with pytest.raises(DataError, match="is no file"):
        read_file(tmp_path, "a.jpg")


def test_a_zip_that_loses_bytes_is_noticed(tmp_path: Path) -> None:
    root = opened("zip", tmp_path)
    with (tmp_path / "x.zip").open("r+b") as file:
        file.truncate(10)
    with pytest.raises(DataError, match=r"x\.zip"):
        read_file(root, "VOC2007/a.xml")


def test_encrypted_and_strange_zips_are_refused(tmp_path: Path) -> None:
    for kind in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(tmp_path / "x.zip", "w", kind) as file:
            file.writestr("a.jpg", b"1" * 100)
        with pytest.raises(DataError, match="another way"):
            read_file(open_zip(tmp_path / "x.zip"), "a.jpg")
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
        file.writestr("a.jpg", b"1")
    whole = bytearray((tmp_path / "x.zip").read_bytes())
    whole[whole.index(b"PK\1\2") + 8] |= 1  # its flags in the directory
    whole[6] |= 1  # and in its own header
    (tmp_path / "x.zip").write_bytes(whole)
    with pytest.raises(DataError, match="encrypted"):
        read_file(open_zip(tmp_path / "x.zip"), "a.jpg")
