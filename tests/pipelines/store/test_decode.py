"""Decoding of bit depths, transparency, orientation, channels and pages (see docs/data.md)."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, TiffImagePlugin

from fastsiam.config import DataConfig
from fastsiam.errors import DataError
from fastsiam.pipelines import open_split, open_store
from fastsiam.pipelines.store.decode import ImageRules, decode
from fastsiam.pipelines.store.probe import Flags, probe
from tests.data_formats import write_converted
from tests.sources import encoded, picture, put, rotated_jpeg

ALL_16_BITS = np.arange(65536, dtype=np.uint16).reshape(256, 256)
PLANAR, EXTRA, FORMAT = 284, 338, 339
RGBA = np.dstack([np.asarray(picture(0)), np.asarray(picture(1).convert("L"))])


def tiff(
    samples: bytes,
    height: int,
    width: int,
    *,
    bits: tuple[int, ...],
    kind: int,
    strips: int = 1,
    tags: Mapping[int, Any] | None = None,
) -> bytes:
    """Return an uncompressed TIFF of the given samples.

    Args:
        bits: Bits of each channel.
        kind: PhotometricInterpretation; 0 is "white is zero", 1 "black is zero", 2 RGB.
        strips: Number of strips of equal size.
        tags: Values of additional tags, such as ``EXTRA``.
    """
    size, directory = len(samples) // strips, TiffImagePlugin.ImageFileDirectory_v2()
    values = {256: width, 257: height, 258: bits, 259: 1, 262: kind, 277: len(bits), 278: height}
    values |= {273: tuple(size * n for n in range(strips)), 279: (size,) * strips}
    for tag, value in (values | dict(tags or {})).items():
        directory[tag] = value
    return b"II*\0\x08\0\0\0" + directory.tobytes(8) + samples


RANDOM = np.random.default_rng(0).integers(0, 65536, (4, 5, 5), np.uint16)
EIGHT = RANDOM.astype(np.uint8)
FLOATS = np.linspace(0, 1, 511, dtype=np.float32)[None]


def gray(values: NDArray[Any]) -> NDArray[np.uint8]:
    return np.repeat(values[..., None], 3, axis=2).astype(np.uint8)


def planes(values: NDArray[Any]) -> bytes:
    """Return a TIFF of colours (H, W, 3) with a separate plane for each channel."""
    channels = np.moveaxis(values[..., :3], -1, 0)
    bits = (8 * values.itemsize,) * 3
    return tiff(channels.tobytes(), 4, 5, bits=bits, kind=2, strips=3, tags={PLANAR: 2})


def integers(kind: type[np.integer]) -> bytes:
    """Return a TIFF of two integers of a type whose range is unknown."""
    values, signed = np.array([[1, 100]], kind), 1 + np.issubdtype(kind, np.signedinteger)
    bits = (8 * values.itemsize,)
    return tiff(values.tobytes(), 1, 2, bits=bits, kind=1, tags={FORMAT: int(signed)})


DECODED: dict[str, tuple[bytes, NDArray[Any]]] = {
    **{
        f"gray of 16 bits in {form}": (
            encoded(Image.fromarray(ALL_16_BITS), form),
            gray(np.rint(ALL_16_BITS.astype(float) * 255 / 65535)),
        )
        for form in ("PNG", "TIFF", "PPM")
    },
    "12 bits": (
        tiff(b"\x00\x0f\xff\x7f\xf8\x00", 2, 2, bits=(12,), kind=1),
        gray(np.array([[0, 255], [127, 128]])),
    ),
    "floats": (
        encoded(Image.fromarray(FLOATS), "TIFF"), gray(np.floor(FLOATS.astype(float) * 255 + 0.5))
    ),
    "colours of 16 bits keep their high bytes": (
        tiff(RANDOM[..., :3].tobytes(), 4, 5, bits=(16,) * 3, kind=2), RANDOM[..., :3] >> 8
    ),
    "colours of 16 bits in PPM": (
        b"P6 5 4 65535\n" + RANDOM[..., :3].astype(">u2").tobytes(), np.rint(RANDOM[..., :3] / 257)
    ),
    "planes": (planes(EIGHT), EIGHT[..., :3]),
    "channels beyond the colours": (
        tiff(EIGHT.tobytes(), 4, 5, bits=(8,) * 5, kind=2, tags={EXTRA: (0, 0)}), EIGHT[..., :3]
    ),
    "gray with associated alpha": (
        tiff(bytes([50, 255, 0, 255]), 1, 2, bits=(8,) * 2, kind=1, tags={EXTRA: 1}),
        gray(np.array([[50, 0]])),
    ),
    "channels beyond gray": (
        tiff(EIGHT[..., :2].tobytes(), 4, 5, bits=(8,) * 2, kind=1, tags={EXTRA: 0}),
        gray(EIGHT[..., 0]),
    ),
}  # fmt: skip
REFUSED: dict[str, tuple[bytes, str]] = {
    **{
        str(kind): (integers(kind), "signed or 32-bit integers, whose range is unknown")
        for kind in (np.int8, np.int16, np.int32, np.uint32)
    },
    "planes of 16 bits": (planes(RANDOM), r"a TIFF that Pillow misreads .*16-bit planes"),
    "16 bits and more": (
        tiff(bytes(80), 4, 5, bits=(16,) * 2, kind=1, tags={EXTRA: 0}),
        "it is a TIFF that Pillow does not read; save it as",
    ),
    "more than six channels": (
        tiff(bytes(140), 4, 5, bits=(8,) * 7, kind=2, tags={EXTRA: (0,) * 4}),
        "it is a TIFF that Pillow does not read; save it as",
    ),
    **{
        f"floats down to {value}": (
            encoded(Image.fromarray(np.array([[0, value]], np.float32)), "TIFF"),
            r"floats from .* to .*scale.*fastsiam convert folder",
        )
        for value in (-0.01, float("nan"))
    },
}


@pytest.mark.parametrize("kind", DECODED)
def test_pixels_of_every_mode_and_bit_depth(kind: str) -> None:
    """Each bit depth has its own range. Channels beyond the colours are dropped."""
    data, expected = DECODED[kind]
    for alpha in ("drop", "white"):
        rules = ImageRules(alpha=alpha)
        assert np.array_equal(np.asarray(decode(data, rules=rules)), expected)
    deep = kind.startswith(("gray of 16", "colours of 16 bits keep"))
    assert not deep or probe(data).flags & Flags.DEEP


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_images_are_rejected_with_advice(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, message = REFUSED[kind]
    (tmp_path / "x.tif").write_bytes(data)
    with pytest.raises(DataError, match=message):
        open_split(DataConfig(data=str(tmp_path)), "train").decode(0)
    assert not caplog.records  # Pillow's warnings are suppressed


@pytest.mark.parametrize(
    ("form", "mode"), [("PNG", "RGBA"), ("PNG", "LA"), ("WEBP", "RGBA"), ("PNG", "P")]
)
def test_transparency_is_dropped_or_composited(form: str, mode: str) -> None:
    image = Image.fromarray(RGBA)
    if mode == "P":
        image = image.convert("RGB").quantize(16)
        data = encoded(image, form, transparency=3)
    else:
        image = image.convert(mode)
        data = encoded(image, form, lossless=True, exact=True)
    full = np.asarray(Image.open(io.BytesIO(data)).convert("RGBA")).astype(float)
    assert (full[..., 3] < 255).any() and probe(data).flags & Flags.TRANSPARENT
    assert np.array_equal(np.asarray(decode(data)), full[..., :3])
    share = full[..., 3:] / 255
    for colour, value in (("white", 255), ("black", 0)):
        decoded = np.asarray(decode(data, rules=ImageRules(alpha=colour))).astype(float)  # type: ignore[arg-type]
        assert np.abs(decoded - (full[..., :3] * share + value * (1 - share))).max() <= 1


@pytest.mark.parametrize(
    ("form", "orientation"),
    [*(("JPEG", number) for number in range(1, 9)), ("PNG", 6), ("WEBP", 5), ("TIFF", 6)],
)
def test_exif_orientation_is_applied_on_request(form: str, orientation: int) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture(2, width=60, height=40), form, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    rules = ImageRules(exif="apply")
    assert np.array_equal(np.asarray(decode(data, rules=rules)), np.asarray(upright))
    assert rules.size(probe(data)) == (upright.height, upright.width)
    if form != "TIFF":  # Pillow itself applies it to TIFFs
        assert decode(data).size == (60, 40)
        assert np.array_equal(
            np.asarray(decode(data)), np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        )


def test_transparent_16_bit_value_is_composited() -> None:
    """GDAL marks missing pixels like this. Other values with the same high byte are opaque."""
    data = encoded(Image.fromarray(ALL_16_BITS), "PNG", transparency=0x1234)
    assert probe(data).flags & Flags.TRANSPARENT
    for alpha, value in (("drop", 18), ("white", 255), ("black", 0)):
        expected = np.rint(ALL_16_BITS.astype(float) * 255 / 65535)
        expected[0x12, 0x34] = value
        decoded = decode(data, rules=ImageRules(alpha=alpha))  # type: ignore[arg-type]
        assert np.array_equal(np.asarray(decoded), gray(expected))


def test_first_page_or_frame_is_decoded() -> None:
    pages = [picture(n) for n in range(3)]
    for form in ("TIFF", "GIF", "WEBP", "PNG"):
        data = encoded(pages[0], form, save_all=True, append_images=pages[1:], lossless=True)
        first = Image.open(io.BytesIO(data))
        assert first.n_frames == 3  # type: ignore[attr-defined]
        assert np.array_equal(np.asarray(decode(data)), np.asarray(first.convert("RGB")))


def test_conversion_applies_image_rules(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "images"
    put(folder / "a.jpg", rotated_jpeg(0))
    put(folder / "b.png", encoded(Image.fromarray(RGBA), "PNG"))
    put(folder / "c.png", encoded(Image.fromarray(ALL_16_BITS), "PNG"))
    for name, options in (("plain", {}), ("ruled", {"exif": "apply", "alpha": "white"})):
        store = open_store(write_converted(folder, tmp_path / name, raw=True, **options), "train")
        rules = ImageRules(**options)  # type: ignore[arg-type]
        for i, file in enumerate(sorted(folder.iterdir())):
            expected = decode(file.read_bytes(), rules=rules)
            assert np.array_equal(np.asarray(store.decode(i)), np.asarray(expected))
        open_split(DataConfig(data=str(tmp_path / name), exif="apply"), "train")
        assert ("--exif apply has no effect" in caplog.text) == (name == "plain")
        caplog.clear()
