"""What holds for every pipeline: same images, same order, same views, resumable at any step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fastsiam.config import DataConfig
from fastsiam.pipelines import build_eval_loader
from fastsiam.pipelines.backends import BACKENDS
from fastsiam.pipelines.workers import count
from fastsiam.views.batch import CropLoader
from tests.pipelines.cases import (
    PIPELINES,
    SMALL,
    WITH_IMAGES,
    build,
    equal,
    first,
    joined,
)
from tests.views.cases import UNEQUAL


@pytest.mark.parametrize("name", PIPELINES)
def test_batches_have_the_promised_form(name: str, images: Path) -> None:
    loader = build(name, images / "train")
    batch = first(loader)
    assert loader.steps == loader.images // 8
    for view in (batch.view1, batch.view2):
        assert view.shape == (8, 3, 16, 16) and view.dtype == torch.float32
        assert view.is_contiguous(memory_format=torch.channels_last)
    assert batch.index.dtype == batch.label.dtype == torch.int64
    assert batch.index.shape == batch.label.shape == (8,)
    assert not torch.equal(batch.view1, batch.view2)


@pytest.mark.parametrize("name", PIPELINES)
def test_views_have_their_own_sides(name: str, images: Path) -> None:
    loader = build(name, images / "train", augment=UNEQUAL, dtype=torch.bfloat16)
    batch = first(loader)
    sides = [24, 12, 24, 12, 12]
    assert [view.shape for view in batch.views] == [(8, 3, side, side) for side in sides]
    for view in batch.views:
        assert view.dtype == torch.bfloat16
        assert view.is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(batch.views[3], batch.views[4])


@pytest.mark.parametrize("name", PIPELINES)
def test_crops_lie_side_by_side(name: str, images: Path) -> None:
    loader = build(name, images / "train", augment=UNEQUAL)
    assert isinstance(loader, CropLoader) == BACKENDS[name].crops  # type: ignore[index]
    if isinstance(loader, CropLoader):
        index, params, crops = next(iter(loader.crops(0)))
        assert [own.shape for own in crops] == [(2, 8, 24, 24, 3), (3, 8, 12, 12, 3)]
        assert params.flip.shape == (5, 8) and all(own.dtype == torch.uint8 for own in crops)
        assert next(iter(loader.epoch(0))).index.tolist() == index.tolist()
    loader.close()


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_labels_belong_to_the_images(name: str, images: Path) -> None:
    loader = build(name, images / "train")
    for batch in loader.epoch(0):
        assert torch.equal(batch.label, batch.index // 8)
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", PIPELINES)
def test_skipping_gives_the_tail_of_the_epoch(name: str, workers: int, images: Path) -> None:
    loader = build(name, images / "train", workers=workers)
    if name == "synthetic":
        start = loader.steps - 3
        whole = list(loader.epoch(1, skip=start))
    else:
        start, whole = 0, list(loader.epoch(1))
        assert len(whole) == 3
    for skip in range(4):
        tail = list(loader.epoch(1, skip=start + skip))
        assert len(tail) == 3 - skip
        assert all(equal(a, b) for a, b in zip(tail, whole[skip:], strict=True))
    loader.close()


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_an_abandoned_epoch_leaves_the_loader_usable(name: str, images: Path) -> None:
    loader = build(name, images / "train", workers=2)
    expected = list(loader.epoch(0))
    for _ in range(2):
        next(iter(loader.epoch(5)))
    assert all(equal(a, b) for a, b in zip(loader.epoch(0), expected, strict=True))
    loader.close()


@pytest.mark.parametrize("name", WITH_IMAGES)
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_same_global_batches(name: str, world: int, images: Path) -> None:
    alone = build(name, images / "train")
    shares = [build(name, images / "train", rank=rank, world=world) for rank in range(world)]
    for whole, *parts in zip(alone.epoch(2), *(share.epoch(2) for share in shares), strict=True):
        assert equal(joined(parts), whole)
    for loader in (alone, *shares):
        loader.close()


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_epochs_and_seeds_differ(name: str, images: Path) -> None:
    keys = [(0, 0), (0, 1), (1, 0)]
    batches = [first(build(name, images / "train", seed=seed), epoch) for seed, epoch in keys]
    for i, one in enumerate(batches):
        for other in batches[:i]:
            assert not torch.equal(one.index, other.index)
            assert not torch.equal(one.view1, other.view1)


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_three_ranks_of_a_set_that_does_not_divide(name: str, images: Path) -> None:
    """24 images in batches of 9: two whole batches, three ranks, six images left out."""
    alone = build(name, images / "train", batch=9)
    shares = [build(name, images / "train", batch=9, rank=r, world=3) for r in range(3)]
    assert [loader.steps for loader in (alone, *shares)] == [2] * 4
    for whole, *parts in zip(alone.epoch(1), *(share.epoch(1) for share in shares), strict=True):
        for view in ("view1", "view2"):
            joined = torch.cat([getattr(part, view) for part in parts])
            assert torch.equal(joined, getattr(whole, view))
        seen = [hash(view.numpy().tobytes()) for part in parts for view in (part.view1, part.view2)]
        assert len(set(seen)) == 6  # neither views nor ranks repeat each other
    for loader in (alone, *shares):
        loader.close()


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_two_loaders_and_an_evaluation_at_once(name: str, images: Path) -> None:
    one, other = (build(name, images / "train", workers=2) for _ in range(2))
    data = DataConfig(data=str(images), workers=2)
    central = build_eval_loader(data, "val", SMALL, resize=16, batch=4)
    for a, b, c in zip(one.epoch(0), other.epoch(0), central, strict=True):
        assert equal(a, b) and c.image.shape == (4, 3, 16, 16)
    one.close()
    other.close()


@pytest.mark.parametrize("name", [n for n in WITH_IMAGES if n.values != ("memory",)])
def test_an_epoch_that_another_displaced_says_so(name: str, images: Path) -> None:
    loader = build(name, images / "train", workers=2)
    one = loader.epoch(0)
    next(one)
    other = loader.epoch(1)
    next(other)
    with pytest.raises(RuntimeError, match="another epoch of this loader was begun"):
        list(one)
    loader.close()


def test_worker_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert [count(workers) for workers in (-1, 0, 5)] == [3, 0, 5]
