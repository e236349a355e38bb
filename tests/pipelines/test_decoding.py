"""An image is decoded once, and its crops are PIL's to the last bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastsiam.config import AugmentConfig
from fastsiam.kernels import library
from fastsiam.pipelines import Store, headers
from fastsiam.pipelines.job import crop_views
from fastsiam.views.draws import draw_views
from tests.pipelines.cases import (
    SMALL,
    WITH_IMAGES,
    build,
    first,
    levels,
    readable,
)
from tests.processes import Forked
from tests.views.cases import UNEQUAL


@pytest.mark.parametrize("augment", [SMALL, UNEQUAL], ids=["two views", "five views"])
def test_pil_decodes_an_image_once(
    augment: AugmentConfig, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many views are cut out of it."""
    decoded: list[int] = []
    decode = Store.decode

    def counted(store: Store, index: int) -> Any:
        decoded.append(index)
        return decode(store, index)

    monkeypatch.setattr(Store, "decode", counted)
    loader = build("torchvision", images / "train", augment=augment)
    assert len(list(loader.epoch(0))) == 3
    assert len(decoded) == 24
    loader.close()


@pytest.mark.parametrize(
    ("name", "decodes"),
    [("native", 48), pytest.param("ffcv", 48, marks=pytest.mark.ffcv), ("memory", 24)],
)
def test_the_engine_decodes_an_image_once(name: str, decodes: int, images: Path) -> None:
    """In each epoch; for what stays in memory, once for all of them."""
    done = Forked(count_decodes, name, str(readable(name, images / "train"))).wait()
    assert (done.returncode, done.stdout) == (0, f"{decodes}\n"), done.stderr


def count_decodes(name: str, data: str) -> None:
    """Print how many JPEGs compiled code decodes in two epochs of five views."""

    decoded: list[int] = []
    decode = headers.DECODE(headers.decoder())

    def count(*own: Any) -> int:
        decoded.append(own[1])
        return int(decode(*own))

    counted = headers.DECODE(count)
    place = library.address(counted)
    headers.decoder = lambda: place  # type: ignore[assignment]
    loader = build(name, Path(data), augment=UNEQUAL, workers=2)
    for epoch in range(2):
        assert len(list(loader.epoch(epoch))) == 3
    loader.close()
    print(len(decoded))


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_cifar_equals_torchvision_to_the_last_bit(name: str, cifar10: Path) -> None:
    """Decode, crop, antialiased resize, jitter, gray, blur, flip, normalise."""
    augment = AugmentConfig.alike(crop=32, blur_p=0.5)
    ours, theirs = (
        first(build(n, cifar10 / "test", batch=512, augment=augment), 3)
        for n in (name, "torchvision")
    )
    assert torch.equal(ours.index, theirs.index) and torch.equal(ours.label, theirs.label)
    for view in ("view1", "view2"):
        assert levels(getattr(ours, view), getattr(theirs, view), augment).max() < 1e-3


def test_crops_follow_the_filter_to_the_last_bit() -> None:
    """Against the definition, written out with whole numbers, for boxes that shrink and enlarge."""
    generator = np.random.default_rng(0)
    for height, width in ((40, 90), (90, 40), (7, 5), (300, 300)):
        image = generator.integers(0, 256, (height, width), dtype=np.uint8)
        box = [3, 1, height - 4, width - 2]
        params = draw_views(SMALL, seed=0, epoch=0, index=[0], size=[(height, width)])
        params = replace(
            params,
            box=np.broadcast_to(np.array(box, np.int32), (2, 1, 4)).copy(),
            flip=np.array([[False], [True]]),
        )
        pixels = torch.from_numpy(image.repeat(3))
        size = np.array([(height, width)])
        crops = crop_views(pixels, np.zeros(1, np.int64), size, params, SMALL)[0].numpy()
        part = image[3 : height - 1, 1 : width - 1].astype(np.int64)
        rows_first = height - 4 - 16 <= max(0, 2 * (width - 2 - 16))  # Pillow 13's rule
        if rows_first:
            expected = resized_rows(resized_rows(part, 16).T, 16).T
        else:
            expected = resized_rows(resized_rows(part.T, 16).T, 16)
        for channel in range(3):
            np.testing.assert_array_equal(crops[0, 0, ..., channel], expected)
            np.testing.assert_array_equal(crops[1, 0, ..., channel], expected[:, ::-1])


def resized_rows(rows: np.ndarray, side: int) -> np.ndarray:
    length = rows.shape[1]
    scale = length / side
    support = max(scale, 1.0)
    out = np.empty((len(rows), side), np.int64)
    for x in range(side):
        centre = (x + 0.5) * scale
        weights = [max(0.0, 1 - abs(i + 0.5 - centre) / support) for i in range(length)]
        whole = [int(weight / sum(weights) * 2**22 + 0.5) for weight in weights]
        out[:, x] = (rows @ np.array(whole) + 2**21) >> 22
    return out.clip(0, 255)
