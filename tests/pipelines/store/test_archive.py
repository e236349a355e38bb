"""Tars in place: the same images in the same order as from a folder."""

from __future__ import annotations

import gzip
import pickle
import resource
import tarfile
from pathlib import Path

import numpy as np
import pytest

from fastsiam.errors import DataError
from fastsiam.pipelines.store import ArchiveStore, FolderStore, open_store
from fastsiam.pipelines.store.probe import Flags
from tests.conftest import write_images
from tests.processes import Forked
from tests.sources import (
    encoded,
    folder_members,
    imagenet_train_tar,
    jpeg,
    picture,
    rotated_jpeg,
    tar,
    tar_bytes,
)


def same(store: ArchiveStore, folder: FolderStore) -> None:
    assert store.classes == folder.classes
    np.testing.assert_array_equal(store.labels, folder.labels)
    np.testing.assert_array_equal(store.sizes(), folder.sizes())
    for i in range(len(folder)):
        assert bytes(store.read(i)) == folder.read(i)
        assert store.name(i) == folder.name(i)
        assert store.decode(i).size == folder.decode(i).size


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_a_tar_equals_its_folder(kind: int, tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", each=5)
    members = folder_members(images)
    path = tar(tmp_path / "some.tar", [("./top/" + n, d) for n, d in members[::-1]], kind=kind)
    same(ArchiveStore([path]), FolderStore(images))


def test_a_tar_of_tars_equals_its_folder(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", each=5)
    path = imagenet_train_tar(tmp_path / "train.tar", folder_members(images))
    same(ArchiveStore([path]), FolderStore(images))


def test_real_images_in_a_tar_of_tars(real_images: Path, tmp_path: Path) -> None:
    path = imagenet_train_tar(tmp_path / "train.tar", folder_members(real_images))
    same(ArchiveStore([path]), FolderStore(real_images))


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


@pytest.mark.parametrize("first", ["a.jpg", "z.jpg"])
def test_images_beside_inner_tars_are_refused(first: str, tmp_path: Path) -> None:
    members = [(first, jpeg(0)), ("n01440764.tar", tar_bytes([("0.jpg", jpeg(1))]))]
    with pytest.raises(DataError, match="holds both images and tars"):
        ArchiveStore([tar(tmp_path / "t.tar", sorted(members))])


def test_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    for i in range(80):
        tar(tmp_path / f"train-{i:04d}.tar", [(f"{i}.jpg", jpeg(0)), (f"{i}.cls", b"0")])
    done = Forked(count_with_few_files, tmp_path).wait()
    assert done.stdout == "80\n", done.stderr


def count_with_few_files(folder: Path) -> None:
    """Print how many images there are, where 40 files may be open at once."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 400))
    print(len(open_store(folder, "train")))


def test_gzip_in_several_members(tmp_path: Path) -> None:
    data = jpeg(0)
    packed = gzip.compress(data[:100]) + gzip.compress(data[100:])
    store = ArchiveStore([tar(tmp_path / "t.tar", [("a/0.jpg", packed)])])
    assert bytes(store.read(0)) == data


def test_a_store_travels_to_another_process(tmp_path: Path) -> None:
    path = tar(tmp_path / "t.tar", [("a/0.jpg", jpeg(0))])
    assert bytes(pickle.loads(pickle.dumps(ArchiveStore([path]))).read(0)) == jpeg(0)
