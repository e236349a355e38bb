"""A batch digest depends on all positions, images and draws, but not on how they are split."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from fastsiam.config import AugmentConfig
from fastsiam.views.digest import batch_digest, hex_digest
from fastsiam.views.draws import ViewParams, draw_views

INDEX = np.array([7, 3, 5, 11, 3])
SIZE = np.array([[24, 30], [32, 32], [500, 375], [24, 31], [40, 24]])
PARAMS = draw_views(AugmentConfig(), seed=0, epoch=2, index=INDEX, size=SIZE)
POSITION = {"epoch": 2, "place": 40}
DIGEST = batch_digest(PARAMS, INDEX, **POSITION)


def test_digest_equals_pinned_value() -> None:
    """Old logs are verified with it, so the value must never change and is the same everywhere."""
    assert hex_digest(DIGEST) == "d775bdba5fe71157"
    assert hex_digest(batch_digest(None, INDEX, **POSITION)) == "19177ace792445d3"


@pytest.mark.parametrize("name", [f.name for f in fields(ViewParams)])
def test_digest_depends_on_every_draw(name: str) -> None:
    """Flip the lowest bit of each number in every field, view and image."""
    digests = {DIGEST}
    values = getattr(PARAMS, name)
    for place in np.ndindex(values.shape):
        other = values.copy()
        raw = other[place].tobytes()
        if values.dtype == bool:
            other[place] = not values[place]
        else:
            other[place] = np.frombuffer(bytes([raw[0] ^ 1]) + raw[1:], values.dtype)[0]
        digests.add(batch_digest(replace(PARAMS, **{name: other}), INDEX, **POSITION))
    assert len(digests) == values.size + 1


def test_digest_depends_on_position_image_epoch_and_view() -> None:
    swapped = np.array([1, 0, 2, 3, 4])
    digests: list[Any] = [
        batch_digest(PARAMS, INDEX, epoch=3, place=40),
        batch_digest(PARAMS, INDEX, epoch=2, place=41),
        batch_digest(PARAMS, INDEX[swapped], **POSITION),
        batch_digest(PARAMS.rows(swapped), INDEX, **POSITION),
        batch_digest(PARAMS.rows(swapped), INDEX[swapped], **POSITION),
        batch_digest(PARAMS.views([1, 0]), INDEX, **POSITION),
        batch_digest(PARAMS.views([0]), INDEX, **POSITION),
        batch_digest(PARAMS.rows(slice(0, 4)), INDEX[:4], **POSITION),
        batch_digest(None, INDEX, **POSITION),
        *(batch_digest(PARAMS, INDEX + np.eye(5, dtype=np.int64)[i], **POSITION) for i in range(5)),
    ]
    assert len({DIGEST, *digests}) == len(digests) + 1


def test_digest_ignores_memory_layout_and_index_dtype() -> None:
    """The memory layout may differ: rows cut out of a larger batch have other strides."""
    columns = {f.name: np.asfortranarray(getattr(PARAMS, f.name)) for f in fields(ViewParams)}
    assert batch_digest(ViewParams(**columns), INDEX.astype(np.int32), **POSITION) == DIGEST
