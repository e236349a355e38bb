"""Every pipeline has the same images, order and views, and can be resumed at any step.

The torchvision pipeline is the reference. ``test_parity`` compares the pixels of every kind of
image. This module tests ranks, steps, subsets, digests and one epoch at a time.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fastsiam.config import AugmentConfig
from fastsiam.errors import DataError
from fastsiam.pipelines import Order, Store
from fastsiam.pipelines.backends import BACKENDS
from fastsiam.pipelines.loaders import CropLoader
from fastsiam.pipelines.store import BetonStore, open_store, select_images
from fastsiam.pipelines.workers import count
from fastsiam.views import draws
from fastsiam.views.batch import Batch
from fastsiam.views.digest import batch_digest, sum_digests
from tests.conftest import write_images
from tests.pipelines.cases import (
    GRAPH,
    PAGES,
    PIPELINES,
    READERS,
    SMALL,
    assert_near,
    batches,
    central,
    equal,
    join_parts,
    make_readable,
    marked,
    same,
)
from tests.pipelines.conftest import Loaders
from tests.views.cases import UNEQUAL


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("pipelines") / "images")


@pytest.fixture(scope="module")
def batches_of(folder: Path) -> Callable[..., list[Batch]]:
    """A cached function that returns a pipeline's batches of an epoch on a single rank."""

    @cache
    def of(name: str, epoch: int = 1, **settings: Any) -> list[Batch]:
        if "select_images" in settings:
            store = open_store(make_readable(name, folder), "train")
            settings = {"store": select_images(store, np.array(settings["select_images"]))}
        return batches(name, folder, epoch, **settings)

    return of


def compute_digests(store: Store, epoch: int, augment: AugmentConfig) -> list[int]:
    """Compute the expected digests from their definition and PIL's image sizes."""
    order, batch_digests = Order(images=len(store), batch=8, seed=0), []
    for step in range(order.steps):
        index = order.indices(epoch, step)
        size = np.array([store.decode(i).size[::-1] for i in index.tolist()])
        params = draws.draw_views(augment, seed=0, epoch=epoch, index=index, size=size)
        batch_digests.append(batch_digest(params, index, epoch=epoch, place=8 * step))
    return batch_digests


SUBSET = (0, 3, 4, 9, 11, 12, 17, 20, 22, 23)
SELECTED = (*range(9), 10, *range(10, 24))
"""Positions of a data set in which image 10 replaces image 9."""
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"seed": 1},
    {"augment": UNEQUAL},
    {"batch": 4, "chosen": SUBSET},
    {"select_images": SELECTED},
)


