"""The .beton format: FFCV and fastsiam read each other's files, and corruption is detected."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from fastsiam.errors import DataError
from fastsiam.pipelines.store import BetonStore
from fastsiam.pipelines.store.beton import (
    FIELD,
    HEADER,
    IMAGE,
    JPEG,
    METADATA,
    RAW,
    RECORD,
    VERSION,
)
from fastsiam.pipelines.store.mapped_files import Mapped
from tests import read_with_ffcv
from tests.conftest import write_images
from tests.conversions import find_problems
from tests.data_formats import write_converted
from tests.pipelines.cases import PAGES, assert_near, batches
from tests.sources import encoded, gray_jpeg, jpeg, picture


def converted(root: Path, *, more: Sequence[bytes] = (), **options: object) -> Path:
    """Convert 12 small JPEGs, two of another size, and ``more`` as the last class."""
    images = write_images(root / "images", classes=3, each=4)
    for number in range(2):
        picture(number, width=70, height=50).save(images / "class1" / f"big{number}.jpg")
    for number, data in enumerate(more):
        (images / "more").mkdir(exist_ok=True)
        (images / "more" / f"{number}.jpg").write_bytes(data)
    return write_converted(images, root / "out", **options) / "train.beton"


@pytest.fixture(scope="module")
def ffcv() -> Iterator[Callable[..., Any]]:
    """Call functions of ``read_with_ffcv`` in a process that is killed at the end."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result(300)
        for process in list(pool._processes.values()):
            process.kill()


@pytest.mark.ffcv
def test_ffcv_reads_converted_files(ffcv: Callable[..., Any], tmp_path: Path) -> None:
    """With FFCV's plain decoders and without fastsiam; with the OS page cache and FFCV's own.

    A conversion keeps the bytes of gray JPEGs: libjpeg-turbo converts them to RGB on request.
    """
    kinds: tuple[dict[str, Any], ...] = ({}, {"progressive": True}, {"sampling": 0x22})
    gray = [gray_jpeg(number, **options) for number, options in enumerate(kinds)]
    plain = converted(tmp_path / "jpg", more=[*gray, jpeg(3)])
    assert [bytes(BetonStore(plain).read(i)) for i in range(-4, -1)] == gray
    for path, os_cache in ((plain, False), (converted(tmp_path / "raw", raw=True), True)):
        got, store = ffcv(read_with_ffcv.crops, str(path), os_cache), BetonStore(path)
        assert got["labels"] == store.labels.tolist()
        assert got["crops"] == (len(store), 16, 16, 3)
        assert path != plain or got["gray"][-4:] == [True, True, True, False]
        for mean, i in zip(got["means"], range(len(store)), strict=True):
            image = store.decode(i)
            side, left = image.height, (image.width - image.height) // 2
            square = image.crop((left, 0, left + side, side)).resize((16, 16))
            # FFCV's fast DCT and area filter differ slightly. Another image's mean differs a lot.
            assert abs(mean - np.asarray(square).mean()) < 1.5


@pytest.mark.slow
@pytest.mark.ffcv
def test_files_of_ffcv_writer_are_read(ffcv: Callable[..., Any], tmp_path: Path) -> None:
    """Raw pixels and JPEGs, with either page cache."""
    pixels = [np.asarray(picture(i, width=20 + i)) for i in range(24)]
    np.savez(tmp_path / "pixels.npz", *pixels)
    path = tmp_path / "both.beton"
    ffcv(read_with_ffcv.write, str(tmp_path / "pixels.npz"), str(path), "proportion")
    store = BetonStore(path)
    assert store.crc is None and store.labels.tolist() == [0, 1, 2] * 8
    assert set(store.modes.tolist()) == {RAW, JPEG}
    assert store.classes == ("0", "1", "2") and store.name(3) == "image 3"
    for i, image in enumerate(pixels):
        difference = np.asarray(store.decode(i)).astype(int) - image
        assert np.abs(difference).mean() < (1e-9 if store.modes[i] == RAW else 8)
    assert find_problems(path) == []
    expected = batches("torchvision", path, 0, 1, batch=4)
    for name in ("ffcv", PAGES):
        assert_near(batches(name, path, 0, 1, batch=4, workers=2), expected)


