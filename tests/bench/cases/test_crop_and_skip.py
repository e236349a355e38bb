"""libjpeg-turbo's crop and skip decodes the part that it is asked for, and refuses bad files."""

from __future__ import annotations

import io
import subprocess
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from fastsiam.bench.cases.decode import load_crop_and_skip
from tests.conftest import skip

HEIGHT, WIDTH = 130, 201
SAMPLINGS = {"4:4:4": 0, "4:2:2": 1, "4:2:0": 2}


@pytest.fixture(scope="module")
def function() -> Any:
    try:
        return load_crop_and_skip()
    except RuntimeError as error:
        skip(str(error))


def encoded(subsampling: int, *, progressive: bool = False) -> bytes:
    """Return a JPEG of noise over waves, which no two pixels share."""
    row, column = np.mgrid[:HEIGHT, :WIDTH]
    waves = np.stack([np.sin(column / 5), np.cos(row / 4), np.sin(row * column / 99)], -1)
    noise = np.random.default_rng(0).normal(0, 20, waves.shape)
    file = io.BytesIO()
    image = Image.fromarray((128 + 80 * waves + noise).clip(0, 255).astype(np.uint8))
    image.save(file, "JPEG", quality=90, subsampling=subsampling, progressive=progressive)
    return file.getvalue()


def decode(
    function: Any, data: bytes, box: tuple[int, int, int, int]
) -> tuple[int, NDArray[np.uint8]] | None:
    """Return the first column and the pixels that come out, or None where it refuses."""
    place, columns = np.array(box, np.int32), np.zeros(2, np.uint32)
    out = np.zeros(3 * HEIGHT * WIDTH, np.uint8)
    arrays = (place.ctypes.data, out.ctypes.data, columns.ctypes.data)
    if function(data, len(data), *arrays):
        return None
    left, width = map(int, columns)
    rows = box[2] - box[0]
    return left, out[: 3 * rows * width].reshape(rows, width, 3)


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_pixels_inside_are_pillows(function: Any, sampling: str, *, progressive: bool) -> None:
    """All but the first and the last column, whose chroma is upsampled without its neighbour."""
    data = encoded(SAMPLINGS[sampling], progressive=progressive)
    expected = np.asarray(Image.open(io.BytesIO(data)))
    generator = np.random.default_rng(1)
    for _ in range(100):
        top, bottom = np.sort(generator.choice(HEIGHT + 1, 2, replace=False)).tolist()
        first, right = np.sort(generator.choice(WIDTH + 1, 2, replace=False)).tolist()
        done = decode(function, data, (top, first, bottom, right))
        assert done is not None
        left, pixels = done
        assert left + pixels.shape[1] == right and 0 <= first - left < 16 and left % 8 == 0
        edge = 0 if sampling == "4:4:4" else 1
        same = expected[top:bottom, left + edge : right - edge]
        np.testing.assert_array_equal(pixels[:, edge : pixels.shape[1] - edge], same)


def test_what_it_refuses_leaves_the_process_alive(function: Any) -> None:
    data = encoded(0)
    whole = (0, 0, HEIGHT, WIDTH)
    assert decode(function, data, whole) is not None
    for bad in (b"", b"no JPEG", data[:100], data[: len(data) // 2]):
        assert decode(function, bad, whole) is None
    assert decode(function, data, (0, 0, 10, WIDTH + 1)) is None
    assert decode(function, data, whole) is not None


def test_without_a_compiler_or_a_header_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "jpeglib.h: No such file or directory")
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *_, **__: failed)
        patch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
        with pytest.raises(RuntimeError, match=r"jpeglib\.h"):
            load_crop_and_skip()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"install g\+\+"):
        load_crop_and_skip()
