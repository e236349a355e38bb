"""The memory pipeline's pixels, and what it makes of bad images."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fastsiam.errors import DataError, ImageError
from fastsiam.pipelines import open_store
from fastsiam.pipelines.headers import Headers
from fastsiam.pipelines.memory_backend import Pixels
from tests.sources import folder_members, tar

CPU = torch.device("cpu")
WORKERS = 2


def pixels(root: Path, *, workers: int = WORKERS, keeps_on: bool = False) -> Pixels:
    return Pixels(open_store(root, "train"), None, workers, CPU, keeps_on=keeps_on)


def test_bad_images_have_no_pixels(images: Path) -> None:
    """Whatever their headers promised; the others' are where they would be without them."""
    paths = sorted((images / "train").rglob("*.jpg"))
    whole = pixels(images / "train")
    bad = [3, 4, 23]
    for index in bad:
        paths[index].write_bytes(paths[index].read_bytes()[:-200])
    left = pixels(images / "train", keeps_on=True)
    assert sorted(left.refused) == bad and not left.size[bad].any()
    assert left.start.tolist() == whole.start.tolist()
    kept, expected = (
        np.delete(own.flat.numpy().reshape(24, -1), bad, axis=0) for own in (left, whole)
    )
    assert np.array_equal(kept, expected)
    with pytest.raises(ImageError, match=r"cannot decode .*class0/003\.jpg"):
        pixels(images / "train")


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "tar"])
def test_an_image_whose_header_pillow_alone_reads(packed: bool, tmp_path: Path) -> None:
    """And one whose header claims more pixels than Pillow decodes, which takes no memory."""
    odd, huge = io.BytesIO(), io.BytesIO()
    image = Image.effect_mandelbrot((60, 40), (-2, -1, 1, 1), 50).convert("RGB")
    image.save(odd, "JPEG")
    image.save(huge, "JPEG")
    data = bytearray(huge.getvalue())
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = b"\xff\xff\xff\xff"  # height and width
    root = tmp_path / "odd"
    root.mkdir()
    (root / "a.jpg").write_bytes(b"\xff\xd8\xff\x00" + odd.getvalue()[2:])
    (root / "b.jpg").write_bytes(data)
    source = tar(tmp_path / "odd.tar", folder_members(root)) if packed else root
    found = pixels(source, keeps_on=True)
    assert found.size.tolist() == [[40, 60], [0, 0]] and list(found.refused) == [1]
    decoded = Image.open(odd).convert("RGB")
    assert found.flat.numpy().tobytes() == decoded.tobytes()


def test_an_image_that_is_not_as_large_as_its_header_says(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = Headers.decoded
    monkeypatch.setattr(Headers, "decoded", lambda own, index: decoded(own, index)[:9, :9])
    with pytest.raises(DataError, match=r"class0/000\.jpg: it is not as large as its header says"):
        pixels(images / "train")
