"""Benchmark images: generated ones that resemble ImageNet, and samples of the user's data."""

from __future__ import annotations

import errno
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.JpegImagePlugin import get_sampling

from fastsiam.bench.bench_images import Images, make_images, take_images
from fastsiam.bench.config import CONTAINERS, BenchConfig
from fastsiam.errors import DataError
from fastsiam.pipelines.store import BetonStore, open_store
from fastsiam.pipelines.store.beton import RAW
from tests.conftest import write_images
from tests.conversions import stub_raising


@pytest.fixture
def four(tmp_path: Path) -> Images:
    """A sample of all images of a folder, two of each of two classes."""
    data = write_images(tmp_path / "data" / "train", classes=2, each=2)
    return take_images(BenchConfig(data=str(data)), 4, tmp_path / "some", lambda text: None)


def test_generated_images_resemble_imagenet(tmp_path: Path) -> None:
    paths = make_images(tmp_path / "images", 96)
    assert len(paths) == 96 == len(list((tmp_path / "images").rglob("*.jpg")))
    sizes, chroma, share = [], [], []
    for path in paths:
        with Image.open(path) as image:
            sizes.append(image.size)
            chroma.append(get_sampling(image) == 0)
            share.append(path.stat().st_size / image.width / image.height)
    # A sample of ImageNet: 467 x 397 pixels, 76% without chroma subsampling, and 0.15 and 1.08
    # bytes per pixel at the 5th and 95th percentile.
    assert 430 < np.mean(sizes, 0)[0] < 510 and 350 < np.mean(sizes, 0)[1] < 430
    assert 0.6 < np.mean(chroma) < 0.9 and 0.45 < np.mean(share) < 0.68
    assert np.percentile(share, 5) < 0.3 and np.percentile(share, 95) > 0.85


def test_images_are_sampled_evenly_and_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_images(tmp_path / "data" / "train", classes=3, each=4)
    config = BenchConfig(data=str(data.parent))
    messages: list[str] = []
    some = take_images(config, 6, tmp_path / "some", messages.append)
    assert some.count == 6 == len(open_store(some.folder, "train"))
    originals = {path.read_bytes() for path in data.rglob("*.jpg")}
    copies = [path.read_bytes() for path in some.folder.rglob("*.jpg")]
    assert set(copies) <= originals and len(set(copies)) == 6
    assert len(list(some.folder.iterdir())) == 3  # one for each class
    more = take_images(config, 30, tmp_path / "more", messages.append)
    assert {path.read_bytes() for path in more.folder.rglob("*.jpg")} == originals
    assert "12 of the 12 images of data" in messages[-1]
    monkeypatch.chdir(data.parent)
    take_images(replace(config, data="."), 1, tmp_path / "here", messages.append)
    assert "1 of the 12 images of data, " in messages[-1]


def test_containers_hold_same_images(four: Images, tmp_path: Path) -> None:
    files = open_store(four.folder, "train")
    for form in CONTAINERS:
        stored = open_store(four.convert_to(form), "train")
        assert sorted(bytes(files.read(i)) for i in range(4)) == sorted(
            bytes(stored.read(i)) for i in range(4)
        )
        assert stored.labels.tolist() == files.labels.tolist()
        assert stored.locate(np.arange(4)) is not None  # memory-mapped, not copied
    low, high = (four.encode(quality).folder.rglob("*.jpg") for quality in (20, 90))
    assert sum(p.stat().st_size for p in low) < sum(p.stat().st_size for p in high)
    (pixels,) = four.convert_to("pixels256").glob("*.beton")
    assert set(BetonStore(pixels).modes.tolist()) == {RAW}
    again = take_images(BenchConfig(data=str(pixels)), 4, tmp_path / "again", lambda text: None)
    kinds = [Image.open(path).format for path in again.folder.rglob("*.*")]
    assert kinds == ["JPEG"] * 4


def test_parquet_without_pyarrow_is_one_line_error(
    four: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"needs pyarrow: pip install 'fastsiam\[convert\]'"):
        four.convert_to("parquet")


def test_full_temporary_disk_is_one_line_error(
    four: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastsiam.bench.bench_images.os.link", stub_raising(errno.ENOSPC))
    monkeypatch.setattr(Image.Image, "save", stub_raising(errno.ENOSPC))
    monkeypatch.setattr("tarfile.TarFile.addfile", stub_raising(errno.ENOSPC))
    message = r"cannot write images to .* \(TMPDIR .*\): No space left on device; free some space"
    monkeypatch.setenv("FASTSIAM_DATA", "")
    monkeypatch.chdir(tmp_path / "some")
    for config in (BenchConfig(data=str(tmp_path / "data")), BenchConfig()):  # copied, generated
        with pytest.raises(DataError, match=message):
            take_images(config, 8, tmp_path / "full", lambda text: None)
    with pytest.raises(DataError, match=message):
        four.convert_to("tar")
    with pytest.raises(DataError, match=message):
        four.encode(50)