@pytest.mark.parametrize("name", READERS)
def test_epoch_equals_torchvision(
    name: str, folder: Path, batches_of: Callable[..., list[Batch]]
) -> None:
    """Each image once, with its label, name, draws and two different views; also in subsets."""
    whole_store = open_store(folder, "train")
    for epoch, settings in product((0, 1), SETTINGS):
        store = select_images(whole_store, np.array(settings.get("select_images", range(24))))
        loaded = batches_of(name, epoch, **settings)
        near = 40 if name == GRAPH else 1e-3  # 1e-3 is for the rounding of float32
        assert_near(loaded, batches_of("torchvision", epoch, **settings), near)
        index = torch.cat([batch.index for batch in loaded]).tolist()
        chosen = settings.get("chosen", range(24))
        assert len({*index}) == len(index) == len(chosen) // 4 * 4 and {*index} <= {*chosen}
        for place, batch in enumerate(loaded):
            indices = batch.index.numpy()
            assert torch.equal(batch.label, batch.index // 8)
            assert not torch.equal(batch.views[-2], batch.views[-1])
            names = [store.name(i).removesuffix(".jpg") for i in indices.tolist()]
            assert [name.removesuffix(".jpg") for name in batch.names] == names
            seen = batch_digest(batch.params, indices, epoch=epoch, place=place * len(indices))
            assert batch.digest == seen
        if settings in ({}, {"augment": UNEQUAL}):
            expected = compute_digests(store, epoch, settings.get("augment", SMALL))
            assert [batch.digest for batch in loaded] == expected
    for one, other in zip(batches_of(name), batches_of(name, select_images=SELECTED), strict=True):
        changed = one.index == 9  # the others are unchanged
        for view, now in zip(one.views, other.views, strict=True):
            assert torch.equal(view[~changed], now[~changed])
            assert not changed.any() or not torch.equal(view[changed], now[changed])
    one, other, seeded = (
        batches_of(name, 0)[0],
        batches_of(name, 1)[0],
        batches_of(name, 0, seed=1)[0],
    )
    for a, b in ((one, other), (one, seeded), (other, seeded)):
        assert not torch.equal(a.index, b.index) and not torch.equal(a.view1, b.view1)


@pytest.mark.parametrize("name", [*PIPELINES, *marked(GRAPH)])
def test_batches_have_documented_shapes_and_dtypes(
    name: str, folder: Path, loaders: Loaders
) -> None:
    for augment, dtype, sides in (
        (SMALL, torch.float32, [16, 16]),
        (UNEQUAL, torch.bfloat16, [24, 12, 24, 12, 12]),
    ):
        loader = loaders(name, folder, augment=augment, dtype=dtype)
        batch = next(loader.epoch(0))
        assert loader.steps == loader.images // 8 and loader.source
        assert [view.shape for view in batch.views] == [(8, 3, side, side) for side in sides]
        for view in batch.views:
            assert view.dtype == dtype
            assert view.is_contiguous(memory_format=torch.channels_last)
        assert batch.index.dtype == batch.label.dtype == torch.int64
        assert batch.index.shape == batch.label.shape == (8,)
        assert torch.equal(pickle.loads(pickle.dumps(batch)).view1, batch.view1)
    assert isinstance(loader, CropLoader) == (name == GRAPH or BACKENDS[name].crops)  # type: ignore[index]
    if isinstance(loader, CropLoader):
        index, params, crops = next(iter(loader.crops(0)))
        assert [crop.shape for crop in crops] == [(2, 8, 24, 24, 3), (3, 8, 12, 12, 3)]
        assert params.flip.shape == (5, 8) and all(crop.dtype == torch.uint8 for crop in crops)
        assert batch.index.tolist() == index.tolist()


@pytest.mark.parametrize(
    ("world", "skip", "workers", "left"), [(1, 2, 2, 0), (2, 1, 2, 2), (4, 0, 0, 1)]
)
@pytest.mark.parametrize("name", [*PIPELINES, *marked(GRAPH, PAGES)])
def test_ranks_share_epoch_from_any_step(
    name: str,
    world: int,
    skip: int,
    workers: int,
    left: int,
    loaders: Loaders,
    folder: Path,
    batches_of: Callable[..., list[Batch]],
) -> None:
    """Batches are equal bit for bit, even after abandoned epochs."""
    shares = []
    for rank in range(world):
        loader = loaders(name, folder, batch=12, workers=workers, rank=rank, world=world)
        for _ in range(left):
            next(iter(loader.epoch(5)))
        start = loader.steps - 3 if name == "synthetic" else 0
        shares.append(list(loader.epoch(1, skip=start + skip)))
    for batch, *parts in zip(batches_of(name, batch=12)[skip:], *shares, strict=True):
        assert equal(join_parts(parts), batch) or (name == "synthetic" and world > 1)
        assert torch.equal(join_parts(parts).index, batch.index)
        assert sum_digests(*(part.digest for part in parts)) == batch.digest
        assert len({batch.digest, *(part.digest for part in parts)}) == world + (world > 1)


@pytest.mark.ffcv
def test_ffcv_reads_pages_of_selected_images(tmp_path: Path) -> None:
    (tmp_path / "images" / "noise").mkdir(parents=True)
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 256, (1500, 1500, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"images/noise/{number}.jpg", quality=100)
    converted = make_readable("ffcv", tmp_path / "images")
    store = open_store(converted, "train")
    assert isinstance(store, BetonStore) and len(set((store.start // store.page_size).tolist())) > 1
    last = select_images(store, np.array([3, 2]))
    ours, theirs = (batches(n, converted, batch=2, store=last) for n in (PAGES, "torchvision"))
    assert_near(ours, theirs)


@pytest.mark.ffcv
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_ffcv_page_cache_failure_raises_error(images: Path, loaders: Loaders) -> None:
    """FFCV's reader threads die, and FFCV waits for their pages forever."""
    loader = loaders(PAGES, images / "train", workers=2)
    path = make_readable("ffcv", images / "train") / "train.beton"
    path.rename(path.with_suffix(".gone"))
    with pytest.raises(DataError, match="is the file still there"):
        list(loader.epoch(0))


@pytest.mark.parametrize("name", READERS)
def test_loader_runs_one_epoch_at_a_time(name: str, folder: Path, loaders: Loaders) -> None:
    """Another loader and an evaluation may run meanwhile. An epoch that was replaced raises."""
    one, other = (loaders(name, folder, workers=2) for _ in range(2))
    for a, b, c in zip(one.epoch(0), other.epoch(0), central(name, folder), strict=True):
        assert equal(a, b) and c.image.shape == (8, 3, 16, 16)
    expected = list(other.epoch(1))
    displaced, later = one.epoch(0), one.epoch(1)
    next(displaced)
    loaded = [next(later)]
    with pytest.raises(RuntimeError, match="another epoch of this loader was started"):
        next(displaced)
    assert same([*loaded, *later], expected)
    for _ in range(2):
        one.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(one.epoch(0))


def test_auto_worker_count_is_cores_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert [count(workers) for workers in (-1, 0, 5)] == [3, 0, 5]
