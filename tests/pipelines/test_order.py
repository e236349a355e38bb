"""Which images make up which batch, over epochs, steps and ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastsiam.pipelines.order import Order
from fastsiam.views import rng


def epoch_of(order: Order, epoch: int) -> np.ndarray:
    return np.concatenate([order.indices(epoch, step) for step in range(order.steps)])


@pytest.mark.parametrize(
    ("images", "batch", "world"), [(1003, 12, 1), (1003, 12, 2), (1003, 12, 3), (24, 24, 4)]
)
def test_every_image_once_but_the_dropped_tail(images: int, batch: int, world: int) -> None:
    shares = [
        epoch_of(Order(images=images, batch=batch, seed=1, rank=r, world=world), 0)
        for r in range(world)
    ]
    assert len({len(share) for share in shares}) == 1
    seen = np.concatenate(shares)
    assert len(np.unique(seen)) == len(seen) == images // batch * batch
    assert seen.min() >= 0 and seen.max() < images


@pytest.mark.parametrize("world", [2, 3, 6])
def test_global_batches_are_the_same_for_every_world(world: int) -> None:
    alone = Order(images=100, batch=12, seed=5)
    for step in range(alone.steps):
        together = [
            Order(images=100, batch=12, seed=5, rank=r, world=world).indices(3, step)
            for r in range(world)
        ]
        np.testing.assert_array_equal(np.concatenate(together), alone.indices(3, step))


def test_epochs_and_seeds_shuffle_anew() -> None:
    orders = [
        epoch_of(Order(images=500, batch=10, seed=seed), epoch)
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    for i, one in enumerate(orders):
        assert sorted(one) == list(range(500))
        for other in [*orders[:i], np.arange(500)]:
            assert (one == other).mean() < 0.05


def test_shuffle_is_uniform() -> None:
    """Each image's mean position over many epochs is the middle; neighbours part."""
    position = np.array(
        [np.argsort(epoch_of(Order(images=50, batch=10, seed=0), e)) for e in range(400)]
    )
    assert np.abs(position.mean(0) - 24.5).max() < 4 * 14.4 / np.sqrt(400)
    assert abs((np.diff(position, axis=1) == 1).mean() - 1 / 50) < 0.005


def test_indivisible_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="batch of 10 cannot be shared equally by 3 ranks"):
        Order(images=100, batch=10, seed=0, world=3)


@pytest.mark.parametrize("world", [1, 2])
def test_a_subset_is_ordered_as_a_data_set_of_its_size(world: int) -> None:
    chosen = np.sort(np.random.default_rng(0).permutation(1000)[:40])
    for rank in range(world):
        whole = Order(images=40, batch=12, seed=3, rank=rank, world=world)
        part = replace(whole, chosen=chosen)
        assert part.steps == 3 and part == whole
        np.testing.assert_array_equal(epoch_of(part, 2), chosen[epoch_of(whole, 2)])


def test_a_draw_that_is_noted_here_is_a_draw_for_ever() -> None:
    """Runs that are resumed, and published subsets, depend on it."""
    order = Order(images=20, batch=5, seed=7, rank=0, world=1)
    assert order.indices(0, 0).tolist() == [1, 13, 8, 15, 10]
    assert order.indices(3, 2).tolist() == [1, 18, 0, 2, 15]


def test_no_stream_draws_what_another_does() -> None:
    """Over all places of its mark, for the first images, epochs and views."""
    images = np.arange(50)
    drawn = [rng.keys(7, rng.Stream.SHARE, images), rng.keys(7, 0, rng.Stream.LIMIT, images)]
    drawn.append(rng.keys(7, 0, rng.Stream.HOLDOUT, images))
    for epoch in range(5):
        drawn.append(rng.keys(7, epoch, rng.Stream.ORDER, images))
        drawn += [rng.keys(7, epoch, images, view) for view in range(3)]
    every = np.concatenate(drawn)
    assert len(np.unique(every)) == len(every) == 50 * 23
