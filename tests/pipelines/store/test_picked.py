"""Images by other positions: the same images, whatever store they are of and whoever loads them."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fastsiam.config import ConvertConfig, DataConfig
from fastsiam.pipelines import build_loader, open_store
from fastsiam.pipelines.convert.command import convert_data
from fastsiam.pipelines.store import (
    ArchiveStore,
    BetonStore,
    CifarStore,
    FolderStore,
    Store,
    picked,
)
from tests.pipelines.cases import SMALL, WITH_IMAGES, joined, levels, readable
from tests.sources import cifar, folder_members, tar

WAYS = [
    *(pytest.param(*p.values, True, marks=p.marks) for p in WITH_IMAGES),
    pytest.param("ffcv", False, marks=pytest.mark.ffcv),
]
"""Pipelines, and of FFCV its two ways to read a file."""
PIL: dict[str, Any] = {"pipeline": "torchvision"}
POSITIONS = np.array([23, 0, 0, 7, 11, 2])


def stores(images: Path) -> dict[type[Store], Store]:
    """Open the images in every form."""
    packed = tar(images.parent / "train.tar", folder_members(images / "train"))
    archive = cifar(images.parent / "cifar-10-python.tar.gz")
    converted = images.parent / "converted"
    convert_data("folder", ConvertConfig(source=str(images), out=str(converted)))
    found = (open_store(path, "train") for path in (images, packed, archive, converted))
    return {type(store): store for store in found}


def test_a_picked_store_is_the_store_elsewhere(images: Path) -> None:
    found = stores(images)
    assert set(found) == {FolderStore, ArchiveStore, CifarStore, BetonStore}
    for store in found.values():
        own = picked(store, POSITIONS)
        assert len(own) == 6 and str(own) == str(store) and own.classes == store.classes
        assert isinstance(own, BetonStore) == isinstance(store, BetonStore)
        sizes, known = store.dimensions(), own.dimensions()
        assert (sizes is None) == (known is None)
        for i, position in enumerate(POSITIONS.tolist()):
            assert bytes(own.read(i)) == bytes(store.read(position))
            assert own.name(i) == store.name(position) and own.where(i) == store.where(position)
            assert own.labels[i] == store.labels[position]
            assert own.sizes()[i] == store.sizes()[position]
            assert own.raw_size(i) == store.raw_size(position)
            assert own.decode(i).tobytes() == store.decode(position).tobytes()
            assert own.is_intact(i, store.read(position))
            if sizes is not None and known is not None:
                assert known[i].tolist() == sizes[position].tolist()
        again = picked(own, np.array([5, 3]))
        assert again.name(0) == store.name(2) and bytes(again.read(1)) == bytes(store.read(7))
        assert picked(store, np.arange(len(store))) is store


def test_checksums_go_with_their_images(images: Path) -> None:
    store = stores(images)[BetonStore]
    own = picked(store, POSITIONS)
    assert isinstance(own, BetonStore) and own.crc is not None
    assert [zlib.crc32(own.read(i)) for i in range(6)] == own.crc.tolist()
    assert not own.is_intact(0, store.read(0))


@pytest.mark.parametrize(("name", "os_cache"), WAYS)
def test_a_replaced_image_changes_nothing_else(name: str, os_cache: bool, images: Path) -> None:
    """All others are shown as ever; in its place another is, by the draws of the place."""
    data = DataConfig(data=str(readable(name, images)), pipeline=name, workers=0)  # type: ignore[arg-type]
    data = replace(data, os_cache=os_cache)
    positions = np.arange(24)
    positions[9] = 10
    store, by_pil = picked(open_store(data.root, "train"), positions), replace(data, **PIL)
    whole = build_loader(data, SMALL, batch=8)
    changed = build_loader(data, SMALL, batch=8, store=store)
    pil = build_loader(by_pil, SMALL, batch=8, store=store)
    seen = 0
    for one, other, third in zip(*(x.epoch(1, skip=1) for x in (whole, changed, pil)), strict=True):
        assert torch.equal(one.index, other.index) and torch.equal(one.label, other.label)
        own = one.index == 9
        seen += int(own.sum())
        for view, now, expected in zip(one.views, other.views, third.views, strict=True):
            assert torch.equal(view[~own], now[~own])
            assert not own.any() or not torch.equal(view[own], now[own])
            assert levels(now, expected, SMALL).max() < 1e-3
    assert seen == 1, "the image is in none of the batches that are compared"
    for loader in (whole, changed, pil):
        loader.close()


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_ranks_share_the_batches_of_a_picked_store(name: str, images: Path) -> None:
    data = DataConfig(data=str(readable(name, images)), pipeline=name, workers=0)  # type: ignore[arg-type]
    positions = np.arange(24)
    positions[3] = 4
    store = picked(open_store(data.root, "train"), positions)
    alone = build_loader(data, SMALL, batch=8, store=store)
    two = [build_loader(data, SMALL, batch=8, store=store, rank=r, world=2) for r in range(2)]
    for whole, *parts in zip(alone.epoch(0), *(loader.epoch(0) for loader in two), strict=True):
        together = joined(parts)
        assert torch.equal(together.index, whole.index)
        assert torch.equal(together.view1, whole.view1)
    for loader in (alone, *two):
        loader.close()


@pytest.mark.ffcv
def test_ffcv_reads_the_pages_of_the_images_that_are_picked(tmp_path: Path) -> None:
    (tmp_path / "images" / "noise").mkdir(parents=True)
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 256, (1500, 1500, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"images/noise/{number}.jpg", quality=100)
    converted = readable("ffcv", tmp_path / "images")
    store = open_store(converted, "train")
    assert isinstance(store, BetonStore) and len(set((store.start // store.page_size).tolist())) > 1
    last = picked(store, np.array([3, 2]))
    data = DataConfig(data=str(converted), pipeline="ffcv", workers=0, os_cache=False)
    loaders = [build_loader(data, SMALL, batch=2, store=last)]
    loaders.append(build_loader(replace(data, **PIL), SMALL, batch=2, store=last))
    ours, expected = (next(iter(loader.epoch(0))) for loader in loaders)
    assert levels(ours.view1, expected.view1, SMALL).max() < 1e-3
    for loader in loaders:
        loader.close()
