"""Classes and splits of tars by their members' names, and the order of the images."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastsiam.errors import DataError
from fastsiam.pipelines.store import ArchiveStore, FolderStore, open_store
from tests.sources import jpeg, tar


def test_deep_folders_are_listed_as_a_folder_is(tmp_path: Path) -> None:
    names = ["a/z.jpg", "a/sub/b.jpg", "a/sub/a.jpg", "a-b/c.jpg", "a/aa.jpg", "b/x/y/z.jpg"]
    for i, name in enumerate(names):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(i))
    members = [(name, jpeg(i)) for i, name in enumerate(names)]
    store = ArchiveStore([tar(tmp_path / "t.tar", members)])
    folder = FolderStore(tmp_path / "images")
    assert store.classes == folder.classes
    assert [bytes(store.read(i)) for i in range(6)] == [folder.read(i) for i in range(6)]


def test_val_and_test_are_kept_apart(tmp_path: Path) -> None:
    names = ["train/a/0.jpg", "val/a/1.jpg", "val/a/2.jpg", "test/a/3.jpg", "extra/a/4.jpg"]
    path = tar(tmp_path / "all.tar", [(name, jpeg(i)) for i, name in enumerate(names)])
    train, val = open_store(path, "train"), open_store(path, "val")
    assert [bytes(train.read(0))] == [jpeg(0)] and train.classes == ("a",)
    assert [bytes(val.read(i)) for i in range(len(val))] == [jpeg(1), jpeg(2)]


def test_odd_class_files(tmp_path: Path) -> None:
    path = tar(tmp_path / "t.tar", [("0.jpg", jpeg(0)), ("0.cls", "²".encode())])
    assert ArchiveStore([path]).classes == ("²",)
    tar(path, [("0.jpg", jpeg(0)), ("0.cls", b"99999999999")])
    with pytest.raises(DataError, match="which is no number of a class"):
        ArchiveStore([path])


def test_webdataset_shards(tmp_path: Path) -> None:
    for shard in range(2):
        members: list[tuple[str, bytes]] = []
        for i in range(3):
            key = f"{shard}{i}.v1"
            members += [(f"{key}.jpg", jpeg(i)), (f"{key.split('.')[0]}.cls", str(10 * i).encode())]
        tar(tmp_path / f"train-{shard:06d}.tar", members)
    tar(tmp_path / "val-000000.tar", [("0.jpg", jpeg(0)), ("0.cls", b"5"), ("0.json", b"{}")])
    store = open_store(tmp_path, "train")
    assert store.labels.tolist() == [0, 0, 10, 10, 20, 20]
    assert store.classes == tuple(map(str, range(21)))
    assert open_store(tmp_path, "val").labels.tolist() == [5]
    tar(tmp_path / "val-000000.tar", [("0.jpg", jpeg(0)), ("0.cls", b"5"), ("1.jpg", jpeg(1))])
    with pytest.raises(DataError, match=r"1\.jpg has no \.cls file"):
        open_store(tmp_path, "val")


def test_splits_within_a_tar(tmp_path: Path) -> None:
    names = ["data/train/a/0.jpg", "data/train/b/1.jpg", "data/val/a/2.jpg"]
    path = tar(tmp_path / "all.tar", [(name, jpeg(i)) for i, name in enumerate(names)])
    train, val = open_store(path, "train"), open_store(tmp_path, "val")
    assert train.classes == val.classes == ("a", "b")
    assert train.labels.tolist() == [0, 1] and val.labels.tolist() == [0]
    assert bytes(val.read(0)) == jpeg(2)


def test_images_beside_folders(tmp_path: Path) -> None:
    path = tar(tmp_path / "t.tar", [("a/0.jpg", jpeg(0)), ("1.jpg", jpeg(1))])
    with pytest.raises(DataError, match=r"both by themselves \(1.jpg\) and in folders \(a/\)"):
        ArchiveStore([path])
