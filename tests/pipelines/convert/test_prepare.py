"""One image on its way into a .beton: what is kept, re-encoded or refused."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from fastsiam.config import ConvertConfig
from fastsiam.pipelines.convert.prepare import prepare
from fastsiam.pipelines.store.beton import JPEG, RAW
from tests.sources import encoded, gray_jpeg, jpeg, picture, rotated_jpeg


def how(data: bytes, **options: object) -> tuple[str, Image.Image]:
    """Return what was done to an image, and how it looks now."""
    record = prepare(data, None, ConvertConfig(**options))  # type: ignore[arg-type]
    if record.mode == RAW:
        pixels = np.frombuffer(record.data, np.uint8).reshape(record.height, record.width, 3)
        return record.how, Image.fromarray(pixels)
    image = Image.open(io.BytesIO(record.data))
    assert image.format == "JPEG" and image.mode == "RGB"
    assert image.size == (record.width, record.height)
    return record.how, image


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
def test_a_plain_jpeg_keeps_its_bytes(data: bytes) -> None:
    record = prepare(memoryview(data), None, ConvertConfig())
    assert record.data == data and record.how == "unchanged" and record.mode == JPEG
    assert (record.width, record.height) == (40, 30)
    assert prepare(data, None, ConvertConfig(max_side=40, short_side=30)).data == data


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encoded(picture(0), "PNG"), "not a JPEG"),
        (encoded(picture(0).convert("CMYK"), quality=95), "CMYK"),
        (jpeg(0, keep_rgb=True, quality=95), "unusual JPEG"),
    ],
)
def test_others_are_encoded_once_and_look_the_same(data: bytes, reason: str) -> None:
    done, image = how(data)
    assert done == f"re-encoded: {reason}"
    source = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    assert np.abs(np.asarray(image) - source).mean() < 5


def test_a_rotation_is_left_out_without_recompression() -> None:
    data = rotated_jpeg(0)
    done, image = how(data)
    assert done == "EXIF rotation left out" and 0x112 not in image.getexif()
    np.testing.assert_array_equal(np.asarray(image), np.asarray(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"max_side": 20}, (20, 15)),
        ({"short_side": 20}, (27, 20)),
        ({"max_side": 20, "short_side": 20}, (20, 15)),
        ({"max_side": 400, "short_side": 15}, (20, 15)),
    ],
)
def test_shrinking(options: dict[str, int], size: tuple[int, int]) -> None:
    data = encoded(picture(0), "JPEG", quality=100, subsampling=0)
    done, image = how(data, quality=100, **options)
    assert done == "re-encoded: resized" and image.size == size
    wanted = Image.open(io.BytesIO(data)).resize(size, Image.Resampling.LANCZOS)
    assert np.abs(np.asarray(image).astype(int) - np.asarray(wanted)).mean() < 6


def test_a_jpeg_that_ends_in_zeros_is_bad() -> None:
    """As a power cut leaves it: Pillow decodes it without a word."""
    data = jpeg(0)
    half = len(data) * 3 // 4
    with pytest.raises(ValueError, match="it has no end marker"):
        prepare(data[:half] + bytes(len(data) - half), None, ConvertConfig())


def test_sides_that_jpeg_cannot_have() -> None:
    png = encoded(Image.new("RGB", (65_520, 1)), "PNG")
    with pytest.raises(ValueError, match="a side above 65,500"):
        prepare(png, None, ConvertConfig())
