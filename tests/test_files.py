"""Files are written completely or not at all, and errors say in one line what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fastsiam.bench.config import GpuConfig, HeadlineConfig
from fastsiam.bench.gpu import run as run_gpu
from fastsiam.bench.headline import run as run_headline
from fastsiam.bench.report import write_report
from fastsiam.errors import DataError, FastSiamError
from fastsiam.files import atomic_write, atomic_write_for_user, os_errors_as
from fastsiam.run.records import check_targets
from fastsiam.run.run_folder import create_folder
from tests.conversions import run
from tests.disks import small_disk


def test_atomic_write_replaces_file_on_success(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    for text in ("first", "second"):
        with atomic_write(path) as temporary:
            temporary.write_text(text)
            assert not path.exists() or path.read_text() == "first"
        assert path.read_text() == text
    assert list(path.parent.iterdir()) == [path]


def test_failed_atomic_write_keeps_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    for error in (KeyboardInterrupt("mine"), RuntimeError("mine")):
        with pytest.raises(type(error), match=r"^mine$"), atomic_write(path) as temporary:
            temporary.write_text("half")
            raise error
        assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_concurrent_atomic_writes_do_not_interfere(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_write(path, by_many=True) as one:
        one.write_text("one, which is longer")
        with atomic_write(path, by_many=True) as other:
            other.write_text("other")
        assert path.read_text() == "other"
    assert path.read_text() == "one, which is longer" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "No space left on device; free some space and try again"),
        (errno.EACCES, "Permission denied; check the permissions of this user"),
        (errno.EIO, "Input/output error; check the disk, or the connection to it"),
        (errno.EMFILE, "Too many open files; allow more open files (ulimit -n)"),
        (errno.ENODEV, "No such device"),
    ],
)
def test_os_error_becomes_data_error_with_advice(number: int, advice: str) -> None:
    with (
        pytest.raises(DataError) as caught,
        os_errors_as(DataError, "cannot read it"),
    ):
        raise OSError(number, os.strerror(number), "/some/path")
    assert str(caught.value) == f"cannot read it: {advice}"
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    "write",
    [
        lambda path, _: create_folder(path).__enter__(),
        lambda path, _: atomic_write_for_user(path).__enter__(),
        lambda path, _: check_targets(path),
        lambda path, _: run_headline(HeadlineConfig(out=str(path))),
        lambda path, _: run_gpu(GpuConfig(out=str(path), device="cpu")),
        lambda path, _: write_report([], path),
        lambda path, images: run("folder", images, path),
    ],
)
def test_writing_to_remote_address_is_rejected(
    write: Callable[[Path, Path], object],
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a local folder ``s3:`` would be created."""
    monkeypatch.chdir(tmp_path)
    message = r"^cannot write to s3://bucket/x(/headline\.json)?: .* upload the results"
    with pytest.raises(FastSiamError, match=message):
        write(Path("s3://bucket/x"), images)
    assert not Path("s3:").exists()


def test_library_errors_on_full_disk_are_translated(tmp_path: Path) -> None:
    """torch's and safetensors' errors have no errno: the system's error is shown instead."""
    content = {"weight": torch.zeros(10**6)}
    with small_disk(tmp_path / "disk", 2) as disk:
        (disk / "file").write_text("old")
        for save in (torch.save, save_file):
            with (
                pytest.raises(
                    DataError, match=r"^cannot write it: No space left .*; free some space"
                ),
                os_errors_as(DataError, "cannot write it"),
                atomic_write(disk / "file") as temporary,
            ):
                save(content, temporary)
        assert [(path.name, path.read_text()) for path in disk.iterdir()] == [("file", "old")]


def test_atomic_write_follows_symlink(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "file")
    with atomic_write(tmp_path / "link") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "file").read_text() == "new"
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["file"]


def test_atomic_write_to_anonymous_pipe() -> None:
    """Such as /dev/stdout of a command that is piped into another."""
    read_end, write_end = os.pipe()
    with atomic_write(Path(f"/dev/fd/{write_end}")) as temporary:
        temporary.write_text("through")
    os.close(write_end)
    with open(read_end) as file:
        assert file.read() == "through"
