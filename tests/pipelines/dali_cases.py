"""Helpers of the DALI tests: comparison with PIL's crops, and images of every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from fastsiam.pipelines import Store
from fastsiam.pipelines.cuts import Cuts
from fastsiam.pipelines.store.base import warn_once
from fastsiam.pipelines.store.decode import ImageRules
from fastsiam.views.draws import ViewParams
from tests.sources import encoded, jpeg, picture, rotated_jpeg
from tests.views.cases import pil_crop


def skip_dali_checks(patch: pytest.MonkeyPatch) -> None:
    """Pass DALI every image that PIL can open, including GIFs, which it rejects with a warning."""
    from fastsiam.pipelines import dali_backend

    patch.setattr(ImageRules, "needs_pillow", lambda self, head: False)
    patch.setattr(dali_backend, "has_only_entropy_data", lambda data, head: True)
    warn_once.cache_clear()


def pil_crops(
    store: Store, index: NDArray[np.int64], params: ViewParams | Cuts, side: int
) -> NDArray[np.uint8]:
    """Compute the crops (V, N, S, S, 3) with PIL, like torchvision."""
    both = list(zip(params.box, params.flip, strict=True))
    rows = [
        [pil_crop(image, box[row], flip[row], side) for box, flip in both]
        for row, image in enumerate(map(store.decode, index.tolist()))
    ]
    return np.array(rows).swapaxes(0, 1)


def gaps(
    loader: Any, store: Store, side: int, *, epochs: int = 1, skip: int = 0
) -> NDArray[np.int64]:
    """Return the absolute differences from PIL's crops in levels of 255: (2, images, S, S, 3)."""
    differences = [
        np.abs(crops.cpu().numpy().astype(np.int64) - pil_crops(store, index, params, side))
        for epoch in range(epochs)
        for index, params, (crops,) in loader.crops(epoch, skip=skip)
    ]
    return np.concatenate(differences, axis=1)


def encode_16_bit_png(seed: int) -> bytes:
    gray = np.asarray(picture(seed, width=90, height=60).convert("L")).astype(np.uint16)
    return encoded(Image.fromarray(gray * 257), "PNG")


def encode_png_with_alpha(seed: int) -> bytes:
    image = picture(seed, width=90, height=60).convert("RGBA")
    image.putalpha(picture(seed + 100, width=90, height=60).convert("L"))
    return encoded(image, "PNG")


def draw_noisy_picture(seed: int, width: int, height: int) -> Image.Image:
    """Return a picture with fine detail, which exposes differences in resampling."""
    smooth = np.asarray(picture(seed, width=width, height=height)).astype(np.float64)
    grain = np.random.default_rng(seed).normal(0, 25, smooth.shape)
    return Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8))


KINDS: dict[str, Callable[[int], bytes]] = {
    "landscape": lambda i: encoded(draw_noisy_picture(i, 190, 97)),
    "portrait": lambda i: encoded(draw_noisy_picture(i, 83, 201)),
    "4:4:4": lambda i: encoded(draw_noisy_picture(i, 120, 90), subsampling=0),
    "progressive": lambda i: encoded(draw_noisy_picture(i, 120, 90), progressive=True),
    "gray": lambda i: encoded(draw_noisy_picture(i, 120, 90).convert("L")),
    "cmyk": lambda i: encoded(draw_noisy_picture(i, 120, 90).convert("CMYK")),
    "coded as RGB": lambda i: encoded(draw_noisy_picture(i, 120, 90), keep_rgb=True),
    "rotated by EXIF": rotated_jpeg,
    "without a marker": lambda i: b"\xff\xd8\xff\x00" + jpeg(i)[2:],
    "tiny": lambda i: encoded(picture(i, width=3 + i % 3, height=2)),
    "one pixel": lambda i: encoded(picture(i, width=1, height=1)),
    "PNG": lambda i: encoded(draw_noisy_picture(i, 90, 60), "PNG"),
    "PNG with alpha": encode_png_with_alpha,
    "PNG of 16 bits": encode_16_bit_png,
    "PNG with a palette": lambda i: encoded(draw_noisy_picture(i, 90, 60).convert("P"), "PNG"),
    "GIF": lambda i: encoded(draw_noisy_picture(i, 90, 60), "GIF"),
    "WebP": lambda i: encoded(draw_noisy_picture(i, 90, 60), "WEBP"),
}


def write_kinds(folder: Path, *, each: int) -> Path:
    """Write images of every kind in one folder, in the order of ``KINDS``."""
    folder.mkdir(exist_ok=True)
    for kind, make in enumerate(KINDS.values()):
        for number in range(each):
            (folder / f"{each * kind + number:03}.jpg").write_bytes(make(number))
    return folder
