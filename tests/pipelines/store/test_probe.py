"""The parser of image headers agrees with Pillow on every kind of image."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from fastsiam.kernels import library
from fastsiam.pipelines.store.probe import Flags, ends, has_only_entropy_data, probe
from tests.sources import encoded, jpeg, picture, rotated_jpeg


@pytest.mark.parametrize(
    ("data", "flags"),
    [
        (jpeg(0), 0),
        (jpeg(0, progressive=True), Flags.PROGRESSIVE),
        (jpeg(0, subsampling=0), 0),
        (jpeg(0, icc_profile=b"wide gamut" * 9000), 0),
        (encoded(picture(0).convert("L")), Flags.GRAY),
        (encoded(picture(0).convert("CMYK")), Flags.CMYK),
        (jpeg(0, keep_rgb=True), Flags.UNUSUAL),
        (rotated_jpeg(0), Flags.ROTATED),
        (encoded(picture(0), "PNG"), Flags.NOT_JPEG),
        (encoded(picture(0).convert("RGBA"), "WEBP"), Flags.NOT_JPEG),
    ],
)
def test_probe_finds_size_and_flags(data: bytes, flags: int) -> None:
    header = probe(memoryview(data))
    with Image.open(io.BytesIO(data)) as image:
        assert (header.width, header.height) == image.size
    assert header.flags == flags


def test_thumbnail_end_marker_is_ignored() -> None:
    """The thumbnail in the EXIF data has its own end marker."""
    body = jpeg(0)
    segment = b"Exif\x00\x00" + jpeg(1)
    data = body[:2] + b"\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment + body[2:]
    assert ends(data, probe(data).scan)
    assert not ends(data[:-200], probe(data).scan)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it is empty"),
        (b"this is no image", "it is not an image"),
        (jpeg(0)[:100], "truncated within its header"),
        (b"\xff\xd8" + b"\x00" * 50, "header is damaged"),
        (b"\xff\xd8\xff\xc0\x00\x02", "header is damaged"),  # ends where the channels would be
        (
            jpeg(0).replace(b"\xff\xc0\x00\x11\x08\x00\x1e", b"\xff\xc0\x00\x11\x08\x00\x00"),
            "has no image size",
        ),
    ],
)
def test_invalid_headers_are_rejected_with_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        probe(data)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("progressive", [False, True])
def test_markers_inside_entropy_data_are_detected(
    progressive: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Valid markers are the end, restarts and, in a progressive image, further scans."""
    if not compiled:
        monkeypatch.setattr(library, "kernels_if_any", lambda: None)
    data = jpeg(1, progressive=progressive, restart_marker_blocks=1)
    head = probe(data)
    assert b"\xff\xd3" in data[head.scan :]
    for valid in (data, data + b"padding", data[:-2] + b"\xff" + data[-2:]):
        assert has_only_entropy_data(memoryview(valid), head)
    assert not has_only_entropy_data(data[:-2], head) and not has_only_entropy_data(data[:-1], head)
    assert not has_only_entropy_data(data[: len(data) // 2], head)
    middle = data.index(b"\xff\xd3", head.scan)
    for marker in (0x05, 0xC0, 0xD8, 0xE1, 0xFE):
        assert not has_only_entropy_data(
            data[:middle] + bytes((0xFF, marker)) + data[middle:], head
        )
    table = data[:middle] + b"\xff\xc4\x00\x02" + data[middle:]
    assert has_only_entropy_data(table, head) == progressive
    assert not has_only_entropy_data(data[:middle] + b"\xff\xc4", head)
    assert not has_only_entropy_data(data[:middle] + b"\xff\xc4\xff\xff", head)