def test_file_with_other_fields_is_read(tmp_path: Path) -> None:
    """With a float field, two labels, the image not first, and the table in another order."""
    data = [encoded(picture(i)) for i in range(3)]
    row = np.dtype([("f0", "<f8"), ("f1", "<i8"), ("f2", IMAGE), ("f3", "<i8")], align=True)
    at = HEADER.itemsize + 4 * FIELD.itemsize + 3 * row.itemsize
    rows, table, body = np.zeros(3, row), np.zeros(3, RECORD), b""
    for i in (2, 0, 1):
        rows[i] = (0.5, i + 4, (0, 40, 30, at + len(body)), 9)
        table[i] = (i, at + len(body), len(data[i]))
        body += data[i]
    fields = np.zeros(4, FIELD)
    for i, kind in enumerate((0, 1, 2, 1)):
        fields[i] = (kind, f"field{i}".encode(), b"")
    header = np.array([(VERSION, 4, 2**21, 3, at + len(body))], HEADER)
    parts = (header.tobytes(), fields.tobytes(), rows.tobytes(), body, table[[1, 2, 0]].tobytes())
    path = tmp_path / "foreign.beton"
    path.write_bytes(b"".join(parts))
    store = BetonStore(path)
    assert store.labels.tolist() == [4, 5, 6]
    assert [bytes(store.read(i)) for i in range(3)] == data

    def rewrite() -> None:
        path.write_bytes(b"".join([parts[0], fields.tobytes(), *parts[2:]]))

    other = tmp_path / "other.beton"
    other.write_bytes(path.read_bytes())
    fields[3]["name"] = b"label"
    rewrite()
    assert BetonStore(path).labels.tolist() == [9, 9, 9]  # by its name, not its position
    with pytest.raises(DataError, match="have different classes"):
        BetonStore(other, path)
    for number, kind, message in ((3, 255, "fields of custom types"), (2, 1, "no image field")):
        fields[3]["type_id"] = 1
        fields[number]["type_id"] = kind
        fields[0]["name"] = b"la\nbel"
        rewrite()
        with pytest.raises(DataError, match=message) as caught:
            BetonStore(path)
        assert str(caught.value).isprintable()


def test_opening_reads_each_range_once(tmp_path: Path) -> None:
    """Of a remote file, every read is a download."""
    path = converted(tmp_path)
    with patch.object(Mapped, "read", autospec=True, side_effect=Mapped.read) as read:
        BetonStore(path)
    ranges = [call.args[1:] for call in read.call_args_list]
    assert len(ranges) == len({*ranges}) == 5  # header (twice), annex, metadata and table


def test_flipped_bits_outside_records_are_detected(tmp_path: Path) -> None:
    """In header, fields, metadata, annex and table: the file is rejected when it is opened."""
    path = converted(tmp_path)
    store = BetonStore(path)
    original = path.read_bytes()
    before = int(store.start.min())
    after = int((store.start + store.size).max())
    generator = np.random.default_rng(0)
    meaningful = HEADER.itemsize + 2 * FIELD.itemsize + len(store) * METADATA.itemsize
    places = [*range(HEADER.itemsize), *range(24 + 17, 24 + 17 + 40)]
    places += generator.integers(HEADER.itemsize, meaningful, 150).tolist()
    places += generator.integers(after + 8, len(original), 150).tolist()
    assert meaningful <= before
    missed = []
    for place in places:
        data = bytearray(original)
        data[place] ^= 1 << int(generator.integers(0, 8))
        path.write_bytes(data)
        with contextlib.suppress(DataError):
            BetonStore(path)
            missed.append(place)
    # Only the few bytes that pad the annex to a multiple of 8 are unused.
    assert all(original[place] == 0 for place in missed) and len(missed) < 8
