"""The order of images: the images of each batch, over epochs, steps and ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsiam.bad_image_list import BadImage
from fastsiam.config import DataConfig
from fastsiam.pipelines.bad_images import BadImages
from fastsiam.pipelines.order import Order
from fastsiam.pipelines.shuffle import Mixture, Window, full_shuffle
from fastsiam.pipelines.store.base import BLOCK_IMAGES, in_order
from fastsiam.views import rng


def collect_indices(order: Order, epoch: int) -> np.ndarray:
    batches = [order.indices(epoch, step) for step in range(order.steps)]
    return np.concatenate([np.zeros(0, int), *batches])


def collect_draw_numbers(order: Order, epoch: int) -> list[int]:
    return [n for step in range(order.steps) for n in order.draw_numbers(epoch, step).tolist()]


@st.composite
def orders(draw: st.DrawFn) -> tuple[Order, int]:
    """Draw an order: fully shuffled, within a window or of a mixture; and a number of ranks."""
    world, images = draw(st.sampled_from([1, 2, 3, 6])), draw(st.integers(1, 700))
    batch = world * draw(st.integers(1, max(1, images // world)))
    shuffles: list[Any] = [None, *(Window(x, in_order(images)) for x in (1, 100, 10**6))]
    if images > 1:
        few = max(1, images // 10)
        shuffles.append(Mixture(np.repeat([0, 1], [few, images - few]), (1.0, 1.0)))
    shuffle, seed = draw(st.sampled_from(shuffles)), draw(st.integers(0, 2**32 - 1))
    return Order(images=images, batch=batch, seed=seed, shuffle=shuffle), world


@settings(max_examples=60, derandomize=True, database=None)
@given(orders(), st.integers(0, 1000), st.integers(1, 5))
def test_ranks_and_subsets_share_one_order(
    whole: tuple[Order, int], epoch: int, spread: int
) -> None:
    """Each image is shown once, except for the tail, in the same global batches on all ranks.

    A mixture may repeat images, with other draws. A subset is ordered like a data set of its size.
    """
    order, world = whole
    indices, numbers = collect_indices(order, epoch), collect_draw_numbers(order, epoch)
    assert len(indices) == len(set(numbers)) == order.images // order.batch * order.batch
    assert isinstance(order.shuffle, Mixture) or indices.tolist() == numbers
    assert not len(indices) or (indices.min() >= 0 and indices.max() < order.images)
    ranks = [replace(order, rank=rank, world=world) for rank in range(world)]
    for step in range(order.steps):
        together = np.concatenate([rank.indices(epoch, step) for rank in ranks])
        np.testing.assert_array_equal(together, order.indices(epoch, step))
    chosen = np.arange(order.images) * spread
    part = replace(order, chosen=chosen)
    assert part == order and part.steps == order.steps
    np.testing.assert_array_equal(collect_indices(part, epoch), chosen[indices])
    assert len(set(collect_draw_numbers(part, epoch))) == len(numbers)
    np.testing.assert_array_equal(collect_indices(replace(order), epoch), indices)


def test_epoch_is_shuffled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if several loaders take turns, or epochs alternate. Callers cannot change it."""
    shuffle = Mock(wraps=full_shuffle)
    monkeypatch.setattr("fastsiam.pipelines.order.full_shuffle", shuffle)
    turns = [Order(images=20, batch=5, seed=seed) for seed in range(3)]
    for epoch, step in ((0, 0), (0, 3), (1, 0), (0, 2), (1, 1), (2, 0), (1, 3)):
        for order in turns:
            order.indices(epoch, step)
    assert shuffle.call_count == 3 * len(turns)
    with pytest.raises(ValueError, match="read-only"):
        turns[0].draw_numbers(2, 0)[0] = 0


def test_bad_images_of_mixture_are_replaced() -> None:
    """A small data set with a large weight would repeat a bad image many times in a row."""
    mixture = Mixture(np.repeat([0, 1], [98, 2]), (0.5, 0.5))
    bad = BadImages(100, [BadImage(0, 99, "", "", 0)])
    order = Order(images=100, batch=10, seed=0, shuffle=mixture, bad=bad)
    indices = np.concatenate([collect_indices(order, epoch) for epoch in range(20)])
    assert {98} < set(indices.tolist()) <= set(range(99))


def test_order_is_pinned() -> None:
    """Resumed runs and published subsets depend on it."""
    order = Order(images=20, batch=5, seed=7, rank=0, world=1)
    assert order.indices(0, 0).tolist() == [1, 13, 8, 15, 10]
    assert order.indices(3, 2).tolist() == [1, 18, 0, 2, 15]
    with pytest.raises(ValueError, match="batch of 10 is not divisible by 3 ranks"):
        Order(images=100, batch=10, seed=0, world=3)
    for rank in (2, -1):
        with pytest.raises(ValueError, match=f"rank {rank} is out of range for 2 ranks"):
            Order(images=20, batch=10, seed=0, rank=rank, world=2)
    with pytest.raises(ValueError, match="batch must be at least 1, not 0"):
        Order(images=20, batch=0, seed=0)


def test_random_streams_are_distinct() -> None:
    """For the first images, epochs and views, wherever the stream is in the key."""
    images = np.arange(50)
    keys = [rng.keys(7, rng.Stream.SHARE, images), rng.keys(7, 0, rng.Stream.LIMIT, images)]
    keys.append(rng.keys(7, 0, rng.Stream.HOLDOUT, images))
    for epoch in range(5):
        keys.append(rng.keys(7, epoch, rng.Stream.ORDER, images))
        keys += [rng.keys(7, epoch, images, view) for view in range(3)]
    every = np.concatenate(keys)
    assert len(np.unique(every)) == len(every) == 50 * 23


# The shuffle within a window.


def test_window_shuffle_keeps_blocks_together() -> None:
    """A block's images are shown within its length plus the window's, wrapping around the epoch."""
    window, images = 1000, 20 * BLOCK_IMAGES
    indices = Window(window, in_order(images)).epoch(0, 0)
    place = np.argsort(indices)
    for block in range(20):
        block_places = np.sort(place[block * BLOCK_IMAGES : (block + 1) * BLOCK_IMAGES])
        gaps = np.diff(block_places, append=block_places[0] + images)
        assert images - gaps.max() <= window + BLOCK_IMAGES + window // 10  # for crowding


def test_window_shuffle_has_mean_and_spread_of_full_shuffle() -> None:
    """Over many epochs, an image's position has the mean and spread of a full shuffle."""
    images, epochs = 2048, 300
    window = Window(256, in_order(images))
    place = np.array([np.argsort(window.epoch(0, e)) for e in range(epochs)])[:, ::97]
    deviation = images / np.sqrt(12)
    assert np.abs(place.mean(0) - images / 2).max() < 5 * deviation / np.sqrt(epochs)
    assert np.abs(place.std(0) / deviation - 1).max() < 0.15


def test_window_shuffle_is_pinned() -> None:
    window = Window(6, np.arange(20) // 4)
    assert window.epoch(7, 0).tolist() == [
        14, 3, 2, 13, 15, 5, 12, 4, 6, 10, 7, 11, 8, 9, 18, 16, 17, 0, 19, 1,
    ]  # fmt: skip
    assert full_shuffle(5, 7, 0).tolist() == [1, 0, 4, 3, 2]
    assert DataConfig(shuffle="window:9").window == 9
    for text in ("window", "window:", "window:0", "window:-1", "some", "full:1"):
        with pytest.raises(ValueError, match=r"shuffle must be full, or window:N"):
            DataConfig(shuffle=text)
