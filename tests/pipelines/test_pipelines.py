"""What holds for every pipeline: same images, same order, same views, resumable at any step.

The torchvision pipeline is the measure; ``test_parity`` holds the pixels of every kind of image to
it, and this module the rest: ranks, steps, subsets, digests, endings of epochs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.pipelines import Order, build_eval_loader, build_loader, open_split
from fastsiam.pipelines.backends import BACKENDS
from fastsiam.pipelines.loaders import CropLoader
from fastsiam.pipelines.store import BetonStore, FolderStore, open_store, picked
from fastsiam.pipelines.workers import count
from fastsiam.views import draws
from fastsiam.views.batch import Batch
from fastsiam.views.digest import batch_digest, sum_digests
from tests.conftest import write_images
from tests.pipelines.cases import (
    PIPELINES,
    SMALL,
    WITH_IMAGES,
    equal,
    first,
    joined,
    levels,
    readable,
)
from tests.pipelines.readers import GRAPH, NEAR, PAGES, READERS, opened
from tests.views.cases import UNEQUAL


def batches(name: str, root: Path, epoch: int = 1, *, skip: int = 0, **how: Any) -> list[Batch]:
    """Return an epoch's batches; of noise, whose epochs are long, the last three."""
    loader = opened(name, root, **how)
    try:
        start = loader.steps - 3 if name == "synthetic" else 0
        return list(loader.epoch(epoch, skip=start + skip))
    finally:
        loader.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 images of three classes."""
    return write_images(tmp_path_factory.mktemp("pipelines") / "images")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Callable[..., list[Batch]]:
    """Returns a pipeline's batches of an epoch by one rank, which are made once."""
    made: dict[tuple[Any, ...], list[Batch]] = {}

    def of(name: str, epoch: int = 1, **how: Any) -> list[Batch]:
        key = (name, epoch, *sorted(how.items()))
        if key not in made:
            made[key] = batches(name, folder, epoch, **how)
        return made[key]

    return of


def digests(root: Path, epoch: int = 1, augment: AugmentConfig = SMALL) -> list[int]:
    """Return what the digests should be, from the definition and PIL's sizes."""
    store = FolderStore(root)
    order = Order(images=len(store), batch=8, seed=0)
    found = []
    for step in range(order.steps):
        index = order.indices(epoch, step)
        size = np.array([store.decode(i).size[::-1] for i in index.tolist()])
        params = draws.draw_views(augment, seed=0, epoch=epoch, index=index, size=size)
        found.append(batch_digest(params, index, epoch=epoch, place=8 * step))
    return found


def assert_near(one: list[Batch], other: list[Batch], within: float = 1e-3) -> None:
    """Check that batches have the same images, labels and draws, and nearly the same views."""
    for ours, theirs in zip(one, other, strict=True):
        assert torch.equal(ours.index, theirs.index) and torch.equal(ours.label, theirs.label)
        assert ours.seen == theirs.seen
        for a, b in zip(ours.views, theirs.views, strict=True):
            assert levels(a, b, SMALL).max() < within


