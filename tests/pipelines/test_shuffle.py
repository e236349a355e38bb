"""The shuffle within a window, held to its promises and to the statistics of a full one."""

from __future__ import annotations

import numpy as np
import pytest

from fastsiam.config import DataConfig
from fastsiam.pipelines.mixture import shuffle_of
from fastsiam.pipelines.shuffle import Window, full_shuffle
from fastsiam.pipelines.store.base import BLOCK_IMAGES, in_order


def test_a_block_is_read_within_a_shuffle_of_places() -> None:
    """The images of a block are shown within its length and the window's, round the epoch."""
    window, images = 1000, 20 * BLOCK_IMAGES
    shown = Window(window, in_order(images)).epoch(0, 0)
    place = np.argsort(shown)
    for block in range(20):
        own = np.sort(place[block * BLOCK_IMAGES : (block + 1) * BLOCK_IMAGES])
        gaps = np.diff(own, append=own[0] + images)
        assert images - gaps.max() <= window + BLOCK_IMAGES + window // 10  # as crowded as it gets


def test_any_image_may_come_at_any_time() -> None:
    """Over many epochs an image's place has the mean and spread of a full shuffle's."""
    images, epochs = 2048, 300
    window = Window(256, in_order(images))
    place = np.array([np.argsort(window.epoch(0, e)) for e in range(epochs)])[:, ::97]
    deviation = images / np.sqrt(12)
    assert np.abs(place.mean(0) - images / 2).max() < 5 * deviation / np.sqrt(epochs)
    assert np.abs(place.std(0) / deviation - 1).max() < 0.15


def test_a_draw_that_is_noted_here_is_a_draw_for_ever() -> None:
    """Runs that are resumed depend on it."""
    window = Window(6, np.arange(20) // 4)
    assert window.epoch(7, 0).tolist() == [
        14, 3, 2, 13, 15, 5, 12, 4, 6, 10, 7, 11, 8, 9, 18, 16, 17, 0, 19, 1,
    ]  # fmt: skip
    assert full_shuffle(5, 7, 0).tolist() == [1, 0, 4, 3, 2]
    shuffle = shuffle_of(DataConfig(shuffle="window:9"), None, images=500)
    assert isinstance(shuffle, Window) and shuffle.images == 9 and len(shuffle.blocks) == 500
    for text in ("window", "window:", "window:0", "window:-1", "some", "full:1"):
        with pytest.raises(ValueError, match=r"shuffle must be full, or window:N"):
            DataConfig(shuffle=text)
