"""What the operating system refuses is one line that names the path, whatever the store."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fastsiam.errors import DataError
from fastsiam.pipelines.store import (
    ArchiveStore,
    BetonStore,
    CifarStore,
    FolderStore,
    Store,
    beton_files,
    open_store,
)
from fastsiam.pipelines.store.imagenet import DEVKIT
from tests.conftest import write_images
from tests.conversions import failing, run
from tests.sources import cifar, imagenet, jpeg, tar

GONE = r"cannot read .*: No such file or directory; check the path$"


def test_a_path_that_the_system_refuses(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^cannot open the data at .*: File name too long; choose"):
        open_store(tmp_path / ("x" * 300), "train")


@pytest.mark.parametrize("method", ["exists", "is_file", "iterdir", "glob"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_folder_that_cannot_be_looked_into(
    method: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path / "train", classes=1, each=1)
    monkeypatch.setattr(Path, method, failing(number))
    with pytest.raises(DataError, match=f": {os.strerror(number)}; ") as caught:
        open_store(tmp_path, "train")
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_files_of_a_split_that_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "glob", failing(errno.EIO))
    with pytest.raises(DataError, match=r"^cannot list .*: Input/output error; check the disk"):
        beton_files(tmp_path, "train")


def open_cifar(path: Path) -> Store:
    return CifarStore(path, "train")


def open_tar(path: Path) -> Store:
    return ArchiveStore([path])


@pytest.mark.parametrize("opened", [open_tar, BetonStore, open_cifar])
@pytest.mark.parametrize("kind", ["missing", "folder", "below a file"])
def test_no_file_to_open(opened: Callable[[Path], Store], kind: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    if kind == "folder":
        path.mkdir()
    if kind == "below a file":
        path.write_text("")
        path /= "data"
    with pytest.raises(DataError, match=r"cannot read|is no whole CIFAR archive") as caught:
        opened(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_stamps_of_files_that_are_gone(tmp_path: Path) -> None:
    path = tar(tmp_path / "t.tar", [("a/0.jpg", jpeg(0))])
    archive = ArchiveStore([path])
    write_images(tmp_path / "images", classes=1, each=1)
    (converted,) = run("folder", tmp_path / "images", tmp_path / "out")
    beton = BetonStore(converted.path)
    path.unlink()
    converted.path.unlink()
    for store in (archive, beton):
        with pytest.raises(DataError, match=GONE):
            store.stamp()


def test_an_image_in_whose_place_a_folder_is(tmp_path: Path) -> None:
    write_images(tmp_path, classes=1, each=1)
    store = FolderStore(tmp_path)
    store.path(0).unlink()
    store.path(0).mkdir()
    with pytest.raises(DataError, match=r"^cannot read .*000\.jpg: Is a directory; check the path"):
        store.read(0)


def test_archives_that_cannot_be_read_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cifar(tmp_path / "cifar-10-python.tar.gz")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match="is no whole CIFAR archive"):
        open_store(tmp_path, "train")


def test_a_list_of_labels_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imagenet(tmp_path)
    (tmp_path / f"{DEVKIT}.tar.gz").unlink()
    (tmp_path / "LOC_val_solution.csv").write_text("")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", failing(errno.EACCES))
        with pytest.raises(
            DataError, match=r"cannot read the list of labels .*LOC_val_sol.*denied"
        ):
            open_store(tmp_path, "val")
    (tmp_path / "LOC_val_solution.csv").unlink()
    (tmp_path / DEVKIT / "data").mkdir(parents=True)
    with pytest.raises(DataError, match=r"is no devkit of ILSVRC 2012 .*No such file"):
        open_store(tmp_path, "val")


def test_a_user_without_a_home_reads_tars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tar(tmp_path / "t.tar", [("a/0.jpg", jpeg(0))])
    (tmp_path / ".t.fastsiam-index").mkdir()

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert len(ArchiveStore([path])) == 1