@pytest.mark.parametrize("name", READERS)
def test_an_epoch_is_torchvisions(
    name: str, folder: Path, whole: Callable[..., list[Batch]]
) -> None:
    """Every image once, with its label, its draws and two views of its own."""
    for epoch in (0, 1):
        found = whole(name, epoch)
        assert_near(found, whole("torchvision", epoch), NEAR.get(name, 1e-3))
        assert [batch.seen for batch in found] == digests(folder, epoch)
        index = torch.cat([batch.index for batch in found])
        assert sorted(index.tolist()) == list(range(24))
        for batch in found:
            assert torch.equal(batch.label, batch.index // 8)
            assert not torch.equal(batch.view1, batch.view2)
    one, other, seeded = whole(name, 0)[0], whole(name, 1)[0], whole(name, 0, seed=1)[0]
    for a, b in ((one, other), (one, seeded), (other, seeded)):
        assert not torch.equal(a.index, b.index) and not torch.equal(a.view1, b.view1)


@pytest.mark.parametrize("name", [*PIPELINES, READERS[-2]])
def test_batches_have_the_promised_form(name: str, folder: Path) -> None:
    for augment, dtype, sides in (
        (SMALL, torch.float32, [16, 16]),
        (UNEQUAL, torch.bfloat16, [24, 12, 24, 12, 12]),
    ):
        loader = opened(name, folder, augment=augment, dtype=dtype)
        batch = first(loader)
        assert loader.steps == loader.images // 8 and loader.source
        assert [view.shape for view in batch.views] == [(8, 3, side, side) for side in sides]
        for view in batch.views:
            assert view.dtype == dtype
            assert view.is_contiguous(memory_format=torch.channels_last)
        assert batch.index.dtype == batch.label.dtype == torch.int64
        assert batch.index.shape == batch.label.shape == (8,)
        assert not torch.equal(batch.views[-2], batch.views[-1])
    assert isinstance(loader, CropLoader) == (name == GRAPH or BACKENDS[name].crops)  # type: ignore[index]
    if isinstance(loader, CropLoader):
        loader = opened(name, folder, augment=UNEQUAL)
        index, params, crops = next(iter(loader.crops(0)))  # type: ignore[attr-defined]
        assert [own.shape for own in crops] == [(2, 8, 24, 24, 3), (3, 8, 12, 12, 3)]
        assert params.flip.shape == (5, 8) and all(own.dtype == torch.uint8 for own in crops)
        assert first(loader).index.tolist() == index.tolist()
    if name != "synthetic":
        seen = [batch.seen for batch in batches(name, folder, augment=UNEQUAL)]
        assert seen == digests(folder, augment=UNEQUAL) != digests(folder)


@pytest.mark.parametrize(
    ("world", "skip", "workers", "left"), [(1, 2, 2, 0), (2, 1, 2, 2), (4, 0, 0, 1)]
)
@pytest.mark.parametrize("name", [*PIPELINES, *READERS[-2:]])
def test_ranks_share_an_epoch_from_any_step_on(
    name: str,
    world: int,
    skip: int,
    workers: int,
    left: int,
    folder: Path,
    whole: Callable[..., list[Batch]],
) -> None:
    """To the last bit: the same batches, whatever was begun and left before."""
    expected = whole(name, batch=12)
    loaders = [
        opened(name, folder, batch=12, workers=workers, rank=rank, world=world)
        for rank in range(world)
    ]
    start = loaders[0].steps - 3 if name == "synthetic" else 0
    for loader in loaders:
        for _ in range(left):
            next(iter(loader.epoch(5)))
    shares = [list(loader.epoch(1, skip=start + skip)) for loader in loaders]
    for loader in loaders:
        loader.close()
    for batch, *parts in zip(expected[skip:], *shares, strict=True):
        assert equal(joined(parts), batch) or (name == "synthetic" and world > 1)
        assert torch.equal(joined(parts).index, batch.index)
        assert sum_digests(*(part.seen for part in parts)) == batch.seen
        assert len({batch.seen, *(part.seen for part in parts)}) == world + (world > 1)


@pytest.mark.parametrize("name", READERS)
def test_a_subset_is_shown_as_the_whole_would(name: str, folder: Path) -> None:
    chosen = np.array([0, 3, 4, 9, 11, 12, 17, 20, 22, 23])
    own: dict[str, Any] = {"batch": 4, "chosen": chosen}
    for epoch in range(2):
        found = batches(name, folder, epoch, **own)
        assert_near(found, batches("torchvision", folder, epoch, **own), NEAR.get(name, 1e-3))
        shown = [index for batch in found for index in batch.index.tolist()]
        assert len(set(shown)) == 8 and set(shown) <= set(chosen.tolist())


@pytest.mark.parametrize("name", READERS)
def test_a_replaced_image_changes_nothing_else(
    name: str, folder: Path, whole: Callable[..., list[Batch]]
) -> None:
    """All others are shown as ever; in its place another is, by the draws of the place."""
    positions = np.arange(24)
    positions[9] = 10
    root = readable("ffcv" if name == PAGES else name, folder)
    store = picked(open_store(root, "train"), positions)
    found = batches(name, folder, store=store)
    assert_near(found, batches("torchvision", folder, store=store), NEAR.get(name, 1e-3))
    shares = [batches(name, folder, store=store, rank=rank, world=2) for rank in range(2)]
    for one, other, *parts in zip(whole(name), found, *shares, strict=True):
        assert equal(joined(parts), other) and torch.equal(one.label, other.label)
        own = one.index == 9
        for view, now in zip(one.views, other.views, strict=True):
            assert torch.equal(view[~own], now[~own])
            assert not own.any() or not torch.equal(view[own], now[own])


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
    ours, theirs = (batches(n, converted, batch=2, store=last) for n in (PAGES, "torchvision"))
    assert_near(ours, theirs)


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_every_pipeline_leaves_the_same_images_out(name: str, folder: Path) -> None:
    data = DataConfig(data=str(readable(name, folder)), pipeline=name, workers=0, holdout="25%")  # type: ignore[arg-type]
    loader = build_loader(data, SMALL, batch=9)
    assert (loader.images, loader.steps) == (18, 2)
    index = np.sort(np.concatenate([batch.index.numpy() for batch in loader.epoch(0)]))
    np.testing.assert_array_equal(index, np.arange(18))  # rows of what a method keeps of each
    loader.close()
    whole = DataConfig(data=str(folder), holdout="25%")
    for split in ("train", "val"):
        crops, store = build_eval_loader(data, split, SMALL, resize=16), open_split(whole, split)
        assert crops.names() == [store.name(i) for i in range(len(store))]
        for batch in crops:
            assert torch.equal(batch.label, torch.tensor(store.labels)[batch.index])


@pytest.mark.parametrize("name", READERS)
def test_one_epoch_of_a_loader_at_a_time(name: str, folder: Path) -> None:
    """Another loader and an evaluation may be under way; the epoch that was displaced says so."""
    one, other = (opened(name, folder, workers=2) for _ in range(2))
    own = "ffcv" if name == PAGES else "dali" if name == GRAPH else name
    data = DataConfig(data=str(readable(own, folder)), workers=2, pipeline=own)  # type: ignore[arg-type]
    central = build_eval_loader(data, "train", SMALL, resize=16, batch=8)
    for a, b, c in zip(one.epoch(0), other.epoch(0), central, strict=True):
        assert equal(a, b) and c.image.shape == (8, 3, 16, 16)
    expected = list(other.epoch(1))
    displaced, later = one.epoch(0), one.epoch(1)
    next(displaced)
    found = [next(later)]
    with pytest.raises(RuntimeError, match="another epoch of this loader was begun"):
        next(displaced)
    assert all(map(equal, [*found, *later], expected))
    for loader in (one, other):
        loader.close()
        loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(one.epoch(0))


def test_worker_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert [count(workers) for workers in (-1, 0, 5)] == [3, 0, 5]
