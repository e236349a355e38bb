"""Pixels of a JPEG's planes are PIL's, of any part of it; what is doubtful is refused."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fastsiam.kernels import library, planes
from tests.kernels.decoders import by_pil
from tests.kernels.jpegs import jpeg as noise
from tests.processes import Forked
from tests.sources import encoded, picture
from tests.tiers import slow

GRAY = [[(1, 1)], [(2, 2)]]
USUAL = [[(2, 2), (1, 1), (1, 1)], [(2, 1), (1, 1), (1, 1)], [(1, 1), (1, 1), (1, 1)]]
RARE = [
    [(1, 2), (1, 1), (1, 1)],
    [(4, 1), (1, 1), (1, 1)],
    [(4, 2), (1, 1), (1, 1)],
    [(1, 4), (1, 1), (1, 1)],
    [(3, 1), (1, 1), (1, 1)],
    [(1, 1), (2, 2), (1, 2)],
    [(2, 2), (2, 1), (1, 2)],
    [(2, 4), (1, 1), (1, 1)],
    [(2, 1), (2, 1), (2, 1)],
]
M_PERTURB = -6  # of malloc.h
SIZES = [(1, 1), (2, 3), (3, 2), (5, 4), (4, 5), (6, 7), (17, 1), (1, 70), (33, 63), (64, 130)]
SIZES += [(50, 97), (31, 32), (40, 200)]


pytestmark = pytest.mark.usefixtures("planes_compiled")


@pytest.fixture(params=library.kinds())
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each kind of code that this processor can run, in turn."""
    monkeypatch.setenv(library.CHOICE, request.param)
    return str(request.param)


def planes_of(data: bytes) -> memoryview:
    made = planes.to_planes(data, *by_pil(data).shape[:2])
    assert made is not None
    return made


def compare(data: bytes, boxes: int = 6) -> None:
    """Compare the whole image and random parts of it, at its edges too."""
    expected, record = by_pil(data), planes_of(data)
    height, width = expected.shape[:2]
    np.testing.assert_array_equal(planes.to_pixels(record), expected)
    generator = np.random.default_rng(len(data))
    for _ in range(boxes):
        top, left = (int(generator.integers(0, n)) for n in (height, width))
        bottom = int(generator.integers(top, height)) + 1
        right = int(generator.integers(left, width)) + 1
        part = planes.to_pixels(record, (top, left, bottom, right))
        np.testing.assert_array_equal(part, expected[top:bottom, left:right])


@pytest.mark.parametrize("sampling", [*GRAY, *USUAL, *RARE])
@pytest.mark.usefixtures("kind")
def test_every_sampling_at_every_size(sampling: list[tuple[int, int]]) -> None:
    for seed, (height, width) in enumerate(SIZES):
        compare(noise(height, width, sampling, seed=seed))


@pytest.mark.parametrize("sampling", [slow(one) for one in (*GRAY, *USUAL, *RARE)])
@pytest.mark.usefixtures("kind")
def test_every_small_size(sampling: list[tuple[int, int]]) -> None:
    for height in range(1, 20):
        for width in [*range(1, 20), 31, 33, 63, 65, 67]:
            compare(noise(height, width, sampling, seed=height), boxes=3)


@pytest.mark.usefixtures("kind")
def test_all_colours_at_their_extremes() -> None:
    """Saturated pixels, whose sums leave 0..255 before they are clamped."""
    generator = np.random.default_rng(0)
    for subsampling in (0, 1, 2):
        pixels = generator.integers(0, 2, (120, 150, 3), dtype=np.uint8) * 255
        compare(encoded(Image.fromarray(pixels), subsampling=subsampling, quality=95))


@pytest.mark.parametrize("options", [{"progressive": True}, {"restart_marker_rows": 1}])
def test_other_codings(options: dict[str, Any]) -> None:
    compare(encoded(picture(0, width=90, height=70), **options))


def test_nothing_is_read_that_was_freed() -> None:
    """What a progressive JPEG's decoder knows of its scans ends with the decoding."""
    done = Forked(read_while_freed_memory_changes).wait()
    assert done.returncode == 0, done.stderr


