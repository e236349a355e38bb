"""Data in object storage are what they are on a disk: images, names, order, views, losses."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fastsiam.config import DataConfig
from fastsiam.pipelines import Store, build_eval_loader, open_store
from fastsiam.pipelines.store import ArchiveStore
from fastsiam.urls import place
from tests.clouds import upload, web_server
from tests.pipelines.cases import NEEDS, SMALL, build_at, equal
from tests.processes import Forked
from tests.sources import folder_members, imagenet_train_tar, tar

BY = [pytest.param(name, workers, marks=NEEDS.get(name, [])) for name, workers in (
    ("torchvision", 0), ("torchvision", 2), ("memory", 2), ("dali", 2))]  # fmt: skip


def opened(address: str, split: str = "train") -> Store:
    return open_store(place(address), "val" if split == "val" else "train")


def assert_same(one: Store, other: Store) -> None:
    images = range(len(one))
    assert len(one) == len(other) and one.classes == other.classes
    assert np.array_equal(one.labels, other.labels)
    assert np.array_equal(one.sizes(), other.sizes())
    assert [one.name(i) for i in images] == [other.name(i) for i in images]
    assert [bytes(d) for d in one.read_many(images)] == [bytes(other.read(i)) for i in images]


@pytest.mark.parametrize("split", ["train", "val"])
def test_shards_are_those_of_a_disk(split: str, data: str, shards: Path) -> None:
    here, there = opened(str(shards), split), opened(data, split)
    assert isinstance(there, ArchiveStore) and there.is_remote and not here.is_remote
    assert_same(there, here)
    known, told = there.dimensions(), here.dimensions()
    assert known is not None and told is not None and np.array_equal(known, told)


def test_a_tar_of_tars(cloud: str, images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "official"
    imagenet_train_tar(folder / "ILSVRC2012_img_train.tar", folder_members(images / "train"))
    assert_same(opened(upload(cloud, folder, "official")), opened(str(folder)))


def test_class_folders_in_a_tar_of_a_web_server(cloud: str, images: Path, tmp_path: Path) -> None:
    tar(tmp_path / "web" / "photos" / "photos.tar", folder_members(images))
    with web_server(tmp_path / "web") as address:
        for split in ("train", "val"):
            there = opened(f"{address}/photos/photos.tar", split)
            assert_same(there, opened(str(tmp_path / "web" / "photos" / "photos.tar"), split))


def test_braces_name_several_files(data: str, shards: Path) -> None:
    assert_same(opened(f"{data}/train-{{0000..0002}}.tar"), opened(str(shards)))
    both = f"{data}/{{train-0000,train-0001,train-0002,val-0000}}.tar"
    assert_same(opened(both, "val"), opened(str(shards), "val"))


@pytest.mark.parametrize(("name", "workers"), BY)
def test_views_are_those_of_a_disk(name: str, workers: int, data: str, shards: Path) -> None:
    """Two epochs, the second from its second step on."""
    made = []
    for address in (str(shards), data):
        loader = build_at(name, address, workers=workers)
        try:
            made.append([*loader.epoch(0), *loader.epoch(1, skip=1)])
        finally:
            loader.close()
    assert len(made[0]) == len(made[1]) == 5
    assert all(equal(one, other) for one, other in zip(*made, strict=True))


@pytest.mark.parametrize(("name", "workers"), BY[1:])
def test_central_crops_are_those_of_a_disk(
    name: str, workers: int, data: str, shards: Path
) -> None:
    made = []
    for address in (str(shards), data):
        config = DataConfig(data=address, pipeline=name, workers=workers)  # type: ignore[arg-type]
        loader = build_eval_loader(config, "val", SMALL, resize=16, batch=5)
        made.append([(batch.image, batch.label, batch.index) for batch in loader])
    for one, other in zip(*made, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_forked_process_reads_what_its_parent_has_read(data: str, shards: Path) -> None:
    """And its own child: obstore itself would wait for ever in both."""
    store, here = opened(data), opened(str(shards))
    store.ahead(range(24))
    expected = [bytes(here.read(i)) for i in range(24)]
    assert [bytes(store.read(i)) for i in range(3)] == expected[:3]
    child = os.fork()
    if not child:
        grandchild = os.fork()
        good = [bytes(d) for d in store.read_many(range(24))] == expected
        good = good and (not grandchild or not os.waitpid(grandchild, 0)[1])
        os._exit(not good)
    assert not os.waitpid(child, 0)[1]
    assert [bytes(store.read(i)) for i in range(3, 24)] == expected[3:]


def test_the_index_is_kept_and_made_anew_when_an_object_changes(
    cloud: str, data: str, shards: Path, tmp_path: Path
) -> None:
    first = opened(data)
    kept = list((tmp_path / "cache" / "fastsiam").glob("*.index"))
    assert len(kept) == 1 and opened(data).stamp() == first.stamp()
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "train-0001.tar").write_bytes((shards / "train-0002.tar").read_bytes())
    upload(cloud, changed, data.rpartition("/")[2])
    assert opened(data).stamp() != first.stamp()


def test_a_store_can_be_sent_to_another_process(data: str) -> None:
    store = opened(data)
    assert Forked(_reads_all, store).wait().returncode == 0


def _reads_all(store: Store) -> None:
    assert all(len(d) for d in store.read_many(range(len(store))))
