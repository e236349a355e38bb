"""Files of a data set: by name alone, in folders, tars and zips."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest

from fastsiam.errors import DataError
from fastsiam.evaluate.detection.archives import Files, Tar, Tree, Zip
from tests.sources import tar_bytes

NAMES = {"VOC2007/a.xml": b"first", "VOC2007/deep/b.jpg": b"second" * 100, "names.txt": b"x"}


def opened(kind: str, folder: Path) -> Files:
    """Write the files in one of the three ways, and open them."""
    if kind == "tree":
        for name, content in NAMES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return Tree(folder)
    path = folder / f"x.{kind}"
    if kind == "tar":
        path.write_bytes(tar_bytes([(f"./devkit/{name}", data) for name, data in NAMES.items()]))
        return Tar(path, ("VOC2007",))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in NAMES.items():
            file.writestr(name, content)
    return Zip(path)


@pytest.mark.parametrize("kind", ["tree", "tar", "zip"])
def test_files_are_found_by_their_names(kind: str, tmp_path: Path) -> None:
    files = opened(kind, tmp_path)
    for name, content in NAMES.items():
        assert name in files and files.read(name) == content
    for name in ("VOC2007", "VOC2007/c.xml", "nowhere/a.xml", "a.xml"):
        assert name not in files or name == "VOC2007"
        with pytest.raises(DataError):
            files.read(name)
    with pytest.raises(DataError, match="too large for what it is"):
        files.read("VOC2007/deep/b.jpg", limit=599)
    assert len(files.read("VOC2007/deep/b.jpg", limit=600)) == 600


def test_a_device_is_not_read_for_ever(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").symlink_to("/dev/zero")
    with pytest.raises(DataError, match="is no file"):
        Tree(tmp_path).read("a.jpg")


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive_that_loses_bytes_is_noticed(kind: str, tmp_path: Path) -> None:
    files = opened(kind, tmp_path)
    path = next(tmp_path.iterdir())
    with path.open("r+b") as file:
        file.truncate(10)
    with pytest.raises(DataError, match=path.name):
        files.read("VOC2007/a.xml")


def test_names_that_lead_elsewhere_stay_within(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(tar_bytes([("../../VOC2007/../a.xml", b"1")]))
    files = Tar(tmp_path / "x.tar", ("VOC2007",))
    assert "a.xml" in files or "VOC2007/a.xml" in files
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
        file.writestr("../../etc/a.xml", b"1")
    assert "etc/a.xml" in Zip(tmp_path / "x.zip")


def test_links_in_tars_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        link = tarfile.TarInfo("VOC2007/JPEGImages/000001.jpg")
        link.type, link.linkname = tarfile.LNKTYPE, "/etc/passwd"
        tar.addfile(link)
    with pytest.raises(DataError, match="is a link to"):
        Tar(tmp_path / "x.tar", ("VOC2007",))


def test_encrypted_and_strange_zips_are_refused(tmp_path: Path) -> None:
    for kind in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(tmp_path / "x.zip", "w", kind) as file:
            file.writestr("a.jpg", b"1" * 100)
        with pytest.raises(DataError, match="another way"):
            Zip(tmp_path / "x.zip").read("a.jpg")
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
        file.writestr("a.jpg", b"1")
    whole = bytearray((tmp_path / "x.zip").read_bytes())
    whole[whole.index(b"PK\1\2") + 8] |= 1  # its flags in the directory
    whole[6] |= 1  # and in its own header
    (tmp_path / "x.zip").write_bytes(whole)
    with pytest.raises(DataError, match="encrypted"):
        Zip(tmp_path / "x.zip").read("a.jpg")