def read_while_freed_memory_changes() -> None:
    ctypes.CDLL(None).mallopt(M_PERTURB, 0x55)  # glibc writes over what is freed
    planes_of(encoded(picture(0, width=90, height=70), progressive=True))


@pytest.mark.slow
def test_photographs(real_images: Path) -> None:
    for path in sorted(real_images.glob("*/*.JPEG")):
        compare(path.read_bytes(), boxes=2)


def test_half_the_bytes_of_pixels() -> None:
    record = planes_of(encoded(picture(0, width=100, height=80)))
    assert len(record) == 16 + 100 * 80 * 3 // 2 + 64
    assert planes.is_record(record) and planes.size_of(record) == (80, 100)


@pytest.mark.parametrize(
    "data",
    [
        encoded(picture(0).convert("CMYK")),
        encoded(picture(0), keep_rgb=True),
        encoded(picture(0), "PNG"),
        encoded(picture(0))[:-2],
        encoded(picture(0))[:-100] + b"\xff\xd9",
        b"",
        b"\xff\xd8\xff\xd9",
        noise(30, 40, [(3, 1), (2, 1), (1, 1)]),  # PIL refuses such factors
        noise(30, 40, USUAL[0], frame=0xC2, scans=[((0, 1, 2), 0, 0), ((0,), 1, 5)]),
    ],
    ids=[
        *("CMYK", "RGB", "PNG", "no end", "cut short", "nothing", "no image", "factors"),
        "scans that lack",
    ],
)
def test_what_is_refused(data: bytes) -> None:
    assert planes.to_planes(data, 30, 40) is None


def test_another_size_is_refused() -> None:
    data = encoded(picture(0))
    assert planes.to_planes(data, 30, 40) is not None
    assert planes.to_planes(data, 40, 30) is None and planes.to_planes(data, 30, 41) is None


@pytest.mark.usefixtures("kind")
def test_a_damaged_record_is_no_image() -> None:
    record = bytes(planes_of(encoded(picture(0))))
    for broken in (record[:-1], record + b"\0", record[:16], record[:10], b"FSP1", b""):
        with pytest.raises(ValueError, match="damaged"):
            planes.to_pixels(broken)
    found = 0
    for place in range(16):
        for value in (0, 1, 0x7F, 0x80, 0xFF):
            broken = record[:place] + bytes([value]) + record[place + 1 :]
            if broken != record:
                found += 1
                with pytest.raises(ValueError, match="damaged"):
                    planes.to_pixels(broken)
    assert found > 70
    with pytest.raises(ValueError, match="no box"):
        planes.to_pixels(record, (0, 0, 31, 40))


@pytest.mark.usefixtures("kind")
def test_nothing_is_written_beyond_the_part() -> None:
    data = encoded(picture(0, width=150, height=20))
    record, expected = np.frombuffer(planes_of(data), np.uint8), by_pil(data)
    for left, right in ((0, 150), (3, 10), (7, 90), (149, 150)):
        room = np.full(3 * 20 * 150 + 64, 77, np.uint8)
        box = np.array([2, left, 9, right], np.int32)
        assert not planes._reader()(
            record.ctypes.data, len(record), 20, 150, box.ctypes.data, room.ctypes.data
        )
        count = 7 * (right - left) * 3
        assert (room[:count] == expected[2:9, left:right].ravel()).all()
        assert (room[count:] == 77).all()


def test_nothing_is_read_beyond_the_record() -> None:
    """A record that ends where the process's memory does; who reads on is killed."""
    done = Forked(read_at_the_end).wait()
    assert done.returncode == 0, done.stderr


def read_at_the_end() -> None:
    page = mmap.PAGESIZE
    system = ctypes.CDLL(None)
    for sampling in (*GRAY, *USUAL, *RARE):
        for height, width in SIZES:
            data = noise(height, width, sampling)
            record, expected = planes_of(data), by_pil(data)
            pages = -(-len(record) // page)
            memory = mmap.mmap(-1, (pages + 1) * page)
            start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            memory[pages * page - len(record) : pages * page] = record
            assert system.mprotect(ctypes.c_void_p(start + pages * page), page, 0) == 0
            own = memoryview(memory)[pages * page - len(record) : pages * page]
            np.testing.assert_array_equal(planes.to_pixels(own), expected)
