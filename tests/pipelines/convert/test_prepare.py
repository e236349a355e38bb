"""Preparation of an image for a .beton file: it is kept, re-encoded or rejected."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
from PIL import Image

from fastsiam.config import ConvertConfig
from fastsiam.kernels import library
from fastsiam.pipelines.convert.prepare import prepare
from fastsiam.pipelines.store.beton import JPEG
from fastsiam.pipelines.store.decode import decode
from tests.sources import encoded, gray_jpeg, insert_junk, jpeg, picture, rotated_jpeg


@pytest.mark.parametrize(
    "data",
    [
        jpeg(0),
        jpeg(0, progressive=True),
        jpeg(0, quality=30, subsampling=0),
        jpeg(0, icc_profile=b"wide gamut" * 9000),
        gray_jpeg(0),
        gray_jpeg(0, progressive=True),
        gray_jpeg(0, sampling=0x41),
        jpeg(0) + b"padding after the end",
    ],
)
def test_plain_jpeg_keeps_its_bytes(data: bytes) -> None:
    for config in (ConvertConfig(), ConvertConfig(max_side=40, short_side=30)):
        record = prepare(memoryview(data), None, config)
        assert record.data == data and record.how == "unchanged" and record.mode == JPEG
        assert (record.width, record.height) == (40, 30)


BEST = encoded(picture(0), "JPEG", quality=100, subsampling=0)


@pytest.mark.parametrize(
    ("data", "done", "options", "size"),
    [
        (encoded(picture(0), "PNG"), "re-encoded: not a JPEG", {}, (40, 30)),
        (encoded(picture(0).convert("CMYK"), quality=95), "re-encoded: CMYK", {}, (40, 30)),
        (jpeg(0, keep_rgb=True, quality=95), "re-encoded: unusual JPEG", {}, (40, 30)),
        (insert_junk(jpeg(0, quality=95)), "re-encoded: damaged header", {}, (40, 30)),
        (rotated_jpeg(0), "EXIF rotation left out", {}, (40, 30)),
        (BEST, "re-encoded: resized", {"max_side": 20}, (20, 15)),
        (BEST, "re-encoded: resized", {"short_side": 20}, (27, 20)),
        (BEST, "re-encoded: resized", {"max_side": 20, "short_side": 20}, (20, 15)),
        (BEST, "re-encoded: resized", {"max_side": 400, "short_side": 15}, (20, 15)),
    ],
)
def test_other_images_are_reencoded_faithfully(
    data: bytes, done: str, options: dict[str, int], size: tuple[int, int]
) -> None:
    """They are encoded once, or not at all if only an EXIF rotation is removed."""
    record = prepare(data, None, ConvertConfig(quality=100 if options else 90, **options))  # type: ignore[arg-type]
    image = Image.open(io.BytesIO(record.data))
    assert record.how == done and image.format == "JPEG" and image.mode == "RGB"
    assert image.size == (record.width, record.height) == size and 0x112 not in image.getexif()
    expected = Image.open(io.BytesIO(data)).convert("RGB")
    if size != expected.size:
        expected = expected.resize(size, Image.Resampling.LANCZOS)
    gap = np.abs(np.asarray(image).astype(int) - np.asarray(expected)).mean()
    assert gap < (6 if "encoded" in done else 1e-9)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        # As after a power cut: Pillow decodes it without an error.
        (jpeg(0)[: len(jpeg(0)) * 3 // 4] + bytes(len(jpeg(0)) // 4), "it has no end marker"),
        (encoded(Image.new("RGB", (65_520, 1)), "PNG"), "a side above 65,500"),
    ],
)
def test_invalid_images_are_rejected(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(data, None, ConvertConfig())


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("progressive", [False, True])
def test_corrupt_jpeg_is_rejected_if_pillow_rejects_it(
    progressive: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its header, tables or code are corrupt. JPEGs that Pillow reads keep their bytes."""
    if not compiled:
        monkeypatch.setattr(library, "kernels_if_any", lambda: None)
    intact, rng, refused = jpeg(0, progressive=progressive), random.Random(0), 0
    for _ in range(200):
        data, size = bytearray(intact), rng.choice([1, 2, 64])
        place = rng.randrange(2, len(data) - size - 2)
        data[place : place + size] = rng.randbytes(size)
        try:
            decode(bytes(data))
        except ValueError:
            refused += 1
            with pytest.raises(ValueError, match=r"."):
                prepare(bytes(data), None, ConvertConfig())
        else:
            record = prepare(bytes(data), None, ConvertConfig())
            assert record.data == bytes(data) or record.how != "unchanged"
    assert 20 < refused < 180
