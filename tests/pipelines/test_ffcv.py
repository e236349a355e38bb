"""What is FFCV's own: files of its writer, its page cache, its thread, its types."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.errors import DataError
from fastsiam.pipelines import build_loader
from fastsiam.pipelines.store.beton import JPEG, RAW, BetonStore
from tests.conftest import write_images
from tests.pipelines.cases import (
    SMALL,
    build,
    give_back_at_once,
    growth,
    readable,
    resident,
)
from tests.processes import Forked
from tests.read_with_ffcv import write

pytestmark = pytest.mark.ffcv


@pytest.fixture(scope="module")
def own_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of FFCV's writer, half of its images JPEGs and half pixels, sizes differ."""
    folder = tmp_path_factory.mktemp("own")
    generator = np.random.default_rng(0)
    images = [
        generator.integers(0, 256, (20 + i, 40 - i, 3), dtype=np.uint8).repeat(2, 0).repeat(2, 1)
        for i in range(24)
    ]
    np.savez(folder / "pixels.npz", *images)
    path = folder / "train.beton"
    done = Forked(write, str(folder / "pixels.npz"), str(path), "proportion").wait()
    assert done.returncode == 0, done.stderr
    return path


def loader_of(path: Path, **settings: Any) -> Any:
    data = DataConfig(data=str(path), pipeline="ffcv", workers=2, **settings)
    return build_loader(data, SMALL, batch=8)


@pytest.mark.parametrize("os_cache", [True, False])
def test_a_file_of_ffcvs_writer_equals_torchvision(own_file: Path, os_cache: bool) -> None:
    assert set(BetonStore(own_file).modes.tolist()) == {JPEG, RAW}
    ours = loader_of(own_file, os_cache=os_cache)
    theirs = build("torchvision", own_file)
    for epoch in range(2):
        for a, b in zip(ours.epoch(epoch), theirs.epoch(epoch), strict=True):
            assert torch.equal(a.index, b.index) and torch.equal(a.label, b.label)
            assert (a.view1 - b.view1).abs().max() < 1e-5
            assert (a.view2 - b.view2).abs().max() < 1e-5
    ours.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_page_cache_that_cannot_read_is_an_error(images: Path) -> None:
    """FFCV's readers die, and FFCV waits for their pages for ever."""
    path = readable("ffcv", images / "train") / "train.beton"
    loader = loader_of(path, os_cache=False)
    path.rename(path.with_suffix(".gone"))
    with pytest.raises(DataError, match="is the file still there"):
        list(loader.epoch(0))
    loader.close()


def test_importing_it_leaves_torch_its_threads() -> None:
    """FFCV sets them to one when it is imported."""
    done = Forked(import_it).wait()
    assert done.returncode == 0, done.stderr


def import_it() -> None:
    import numba

    assert "ffcv" not in sys.modules
    torch.set_num_threads(3)
    before = numba.get_num_threads()
    import fastsiam.pipelines.ffcv_backend  # noqa: F401

    assert torch.get_num_threads() == 3 and numba.get_num_threads() == before


@pytest.mark.alone
def test_memory_does_not_grow(tmp_path: Path) -> None:
    write_images(tmp_path / "train", classes=2, each=60, side=64)
    done = Forked(print_sizes, str(readable("ffcv", tmp_path / "train"))).wait()
    assert done.returncode == 0, done.stderr
    view, *sizes = json.loads(done.stdout)
    assert growth(sizes) < 4 * view  # fifteen epochs lie between them: 90 such views


def print_sizes(root: str) -> None:
    """Print the size of a batch's view, and this process's size after each epoch."""
    give_back_at_once()
    data = DataConfig(data=root, pipeline="ffcv", workers=2)
    loader, sizes = build_loader(data, AugmentConfig.alike(crop=64), batch=40), []
    for epoch in range(45):
        for batch in loader.epoch(epoch):
            view = batch.view1.nbytes
        sizes.append(resident())
    loader.close()
    print(json.dumps([view, *sizes]))
