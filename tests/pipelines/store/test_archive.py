"""Tars in place: odd members and names; what every store promises is in test_store."""

from __future__ import annotations

import gzip
import resource
import tarfile
from pathlib import Path

import pytest

from fastsiam.errors import DataError
from fastsiam.pipelines.store import ArchiveStore, open_store
from fastsiam.pipelines.store.probe import Flags
from tests.processes import Forked
from tests.sources import (
    encoded,
    jpeg,
    picture,
    rotated_jpeg,
    tar,
)


def test_odd_members_are_flagged(tmp_path: Path) -> None:
    members = {
        "a-plain.JPEG": (jpeg(0), 0),
        "b-gzip.JPEG": (gzip.compress(jpeg(1)), Flags.GZIP),
        "c-png.JPEG": (encoded(picture(2), "PNG"), Flags.NOT_JPEG),
        "d-cmyk.JPEG": (encoded(picture(3).convert("CMYK")), Flags.CMYK),
        "e-exif.JPEG": (rotated_jpeg(4), Flags.ROTATED),
        "f-bad.JPEG": (b"nothing", Flags.BAD),
        "g-empty.JPEG": (b"", Flags.BAD),
    }
    path = tar(tmp_path / "t.tar", [(f"x/{name}", data) for name, (data, _) in members.items()])
    store = ArchiveStore([path])
    assert store.flags.tolist() == [flags for _, flags in members.values()]
    assert store.width.tolist() == [40] * 5 + [0, 0]
    assert bytes(store.read(1)) == jpeg(1)
    for i in range(5):
        assert store.decode(i).size == (40, 30)
    with pytest.raises(DataError, match=r"cannot decode x/f-bad\.JPEG \(in .*t\.tar, 7 bytes at"):
        store.decode(5)


def test_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    for i in range(80):
        tar(tmp_path / f"train-{i:04d}.tar", [(f"{i}.jpg", jpeg(0)), (f"{i}.cls", b"0")])
    done = Forked(count_with_few_files, tmp_path).wait()
    assert done.stdout == "80\n", done.stderr


def count_with_few_files(folder: Path) -> None:
    """Print how many images there are, where 40 files may be open at once."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 400))
    print(len(open_store(folder, "train")))


def test_long_names(tmp_path: Path) -> None:
    name = "class/" + "long" * 60 + ".jpg"
    for number, kind in enumerate((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        store = ArchiveStore([tar(tmp_path / f"{number}.tar", [(name, jpeg(0))], kind=kind)])
        assert store.classes == ("class",) and bytes(store.read(0)) == jpeg(0)
        assert store.name(0).startswith("class/longlong")


def test_names_are_those_of_a_folder(tmp_path: Path) -> None:
    """Hidden members are skipped, and parts that lead upwards or to a root are left out."""
    names = ["a/0.jpg", ".checkpoints/0.jpg", "a/._0.jpg", "b/.x/1.jpg", "/../b/./../2.jpg"]
    store = ArchiveStore([tar(tmp_path / "t.tar", [(name, jpeg(0)) for name in names])])
    assert [store.name(i) for i in range(len(store))] == ["a/0.jpg", "b/2.jpg"]
