"""The part of a JPEG that a box needs is decoded exactly as by PIL, or rejected."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fastsiam.kernels import library
from tests.conftest import skip
from tests.sources import encoded
from tests.tiers import rest_slow, slow

from .decoders import Box, decode
from .jpegs import Sampling, jpeg

SAMPLINGS: dict[str, Sampling] = {
    "gray": [(1, 1)],
    "gray of 2x2": [(2, 2)],
    "4:4:4": [(1, 1)] * 3,
    "4:2:2": [(2, 1), (1, 1), (1, 1)],
    "4:2:0": [(2, 2), (1, 1), (1, 1)],
    "4:4:0": [(1, 2), (1, 1), (1, 1)],
    "4:1:1": [(4, 1), (1, 1), (1, 1)],
    "4:1:0": [(4, 2), (1, 1), (1, 1)],
    "4:4:1": [(1, 4), (1, 1), (1, 1)],
    "3x1": [(3, 1), (1, 1), (1, 1)],
    "1x3": [(1, 3), (1, 1), (1, 1)],
    "4:4:4 of 2x2": [(2, 2), (2, 1), (2, 2)],
    "coarse luma": [(1, 1), (2, 2), (2, 2)],
    "crossed": [(1, 2), (2, 1), (2, 1)],
    "one coarse": [(2, 2), (2, 1), (1, 2)],
    "one fine": [(2, 2), (1, 1), (2, 2)],
    "three widths": [(4, 1), (2, 1), (1, 1)],
}
KINDS: dict[str, dict[str, Any]] = {
    "one scan": {},
    "restarts": {"restart": 5},
    "scan by scan": {"scans": [([i], 0, 63) for i in range(3)]},
    "progressive": {
        "frame": 0xC2,
        "scans": [
            ([0, 1, 2], 0, 0),
            *[([i], *band) for band in ((1, 5), (6, 63)) for i in range(3)],
        ],
    },
}
SIZES = [(150, 201), (64, 300), (300, 64), (129, 130), (33, 47), (16, 17), (9, 5), (2, 3), (1, 1)]


@pytest.fixture(autouse=True)
def require_decoder() -> None:
    if library.jpeg() is None:
        skip("needs kernels that were compiled with libjpeg-turbo's header")


def boxes(height: int, width: int, count: int, seed: int = 0) -> list[Box]:
    """Return the entire image, its borders, random single pixels and random boxes."""
    generator = np.random.default_rng(seed)
    drawn_boxes: list[Box] = [
        (0, 0, height, width),
        (0, 0, 1, 1),
        (height - 1, width - 1, height, width),
        (0, width - 1, 1, width),
        (height - 1, 0, height, 1),
        (0, 0, (height + 1) // 2, width),
        (0, width // 2, height, width),
    ]
    for turn in range(count):
        top, left = int(generator.integers(height)), int(generator.integers(width))
        tall, wide = 1, 1
        if turn % 3:
            tall = int(generator.integers(1, height - top + 1))
            wide = int(generator.integers(1, width - left + 1))
        drawn_boxes.append((top, left, top + tall, left + wide))
    return drawn_boxes


def cut(pixels: np.ndarray, box: Box) -> np.ndarray:
    return pixels[box[0] : box[2], box[1] : box[3]]


def decode_with_pil(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def assert_equal_pil(data: bytes, count: int, seed: int = 0) -> None:
    """Compare the pixels of many boxes of a JPEG with PIL's."""
    expected = decode_with_pil(data)
    for box in boxes(expected.shape[0], expected.shape[1], count, seed):
        decoded = decode(data, box)
        assert decoded is not None, box
        np.testing.assert_array_equal(decoded[0], cut(expected, box), str(box))


def encode_jpeg(height: int, width: int, name: str, kind: str) -> bytes:
    """Encode a JPEG of a sampling and a kind. Gray ones have only the first component's scans."""
    sampling, settings = SAMPLINGS[name], dict(KINDS[kind])
    if len(sampling) == 1 and "scans" in settings:
        settings["scans"] = [([0], *scan[1:]) for scan in settings["scans"] if 0 in scan[0]]
    return jpeg(height, width, sampling, **settings)


@pytest.mark.parametrize(("height", "width"), rest_slow(SIZES))
@pytest.mark.parametrize("kind", KINDS)
def test_every_sampling_is_decoded_exactly(kind: str, height: int, width: int) -> None:
    for name in SAMPLINGS:
        assert_equal_pil(encode_jpeg(height, width, name, kind), 40)


def encode_with_pil(
    mode: str = "RGB", size: tuple[int, int] = (150, 200), **settings: Any
) -> bytes:
    """Return a JPEG written by PIL, of smooth colours with some noise."""
    height, width = size
    generator = np.random.default_rng(0)
    across, down = np.meshgrid(np.linspace(0, 9, width), np.linspace(0, 7, height))
    waves = np.stack([np.sin(across + i * down) for i in range(len(mode))], -1)
    levels = waves * 90 + 128 + generator.normal(0, 9, waves.shape)
    image = Image.fromarray(levels.clip(0, 255).astype(np.uint8).squeeze(), mode=mode)
    return encoded(image, **settings)


PIL_SETTINGS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "gray": {"mode": "L"},
    "RGB": {"keep_rgb": True},
    "best": {"quality": 100, "subsampling": 0, "optimize": True},
    "worst": {"quality": 1},
    "progressive": {"progressive": True, "subsampling": 1},
    "restarts": {"restart_marker_rows": 1},
}


