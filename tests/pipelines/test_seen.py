"""The digest of what a batch is made of: one number for every pipeline, rank and worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fastsiam.pipelines import Order, backends
from fastsiam.pipelines.store import FolderStore
from fastsiam.views import draws
from fastsiam.views.batch import Batch
from fastsiam.views.digest import added, seen_in
from tests.pipelines.cases import PIPELINES, SMALL, WITH_IMAGES, build, readable
from tests.views.cases import UNEQUAL


def shown(name: str, root: Path, epoch: int = 1, **how: Any) -> list[int]:
    """Return the digests of an epoch's batches; of noise, of its first three."""
    loader = build(name, root, **how)
    try:
        return [batch.seen for batch in islice(loader.epoch(epoch), 3)]
    finally:
        loader.close()


def expected(root: Path, epoch: int = 1, *, augment: Any = SMALL, seed: int = 0) -> list[int]:
    """Return what the digests should be, from the definition and PIL's sizes."""
    store = FolderStore(root)
    order = Order(images=len(store), batch=8, seed=seed)
    digests = []
    for step in range(order.steps):
        index = order.indices(epoch, step)
        size = np.array([store.decode(i).size[::-1] for i in index.tolist()])
        params = draws.draw_views(augment, seed=seed, epoch=epoch, index=index, size=size)
        digests.append(seen_in(params, index, epoch=epoch, place=8 * step))
    return digests


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_every_pipeline_gives_the_same_digests(name: str, images: Path) -> None:
    root = images / "train"
    digests = expected(root)
    assert len(set(digests)) == len(digests) == 3
    assert shown(name, root) == digests
    assert shown(name, root, workers=2) == digests
    assert shown(name, root, augment=UNEQUAL) == expected(root, augment=UNEQUAL) != digests


@pytest.mark.parametrize("name", PIPELINES)
def test_ranks_add_up_to_the_same_digests(name: str, images: Path) -> None:
    alone = shown(name, images / "train", batch=12)
    for world in (2, 3):
        parts = [
            shown(name, images / "train", batch=12, rank=rank, world=world) for rank in range(world)
        ]
        assert [added(*own) for own in zip(*parts, strict=True)] == alone
        assert all(
            len({*own, whole}) == world + 1 for *own, whole in zip(*parts, alone, strict=True)
        )


@pytest.mark.parametrize("name", PIPELINES)
def test_an_epoch_that_begins_later_has_the_same_digests(name: str, images: Path) -> None:
    loader = build(name, images / "train")
    whole = [batch.seen for batch in islice(loader.epoch(0), 3)]
    if name == "synthetic":
        tail = [next(iter(loader.epoch(0, skip=1))).seen]
        assert tail == whole[1:2]
    else:
        assert [batch.seen for batch in loader.epoch(0, skip=1)] == whole[1:]
    loader.close()


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_photographs_of_many_sizes(name: str, real_images: Path) -> None:
    root = real_images
    whole = expected(root)[:3]
    assert shown(name, root, workers=2) == whole


Draw = Callable[..., draws.ViewParams]


def another_image(draw: Draw, *args: Any, index: NDArray[np.int64], **how: Any) -> Any:
    """Draw as for the next image: its index was taken wrongly."""
    return draw(*args, index=np.asarray(index) + (np.asarray(index) == 5), **how)


def another_epoch(draw: Draw, *args: Any, epoch: int, **how: Any) -> Any:
    return draw(*args, epoch=epoch + 1, **how)


def a_flip(draw: Draw, *args: Any, **how: Any) -> Any:
    """One draw of one view of one image is another in each batch."""
    params = draw(*args, **how)
    params.flip[1, -1] ^= True
    return params


@pytest.mark.parametrize("mistake", [another_image, another_epoch, a_flip])
@pytest.mark.parametrize("name", WITH_IMAGES)
def test_a_loader_that_draws_otherwise_is_noticed(
    name: str, mistake: Any, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = expected(images / "train")
    wrong = partial(mistake, draws.draw_views)
    for module in ("torchvision_backend", "loaders"):
        monkeypatch.setattr(f"fastsiam.pipelines.{module}.draw_views", wrong)
    assert shown(name, images / "train") != whole


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_a_loader_that_reads_other_images_is_noticed(
    name: str, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same images of a batch in another order, and one image twice."""
    root, right, whole = images / "train", Order.indices, expected(images / "train")

    def turned(order: Order, epoch: int, step: int) -> NDArray[np.int64]:
        return right(order, epoch, step)[::-1].copy()

    def twice(order: Order, epoch: int, step: int) -> NDArray[np.int64]:
        index = right(order, epoch, step).copy()
        index[1] = index[0]
        return index

    def swapped(order: Order, epoch: int, step: int) -> NDArray[np.int64]:
        return right(order, epoch, {0: 1, 1: 0}.get(step, step))

    readable(name, root)
    for wrong in (turned, twice, swapped):
        monkeypatch.setattr(Order, "indices", wrong)
        digests = shown(name, root)
        assert all(a != b for a, b in zip(digests[:2], whole[:2], strict=True))
        assert added(*digests) != added(*whole)


def test_every_pipeline_is_in_these_tests() -> None:
    assert {name.values[0] for name in PIPELINES} == set(backends.BACKENDS)


def test_a_part_of_a_batch_has_no_digest_of_its_own(images: Path) -> None:
    loader = build("memory", images / "train")
    batch: Batch = next(iter(loader.epoch(0)))
    assert batch.seen and [part.seen for part in batch.chunks(2)] == [0, 0]
    loader.close()
