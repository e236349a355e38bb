"""The engine matches Pillow for any images, boxes, sides and threads; errors and cancellation."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fastsiam.errors import BackendError, ImageError
from fastsiam.pipelines import headers
from fastsiam.pipelines.cuts import Cuts, cut_centres
from fastsiam.pipelines.engine import Engine, prefetch_remote
from tests.pipelines.cases import ListStore, batches, open_loader, same
from tests.pipelines.conftest import Loaders
from tests.pipelines.dali_cases import pil_crops, write_kinds
from tests.sources import encoded, jpeg, picture

KINDS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("RGB", "JPEG", {"subsampling": "4:2:0"}),
    ("RGB", "JPEG", {"subsampling": "4:2:2"}),
    ("RGB", "JPEG", {"subsampling": "4:4:4", "quality": 100}),
    ("RGB", "JPEG", {"progressive": True, "quality": 30}),
    ("RGB", "JPEG", {"restart_marker_blocks": 1}),
    ("L", "JPEG", {}),
    ("CMYK", "JPEG", {}),
    ("RGB", "PNG", {}),
    ("LA", "PNG", {}),
    ("RGB", "WEBP", {"lossless": True}),
)


@st.composite
def cut_batches(draw: st.DrawFn) -> tuple[ListStore, dict[int, Cuts], int]:
    """Draw images of any kind, cuts by side of the crops, and a number of threads."""
    images, sizes = [], []
    for seed in range(draw(st.integers(1, 5))):
        width, height = draw(st.integers(1, 90)), draw(st.integers(1, 90))
        mode, kind, options = draw(st.sampled_from(KINDS))
        image = picture(seed, width=width, height=height).convert(mode)
        images.append(encoded(image, kind, **options))
        sizes.append((height, width))
    views = draw(st.integers(1, 3))
    cuts = {}
    for side in draw(st.lists(st.integers(1, 48), min_size=1, max_size=2, unique=True)):
        boxes = np.zeros((views, len(images), 4), np.int32)
        for view in range(views):
            for row, size in enumerate(sizes):
                for axis in range(2):
                    begin = draw(st.integers(0, size[axis] - 1))
                    boxes[view, row, axis] = begin
                    boxes[view, row, 2 + axis] = draw(st.integers(1, size[axis] - begin))
        flip = draw(arrays(np.bool_, (views, len(images))))
        resized = np.full((views, len(images), 2), side, np.int32)
        cuts[side] = Cuts(boxes, flip, resized, np.zeros_like(resized))
    return ListStore(images), cuts, draw(st.integers(1, 3))


@settings(max_examples=60, derandomize=True, database=None)
@given(cut_batches())
def test_crops_equal_pillow(batch: tuple[ListStore, dict[int, Cuts], int]) -> None:
    store, cuts, workers = batch
    index = np.arange(len(store))
    with closing(Engine(store, workers=workers)) as engine:
        for _ in range(2):  # headers are known the second time
            crops = tuple(
                torch.empty((*side_cuts.flip.shape, side, side, 3), dtype=torch.uint8)
                for side, side_cuts in cuts.items()
            )
            with patch.object(store, "read", wraps=store.read) as read:
                encoded_batch, boxes = engine.read(index), list(cuts.values())
                engine.submit(index, encoded_batch, boxes, crops=crops).result()
            assert read.call_count == len(store)
            for (side, side_cuts), crop in zip(cuts.items(), crops, strict=True):
                np.testing.assert_array_equal(crop, pil_crops(store, index, side_cuts, side))


@pytest.fixture(scope="module")
def mixed_formats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of every kind, some of which need Pillow."""
    return write_kinds(tmp_path_factory.mktemp("odd"), each=2)


def test_image_that_changes_size_is_rejected() -> None:
    store = ListStore([jpeg(0), encoded(picture(1), "PNG")])
    engine = Engine(store, workers=1)
    engine.read(np.arange(2))
    for index, kind in ((0, "JPEG"), (1, "PNG")):
        before = store.images
        other = encoded(picture(2, width=41), kind)
        store.images = [*before[:index], other, *before[index + 1 :]]
        batch = engine.read(np.arange(2))
        crops = (torch.empty((1, 2, 8, 8, 3), dtype=torch.uint8),)
        message = r"it has 41 x 30 pixels, but its header said 40 x 30: .* was replaced"
        with pytest.raises(ImageError, match=message):
            cuts = [cut_centres(batch.size, resize=8, side=8)]
            engine.submit(np.arange(2), batch, cuts, crops=crops).result()
        store.images = before
    engine.close()


@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_crops_are_valid_until_next_batch_is_requested(
    prefetch: int, mixed_formats: Path, loaders: Loaders
) -> None:
    """However many batches are prefetched meanwhile, into the remaining buffers."""
    loader = loaders("native", mixed_formats, batch=3, workers=2, prefetch=prefetch)
    expected = [crops[0].clone() for *_, crops in loader.crops(0)]
    assert len(expected) >= 8
    for number, (*_, crops) in enumerate(loader.crops(0)):
        time.sleep(0.05)
        assert torch.equal(crops[0], expected[number])


def test_closed_loader_frees_buffers(mixed_formats: Path, loaders: Loaders) -> None:
    loader = loaders("native", mixed_formats, batch=3)
    list(loader.crops(0))
    chunks = loader._engine._chunks
    assert chunks._free
    loader.close()
    assert not chunks._free


def test_remote_prefetch_starts_with_one_batch_and_is_bounded() -> None:
    """The first batch is not delayed by later ones; at most 128 MiB are requested ahead."""
    store = Mock(is_remote=True, sizes=lambda: np.full(200, 2**22))
    ahead = []
    for number, index in enumerate(prefetch_remote(store, (np.array([i]) for i in range(200)))):
        assert index == [number]
        ahead.append(store.prefetch.call_count - number - 1)
    assert ahead[:4] == [0, 1, 2, 3]
    assert max(ahead) == 2**27 // 2**22 - 1
    assert store.prefetch.call_count == 200


def test_cancelled_batch_stops_writing_crops() -> None:
    """Nothing is written after the cancel, whatever the threads were doing."""
    store = ListStore([encoded(picture(i, width=900, height=700), "PNG") for i in range(8)])
    engine = Engine(store, workers=2)
    index = np.tile(np.arange(8), 40)  # seconds of work
    for _ in range(3):
        batch = engine.read(index)
        crops = (torch.zeros((1, len(index), 64, 64, 3), dtype=torch.uint8),)
        cuts = [cut_centres(batch.size, resize=64, side=64)]
        pending = engine.submit(index, batch, cuts, crops=crops)
        pending.cancel()
        snapshot = crops[0].clone()
        with ThreadPoolExecutor(1) as other:
            other.submit(engine.read, index).result()
        assert torch.equal(crops[0], snapshot)
    engine.close()


def test_batches_are_equal_without_libjpeg(
    mixed_formats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = batches("native", mixed_formats, 0, 1)
    monkeypatch.setattr(headers, "decoder", lambda: 0)
    assert same(batches("native", mixed_formats, 0, 1), expected)


def test_missing_kernels_are_reported_on_open(
    mixed_formats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the first batch, when the run has started."""
    monkeypatch.setattr(headers, "decoder", Mock(side_effect=BackendError("no compiler")))
    with pytest.raises(BackendError, match="no compiler"):
        open_loader("native", mixed_formats)
