"""DALI's pipeline: every source, every step, and nothing lost or mixed up."""

from __future__ import annotations

import json
import logging
from itertools import islice
from pathlib import Path

import pytest
from PIL import Image

from fastsiam.config import AugmentConfig
from tests.conftest import write_images
from tests.pipelines.cases import equal, give_back_at_once, growth, resident
from tests.pipelines.dali_cases import Loaders, load, trust
from tests.processes import Forked
from tests.sources import encoded

pytestmark = pytest.mark.dali


@pytest.mark.parametrize(("prefetch", "workers"), [(1, 0), (3, 2), (5, 3)])
def test_epochs_can_be_abandoned(
    prefetch: int, workers: int, images: Path, loaders: Loaders
) -> None:
    """At any step, closed or merely left; the one that begins next is whole."""
    loader = loaders(images / "train", batch=4, prefetch=prefetch, workers=workers)
    expected = list(loader.epoch(0))
    for taken in range(7):
        closed, left = loader.epoch(5), loader.epoch(6)
        assert len(list(islice(closed, taken))) == min(taken, 6)
        closed.close()  # type: ignore[attr-defined]
        next(left)
        again = list(loader.epoch(0))
        assert all(equal(a, b) for a, b in zip(again, expected, strict=True))
        with pytest.raises(RuntimeError, match="another epoch of this loader was begun"):
            list(left)


@pytest.mark.parametrize("call", range(2, 12))
def test_ctrl_c_mixes_nothing_up(
    call: int, images: Path, loaders: Loaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it strikes while a batch is handed over: images keep their own boxes."""
    loader = loaders(images / "train")
    expected = list(loader.epoch(0))
    feed, calls = loader._cropper._dali.feed_input, iter(range(1, 100))

    def interrupted(*arguments: object) -> None:
        if next(calls) == call:
            raise KeyboardInterrupt
        feed(*arguments)

    monkeypatch.setattr(loader._cropper._dali, "feed_input", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(loader.epoch(0))
    assert all(equal(a, b) for a, b in zip(loader.epoch(0), expected, strict=True))


@pytest.mark.alone
@pytest.mark.parametrize(("refused", "most"), [(False, 8), (True, 16)])
def test_memory_does_not_grow(refused: bool, most: int, tmp_path: Path) -> None:
    """Over 24 epochs and as many abandoned ones, and where DALI fails in each of them."""
    root = write_images(tmp_path, each=16, side=160)
    if refused:
        path = root / "class1" / "003.jpg"
        path.write_bytes(encoded(Image.open(path), "GIF"))
    done = Forked(print_sizes, str(root)).wait()
    assert done.returncode == 0, done.stderr
    assert ("DALI cannot decode" in done.stderr) == refused
    # One epoch's crops are 14 MiB, its decoded images 3.5; eight epochs lie between the sizes.
    assert growth(json.loads(done.stdout)) < most * 2**20


def print_sizes(root: str) -> None:
    """Print this process's size after each epoch. DALI gets every image, as ``trusting`` has it."""
    give_back_at_once()
    logging.basicConfig(level=logging.WARNING)
    trust(pytest.MonkeyPatch())
    loader, sizes = load(Path(root), batch=16, augment=AugmentConfig.alike(crop=128)), []
    for epoch in range(24):
        assert len(list(loader.epoch(epoch))) == 3
        next(iter(loader.epoch(epoch)))
        sizes.append(resident())
    loader.close()
    print(json.dumps(sizes))
