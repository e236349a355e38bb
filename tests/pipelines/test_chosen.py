"""A chosen part of a data set: the same images in every pipeline, as the whole shows them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fastsiam.errors import DataError
from tests.pipelines.cases import (
    PIPELINES,
    SMALL,
    WITH_IMAGES,
    build,
    equal,
    first,
    levels,
)


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_a_subset_shows_the_chosen_images_as_the_whole_would(name: str, images: Path) -> None:
    """Every pipeline the same ones, in one order; each as PIL shows it, by its own position."""
    chosen = np.array([0, 3, 4, 9, 11, 12, 17, 20, 22, 23])
    loader = build(name, images / "train", batch=4, chosen=chosen, workers=2)
    theirs = build("torchvision", images / "train", batch=4, chosen=chosen)
    assert (loader.images, loader.steps) == (10, 2)
    for epoch in range(2):
        seen = []
        for ours, other in zip(loader.epoch(epoch), theirs.epoch(epoch), strict=True):
            assert torch.equal(ours.index, other.index) and torch.equal(ours.label, other.label)
            assert torch.equal(ours.label, ours.index // 8)
            assert levels(ours.view1, other.view1, SMALL).max() < 1e-3
            assert levels(ours.view2, other.view2, SMALL).max() < 1e-3
            seen += ours.index.tolist()
        assert len(set(seen)) == 8 and set(seen) <= set(chosen.tolist())
    loader.close()
    theirs.close()


@pytest.mark.parametrize("name", PIPELINES)
def test_all_images_chosen_are_the_whole(name: str, images: Path) -> None:
    count = build(name, images / "train").images
    whole = build(name, images / "train")
    chosen = build(name, images / "train", chosen=np.arange(count))
    for _, one, other in zip(range(3), whole.epoch(1), chosen.epoch(1), strict=False):
        assert equal(one, other)
    whole.close()
    chosen.close()


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_too_few_chosen_images(name: str, images: Path) -> None:
    with pytest.raises(DataError, match=r"chosen part of .* holds 5 images, fewer than one batch"):
        build(name, images / "train", chosen=np.arange(5))
    with pytest.raises(ValueError, match="ascending positions among 24 images"):
        build(name, images / "train", chosen=np.arange(20, 40))


def test_memory_holds_the_chosen_images_alone(images: Path) -> None:
    for number in range(8):
        (images / "train" / "class1" / f"{number:03d}.jpg").write_bytes(b"broken")
    chosen = np.array([0, 1, 2, 3, 16, 17, 18, 23])
    loader = build("memory", images / "train", chosen=chosen)
    assert len(loader._pixels.flat) == 8 * 24 * 24 * 3  # type: ignore[attr-defined]
    assert sorted(first(loader).index.tolist()) == chosen.tolist()
