"""Decoders are measured if they are installed; libjpeg-turbo's crop and skip decodes a part."""

from __future__ import annotations

import io
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from fastsiam.bench.cases import decode
from fastsiam.bench.records import Timing
from fastsiam.kernels import library
from tests.bench.made import sample
from tests.conftest import skip, write_images

HEIGHT, WIDTH = 130, 201


def test_every_decoder_that_can_decodes_all_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_images(tmp_path / "images", classes=1, each=2)
    names = {"PIL", "torchvision.io", decode.TURBO, decode.TURBO_PART, decode.OURS, decode.OUR_PART}
    for missing in (set(), names - {"PIL", "torchvision.io"}):
        if missing:
            decode.crop_and_skip.cache_clear()
            monkeypatch.setattr(library, "jpeg", lambda: None)
            monkeypatch.setenv("PATH", "")  # no g++
        tasks = decode.build_decoding(
            path=str(folder), form="original", workers=2, batch=8, device="cpu"
        )
        assert set(tasks) - {"DALI"} == names - missing
        assert {task.images for task in tasks.values()} == {2}


def test_bare_decoding_is_of_whole_images_by_others() -> None:
    walls = {"PIL": 4.0, decode.TURBO: 2.0, decode.OURS: 1.0, decode.OUR_PART: 0.5}
    walls |= {decode.TURBO_PART: 0.25}
    timings = {name: Timing([sample(x)], 8) for name, x in walls.items()}
    found = decode.fastest(timings, "original", on_gpu=False)
    assert found is not None and found.wall == [2.0]


def encoded(subsampling: int, *, progressive: bool = False) -> bytes:
    """Return a JPEG of noise over waves, which no two pixels share."""
    row, column = np.mgrid[:HEIGHT, :WIDTH]
    waves = np.stack([np.sin(column / 5), np.cos(row / 4), np.sin(row * column / 99)], -1)
    noise = np.random.default_rng(0).normal(0, 20, waves.shape)
    file = io.BytesIO()
    image = Image.fromarray((128 + 80 * waves + noise).clip(0, 255).astype(np.uint8))
    image.save(file, "JPEG", quality=90, subsampling=subsampling, progressive=progressive)
    return file.getvalue()


def decoded(data: bytes, box: tuple[int, int, int, int]) -> tuple[int, NDArray[np.uint8]] | None:
    """Return the first column and the pixels that come out, or None where it is refused."""
    place, columns = np.array(box, np.int32), np.zeros(2, np.uint32)
    out = np.zeros(3 * HEIGHT * WIDTH, np.uint8)
    arguments = (array.ctypes.data for array in (place, out, columns))
    if decode.crop_and_skip()(data, len(data), HEIGHT, WIDTH, *arguments):
        return None
    left, width = map(int, columns)
    rows = box[2] - box[0]
    return left, out[: 3 * rows * width].reshape(rows, width, 3)


def test_crop_and_skip_makes_pillows_pixels() -> None:
    """All but the first and the last column, whose chroma is upsampled without its neighbour."""
    try:
        decode.crop_and_skip()
    except (OSError, RuntimeError) as error:
        skip(str(error))
    generator, whole = np.random.default_rng(1), (0, 0, HEIGHT, WIDTH)
    for subsampling, progressive in product((0, 1, 2), (False, True)):
        data = encoded(subsampling, progressive=progressive)
        expected = np.asarray(Image.open(io.BytesIO(data)))
        for _ in range(50):
            top, bottom = np.sort(generator.choice(HEIGHT + 1, 2, replace=False)).tolist()
            first, right = np.sort(generator.choice(WIDTH + 1, 2, replace=False)).tolist()
            done = decoded(data, (top, first, bottom, right))
            assert done is not None
            left, pixels = done
            assert left + pixels.shape[1] == right and 0 <= first - left < 16 and left % 8 == 0
            edge = 0 if subsampling == 0 else 1
            same = expected[top:bottom, left + edge : right - edge]
            np.testing.assert_array_equal(pixels[:, edge : pixels.shape[1] - edge], same)
        done = decoded(data, whole)
        assert done is not None and np.array_equal(done[1], expected)
    for bad in (b"", b"no JPEG", data[:100], data[: len(data) // 2]):
        assert decoded(bad, whole) is None
    assert decoded(data, (0, 0, 10, WIDTH + 1)) is None
