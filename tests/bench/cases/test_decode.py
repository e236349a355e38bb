"""Installed decoders are measured; libjpeg-turbo's crop and skip decodes part of an image."""

from __future__ import annotations

import ctypes
import io
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from fastsiam.bench.cases import decode
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.runner import Loading
from fastsiam.bench.session import session
from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.kernels import library
from tests.conftest import skip, write_images

HEIGHT, WIDTH = 130, 201


def test_every_available_decoder_decodes_all_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_images(tmp_path / "images", classes=1, each=2)
    data = DataConfig(data=str(folder), workers=2)
    loading = Loading(data=data, augment=AugmentConfig(), batch=8, images=2, device="cpu")
    names = {"PIL", "torchvision.io", decode.TURBO, decode.TURBO_PART, decode.OURS, decode.OUR_PART}
    for missing in (set(), names - {"PIL", "torchvision.io"}):
        if missing:
            decode.crop_and_skip.cache_clear()
            monkeypatch.setattr(library, "jpeg", lambda: None)
            monkeypatch.setenv("PATH", "")  # no g++
        tasks = decode.build_decoding(loading, "original")
        assert set(tasks) - {"DALI"} == names - missing
        assert {task.images for task in tasks.values()} == {2}
    shutil.rmtree(folder)
    tasks["PIL"].run()  # the bytes are in memory: reading is not timed


def test_part_that_is_decoded_follows_the_views_of_the_recipe() -> None:
    boxes: list[list[int]] = []

    def read_box(*arguments: Any) -> int:
        boxes.append([*(ctypes.c_int32 * 4).from_address(arguments[4])])
        return 0

    whole = AugmentConfig.alike(2, scale_min=1.0, ratio_min=1.0, ratio_max=1.0)
    data, size = [b"", b""], np.full((2, 2), 40)
    loading = Loading(data=DataConfig(workers=1), augment=whole, batch=8, images=2, device="cpu")
    decode_one = decode._by_function(read_box, size, data, loading, part=True)
    for index in range(2):
        decode_one(0, index)
    assert boxes == [[0, 0, 40, 40]] * 2


def test_decoding_of_originals_is_always_measured(bench_config: BenchConfig) -> None:
    """The baseline always reads original files and needs their decoding speed as its ceiling."""
    with session(replace(bench_config, stored=("beton", "pixels256"))) as bench_session:
        rows = decode.rows(bench_session, bench_session.images(8))
    assert {row.facts["stored"] for row in rows} == {"original"}


def decode_box(data: bytes, box: tuple[int, int, int, int]) -> tuple[int, NDArray[np.uint8]] | None:
    """Return the first decoded column and the pixels, or None if decoding fails."""
    place, columns = np.array(box, np.int32), np.zeros(2, np.uint32)
    out = np.zeros(3 * HEIGHT * WIDTH, np.uint8)
    arguments = (array.ctypes.data for array in (place, out, columns))
    if decode.crop_and_skip()(data, len(data), HEIGHT, WIDTH, *arguments):
        return None
    left, width = map(int, columns)
    rows = box[2] - box[0]
    return left, out[: 3 * rows * width].reshape(rows, width, 3)


def test_crop_and_skip_equals_pillow() -> None:
    """The first and last columns may differ: their chroma is upsampled without a neighbour."""
    try:
        decode.crop_and_skip()
    except (OSError, RuntimeError) as error:
        skip(str(error))
    generator = np.random.default_rng(1)
    image = Image.fromarray(generator.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8))
    for subsampling, progressive in product((0, 1, 2), (False, True)):
        file, edge = io.BytesIO(), int(subsampling > 0)
        image.save(file, "JPEG", quality=90, subsampling=subsampling, progressive=progressive)
        expected, data = np.asarray(Image.open(file)), file.getvalue()
        for _ in range(50):
            top, bottom = np.sort(generator.choice(HEIGHT + 1, 2, replace=False)).tolist()
            first, right = np.sort(generator.choice(WIDTH + 1, 2, replace=False)).tolist()
            result = decode_box(data, (top, first, bottom, right))
            assert result is not None
            left, pixels = result
            assert left + pixels.shape[1] == right and 0 <= first - left < 16 and left % 8 == 0
            same = expected[top:bottom, left + edge : right - edge]
            np.testing.assert_array_equal(pixels[:, edge : pixels.shape[1] - edge], same)
        result = decode_box(data, (0, 0, HEIGHT, WIDTH))
        assert result is not None and np.array_equal(result[1], expected)
    for bad in (b"", data[: len(data) // 2]):
        assert decode_box(bad, (0, 0, HEIGHT, WIDTH)) is None
    assert decode_box(data, (0, 0, 10, WIDTH + 1)) is None
