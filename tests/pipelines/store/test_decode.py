"""Bit depths, transparency, orientation, channels and pages: what each becomes (docs/data.md)."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from fastsiam.config import ConvertConfig, DataConfig
from fastsiam.errors import DataError
from fastsiam.pipelines import open_split
from fastsiam.pipelines.convert.command import convert_data
from fastsiam.pipelines.store import BetonStore
from fastsiam.pipelines.store.decode import ImageRules, decode
from fastsiam.pipelines.store.probe import Flags, probe
from tests.sources import encoded, picture

ALL_16_BITS = np.arange(65536, dtype=np.uint16).reshape(256, 256)
TO_8_BITS = np.rint(ALL_16_BITS.astype(float) * 255 / 65535).astype(np.uint8)
TAGS = {"compression": 259, "planar": 284, "format": 339}
RGBA = np.dstack([np.asarray(picture(0)), np.asarray(picture(1).convert("L"))])


def tiff(
    samples: bytes,
    height: int,
    width: int,
    *,
    bits: tuple[int, ...],
    kind: int,
    extra: int | None = None,
    strips: int = 1,
    order: str = "<",
    tags_by_name: Mapping[str, int] | None = None,
) -> bytes:
    """Write a TIFF.

    Args:
        bits: of each channel.
        kind: PhotometricInterpretation; 0 is "white is zero", 1 "black is zero", 2 RGB.
        extra: ExtraSamples of each channel beyond those of the kind; None without extra channels.
        strips: how many of equal size.
        order: of bytes, "<" or ">".
        tags_by_name: values of further tags.
    """
    shorts = {256: (width,), 257: (height,), 258: bits, 259: (1,), 262: (kind,), 277: (len(bits),)}
    shorts |= {278: (height,)}
    if extra is not None:
        shorts[338] = (extra,) * (len(bits) - (3 if kind == 2 else 1))
    shorts |= {TAGS[name]: (value,) for name, value in (tags_by_name or {}).items()}
    entries, behind, start = [], b"", 8 + 2 + 12 * (len(shorts) + 2) + 4
    tags = {tag: (3, values) for tag, values in shorts.items()}
    at = start + sum(2 * len(values) for values in shorts.values() if len(values) > 2)
    at, size = at + 8 * strips * (strips > 1), len(samples) // strips
    tags |= {273: (4, tuple(at + size * n for n in range(strips))), 279: (4, (size,) * strips)}
    for tag, (form, values) in sorted(tags.items()):
        value = struct.pack(f"{order}{len(values)}{'H' if form == 3 else 'I'}", *values)
        if len(value) > 4:
            behind, value = behind + value, struct.pack(f"{order}I", start + len(behind))
        entries.append(struct.pack(f"{order}HHI4s", tag, form, len(values), value.ljust(4, b"\0")))
    head = (
        (b"II*\0" if order == "<" else b"MM\0*")
        + struct.pack(f"{order}IH", 8, len(entries))
        + b"".join(entries)
        + bytes(4)
    )
    return head + behind + samples


def gray(data: bytes) -> NDArray[np.uint8]:
    pixels = np.asarray(decode(data))
    assert pixels.dtype == np.uint8 and (pixels == pixels[..., :1]).all()
    return pixels[..., 0]


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_16_bit_gray_is_scaled_by_its_range(form: str) -> None:
    data = encoded(Image.fromarray(ALL_16_BITS), form)
    assert np.array_equal(gray(data), TO_8_BITS)
    assert probe(data).flags & Flags.DEEP


def test_12_bits_have_a_range_of_their_own() -> None:
    pairs = np.array([0x000, 0xFFF, 0x7FF, 0x800], np.uint16).reshape(2, 2)
    packed = b"".join(bytes([a >> 4, (a & 15) << 4 | b >> 8, b & 255]) for a, b in pairs.tolist())
    assert gray(tiff(packed, 2, 2, bits=(12,), kind=1)).tolist() == [
        [0, 255],
        [127, 128],
    ]


def test_floats_of_0_to_1_are_scaled() -> None:
    values = np.linspace(0, 1, 511, dtype=np.float32)[None]
    expected = np.floor(values.astype(np.float64) * 255 + 0.5)
    assert np.array_equal(gray(encoded(Image.fromarray(values), "TIFF")), expected)


@pytest.mark.parametrize("value", [-0.01, float("nan")])
def test_floats_of_another_range_are_refused_with_the_way_out(value: float, tmp_path: Path) -> None:
    (tmp_path / "x.tif").write_bytes(
        encoded(Image.fromarray(np.array([[0, value]], np.float32)), "TIFF")
    )
    with pytest.raises(DataError, match=r"floats from .* to .*scale.*fastsiam convert folder"):
        open_split(DataConfig(data=str(tmp_path)), "train").decode(0)


@pytest.mark.parametrize("kind", [np.int8, np.int16, np.int32, np.uint32])
def test_integers_of_unknown_range_are_refused(kind: type[np.integer]) -> None:
    values = np.array([[1, 100]], kind)
    signed = 1 + np.issubdtype(kind, np.signedinteger)
    with pytest.raises(ValueError, match="signed or 32-bit integers, whose range is unknown"):
        decode(
            tiff(
                values.tobytes(),
                1,
                2,
                bits=(8 * values.itemsize,),
                kind=1,
                tags_by_name={"format": int(signed)},
            )
        )


def test_colours_of_16_bits_keep_their_high_bytes() -> None:
    values = np.random.default_rng(0).integers(0, 65536, (4, 5, 3), np.uint16)
    data = tiff(values.tobytes(), 4, 5, bits=(16,) * 3, kind=2)
    assert np.array_equal(np.asarray(decode(data)), values >> 8)
    assert probe(data).flags & Flags.DEEP
    data = b"P6 5 4 65535\n" + values.astype(">u2").tobytes()
    assert np.array_equal(np.asarray(decode(data)), np.rint(values / 257.0))


def test_channels_in_planes_of_their_own_are_read_or_refused() -> None:
    values = np.random.default_rng(0).integers(0, 65536, (3, 4, 5), np.uint16)
    eight, planar = (values >> 8).astype(np.uint8), {"planar": 2}
    data = tiff(eight.tobytes(), 4, 5, bits=(8,) * 3, kind=2, strips=3, tags_by_name=planar)
    assert np.array_equal(np.asarray(decode(data)), np.moveaxis(eight, 0, -1))
    data = tiff(values.tobytes(), 4, 5, bits=(16,) * 3, kind=2, strips=3, tags_by_name=planar)
    with pytest.raises(ValueError, match=r"a TIFF that Pillow misreads .*16-bit planes"):
        decode(data)


def test_channels_beyond_the_colours_are_left_out() -> None:
    values = np.random.default_rng(0).integers(0, 256, (4, 5, 5), np.uint8)
    five = tiff(values.tobytes(), 4, 5, bits=(8,) * 5, kind=2, extra=0)
    two = tiff(values[..., :2].tobytes(), 4, 5, bits=(8,) * 2, kind=1, extra=0)
    for alpha in ("drop", "white"):
        rules = ImageRules(alpha=alpha)
        assert np.array_equal(np.asarray(decode(five, rules=rules)), values[..., :3])
        assert np.array_equal(np.asarray(decode(two, rules=rules))[..., 0], values[..., 0])


def test_other_tiffs_are_refused() -> None:
    data = tiff(bytes(80), 4, 5, bits=(16,) * 2, kind=1, extra=0)
    with pytest.raises(ValueError, match="it is a TIFF that Pillow does not read; save it as"):
        decode(data)


@pytest.mark.parametrize(
    ("form", "mode"), [("PNG", "RGBA"), ("PNG", "LA"), ("WEBP", "RGBA"), ("PNG", "P")]
)
def test_transparency_is_dropped_or_laid_over_a_colour(form: str, mode: str) -> None:
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
        found = np.asarray(decode(data, rules=ImageRules(alpha=colour))).astype(float)  # type: ignore[arg-type]
        assert np.abs(found - (full[..., :3] * share + value * (1 - share))).max() <= 1


@pytest.mark.parametrize(
    ("form", "orientation"),
    [*(("JPEG", number) for number in range(1, 9)), ("PNG", 6), ("WEBP", 5), ("TIFF", 6)],
)
def test_orientation_is_applied_on_request(form: str, orientation: int) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture(2, width=60, height=40), form, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    rules = ImageRules(exif="apply")
    assert np.array_equal(np.asarray(decode(data, rules=rules)), np.asarray(upright))
    assert rules.size(probe(data)) == (upright.height, upright.width)
    if form != "TIFF":  # Pillow itself turns these
        assert decode(data).size == (60, 40)
        assert np.array_equal(
            np.asarray(decode(data)), np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        )


def test_the_first_page_or_frame_is_taken() -> None:
    pages = [picture(n) for n in range(3)]
    for form in ("TIFF", "GIF", "WEBP", "PNG"):
        data = encoded(pages[0], form, save_all=True, append_images=pages[1:], lossless=True)
        first = Image.open(io.BytesIO(data))
        assert first.n_frames == 3  # type: ignore[attr-defined]
        assert np.array_equal(np.asarray(decode(data)), np.asarray(first.convert("RGB")))


def test_conversion_applies_the_rules_and_training_warns_of_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a.jpg").write_bytes(encoded(picture(0, width=60, height=40), "JPEG", exif=exif))
    (folder / "b.png").write_bytes(encoded(Image.fromarray(RGBA), "PNG"))
    (folder / "c.png").write_bytes(encoded(Image.fromarray(ALL_16_BITS), "PNG"))
    rules = ImageRules(exif="apply", alpha="white")
    for name, config in {
        "plain": ConvertConfig(source=str(folder), out=str(tmp_path / "plain"), raw=True),
        "ruled": ConvertConfig(
            source=str(folder), out=str(tmp_path / "ruled"), raw=True, exif="apply", alpha="white"
        ),
    }.items():
        convert_data("folder", config)
        store = BetonStore(tmp_path / name / "train.beton")
        for i, file in enumerate(sorted(folder.iterdir())):
            expected = decode(file.read_bytes(), rules=rules if name == "ruled" else ImageRules())
            assert np.array_equal(np.asarray(store.decode(i)), np.asarray(expected))
    caplog.clear()
    ruled, plain = (
        DataConfig(data=str(tmp_path / name), exif="apply") for name in ("ruled", "plain")
    )
    open_split(ruled, "train")
    assert not caplog.records
    open_split(plain, "train")
    assert "--exif apply has no effect" in caplog.text
