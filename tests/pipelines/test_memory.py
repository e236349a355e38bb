"""Memory of loading: the memory pipeline's pixels, and huge images by every pipeline."""

from __future__ import annotations

import io
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fastsiam.config import AugmentConfig
from fastsiam.errors import DataError, ImageError
from fastsiam.pipelines import open_store
from fastsiam.pipelines.headers import Headers
from fastsiam.pipelines.loaders import CropLoader
from fastsiam.pipelines.memory_backend import Pixels
from fastsiam.pipelines.store.probe import without_warnings
from tests.pipelines.cases import build
from tests.processes import Forked
from tests.sources import folder_members, tar

CPU = torch.device("cpu")
WORKERS = 2


def photographs(folder: Path, count: int, *, width: int, height: int) -> Path:
    """Write smooth JPEGs, three of them different."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    for number in range(count):
        path = folder / f"{number:02}.jpg"
        if number >= 3:
            shutil.copy(folder / f"{number % 3:02}.jpg", path)
            continue
        noise = generator.integers(0, 256, (height // 100, width // 100, 3), np.uint8)
        Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(path)
    return folder


def pixels(root: Path, *, workers: int = WORKERS, keeps_on: bool = False) -> Pixels:
    return Pixels(open_store(root, "train"), None, workers, CPU, keeps_on=keeps_on)


def anonymous(process: int) -> int:
    """Return the bytes that a process and its descendants hold, shared ones counted once."""
    found = 0
    try:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                found += int(line.split()[1]) * 1024
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            found += sum(anonymous(int(child)) for child in children.read_text().split())
    except OSError:  # it ended
        pass
    return found


def print_growth(work: Callable[..., object], *arguments: Any) -> None:
    """Print by how many bytes this process and its descendants grow at most during some work."""
    before = peak = anonymous(os.getpid())
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.01):
            peak = max(peak, anonymous(os.getpid()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        work(*arguments)
    finally:
        ended.set()
        thread.join()
    print(peak - before)


def growth(work: Callable[..., object], *arguments: Any) -> int:
    done = Forked(print_growth, work, *arguments).wait()
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return int(done.stdout)


"""Bytes that docs/pipelines.md states."""
"""Modules that are imported, encoded images, thread stacks, and memory that malloc keeps."""


def one_epoch_of_crops(root: str) -> None:
    loader = build("native", Path(root), batch=256, augment=AugmentConfig(), workers=WORKERS)
    assert isinstance(loader, CropLoader)
    assert sum(1 for _ in loader.crops(0)) == 6
    loader.close()


@pytest.mark.alone
def test_crops_of_three_batches_are_kept(tmp_path: Path) -> None:
    """The caller's, one that is complete or nearly so, and one that is begun."""
    root = photographs(tmp_path / "photos", 6 * 256, width=200, height=200)
    batch = 256 * 2 * 224 * 224 * 3
    assert 3 * batch <= growth(one_epoch_of_crops, str(root)) <= 3.5 * batch


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


def test_warnings_are_ignored_until_the_last_thread_is_done(recwarn: Any) -> None:
    before = list(warnings.filters)
    entered, may_leave = threading.Event(), threading.Event()

    def decode() -> None:
        with without_warnings:
            entered.set()
            may_leave.wait(60)

    thread = threading.Thread(target=decode)
    with without_warnings:
        thread.start()
        entered.wait(60)
    warnings.warn("of the thread's", stacklevel=1)
    may_leave.set()
    thread.join()
    assert not len(recwarn) and list(warnings.filters) == before
    warnings.warn("of others", stacklevel=1)
    assert [str(one.message) for one in recwarn] == ["of others"]