@pytest.mark.parametrize("name", PIL_SETTINGS)
def test_jpegs_written_by_pil_are_decoded_exactly(name: str) -> None:
    data = encode_with_pil(**PIL_SETTINGS[name])
    assert_equal_pil(data, 40)
    assert_equal_pil(data + b"\0" * 3, 3)


def test_decoder_skips_rows_and_columns_outside_box() -> None:
    """Rows above the box are not output, nor columns next to it beyond one iMCU."""
    decoded = decode(jpeg(300, 400, SAMPLINGS["4:2:0"]), (200, 128, 220, 240))
    assert decoded is not None
    assert (decoded[1].top, decoded[1].left, decoded[1].pitch) == (200, 112, 3 * 144)


@pytest.mark.parametrize("count", [1, slow(20)])
def test_real_images_are_decoded_exactly(count: int, real_images: Path) -> None:
    paths = sorted(real_images.rglob("*.JPEG"))
    assert paths
    for turn, path in enumerate(paths[:: 1 if count > 1 else 25]):
        assert_equal_pil(path.read_bytes(), count, turn)


GOOD = encode_with_pil(subsampling=2)
SCAN = GOOD.index(b"\xff\xda")
REJECTED_JPEGS = {
    "empty": b"",
    "no JPEG": b"\x89PNG" + GOOD,
    "header alone": GOOD[:SCAN],
    "cut off": GOOD[: SCAN + 3000],
    "cut off in the header": GOOD[:100],
    "cut off before the end": GOOD[:-2],
    "zeros for the end": GOOD[:-2] + b"\0\0",
    "bytes before a marker": GOOD[:2] + b"\1\2\3" + GOOD[2:],
    "a scan that is cut off": GOOD[:-2] + GOOD[SCAN : SCAN + 300],
    "CMYK": encode_with_pil("CMYK"),
    "YCCK": jpeg(150, 200, [(1, 1)] * 4, adobe=2),
    "two colours": jpeg(150, 200, [(1, 1)] * 2),
    "sampling by 3 to 2": jpeg(150, 200, [(3, 1), (2, 1), (1, 1)]),
    "twelve bits": GOOD.replace(b"\xff\xc0\0\x11\x08", b"\xff\xc1\0\x11\x0c"),
    # Versions of libjpeg-turbo smooth missing coefficients differently.
    "smoothed": jpeg(150, 200, SAMPLINGS["4:4:4"], frame=0xC2, scans=[([0, 1, 2], 0, 0)]),
}


def test_unsupported_and_corrupt_jpegs_are_rejected(capfd: pytest.CaptureFixture[str]) -> None:
    """They are rejected for any box. The decoder stays usable, and nothing is printed."""
    for name, data in REJECTED_JPEGS.items():
        for box in [(0, 0, 1, 1), (20, 30, 40, 50), (0, 0, 150, 200)]:
            assert decode(data, box, (150, 200)) is None, name
        assert_equal_pil(GOOD, 1)
    for size in [(149, 200), (150, 201), (200, 150), (75, 100)]:
        assert decode(GOOD, (0, 0, 1, 1), size) is None
    assert capfd.readouterr() == ("", "")


def test_tables_of_previous_image_are_not_reused() -> None:
    """Images without quantisation tables are rejected. Huffman tables have a default, as in PIL."""
    for marker in (0xDB, 0xC4):
        at = GOOD.index(bytes([0xFF, marker]))
        length = int.from_bytes(GOOD[at + 2 : at + 4], "big")
        lacking = GOOD[:at] + GOOD[at + 2 + length :]
        assert_equal_pil(encode_with_pil(quality=30, optimize=True), 1)
        if marker == 0xDB:
            assert decode(lacking, (0, 0, 20, 20), (150, 200)) is None
        else:
            assert_equal_pil(lacking, 1)


@pytest.mark.parametrize("seed", range(3))
def test_corrupt_jpeg_is_rejected_or_decoded_as_by_pil(seed: int) -> None:
    """Corruption below the box may go unnoticed: the pixels of the box are equal to PIL's."""
    generator = np.random.default_rng(seed)
    refused = 0
    for _ in range(150):
        damaged = bytearray(GOOD)
        for at in generator.integers(SCAN + 14, len(GOOD), 2):
            damaged[at] = generator.choice((0, 0xFF, 0xD9, int(generator.integers(256))))
        top = int(generator.integers(100))
        box = (top, 0, top + 30, 200)
        decoded = decode(bytes(damaged), box)
        if decoded is None:
            assert decode(bytes(damaged)) is None
            refused += 1
        else:
            np.testing.assert_array_equal(decoded[0], cut(decode_with_pil(bytes(damaged)), box))
    assert refused > 10


def test_concurrent_threads_decode_exactly() -> None:
    """Each thread has its own decoder, which is freed when the thread ends."""
    data = [encode_with_pil(size=(90 + i, 130), subsampling=i % 3) for i in range(6)]
    expected = [decode_with_pil(content) for content in data]

    def work(turn: int) -> None:
        for i in range(30):
            number = (turn + i) % len(data)
            box = (i, turn, 60 + i, 90 + turn)
            decoded = decode(data[number], box)
            assert decoded is not None
            np.testing.assert_array_equal(decoded[0], cut(expected[number], box))
            assert decode(data[number][:-30], box) is None

    for _ in range(3):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
