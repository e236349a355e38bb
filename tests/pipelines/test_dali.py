"""DALI's pipeline: every source, every step, and nothing lost or mixed up."""

from __future__ import annotations

import json
import logging
from itertools import islice
from pathlib import Path

import pytest
import torch
from PIL import Image

from fastsiam.config import AugmentConfig, ConvertConfig
from fastsiam.pipelines import open_store
from fastsiam.pipelines.convert import convert
from tests.conftest import write_images
from tests.conversions import Quiet
from tests.pipelines.cases import ended, equal, give_back_at_once, growth, joined, resident, threads
from tests.pipelines.dali_cases import Loaders, load, trust
from tests.processes import Forked
from tests.sources import encoded, folder_members, tar

pytestmark = pytest.mark.dali


def test_batches_have_the_promised_form(images: Path, loaders: Loaders) -> None:
    loader = loaders(images / "train", dtype=torch.bfloat16)
    assert loader.steps == 3 and loader.images == 24 and "train" in loader.source
    batches = list(loader.epoch(0))
    assert len(batches) == 3
    for batch in batches:
        for view in (batch.view1, batch.view2):
            assert view.shape == (8, 3, 16, 16) and view.dtype == torch.bfloat16
            assert view.is_contiguous(memory_format=torch.channels_last)
        assert batch.index.dtype == batch.label.dtype == torch.int64
        assert torch.equal(batch.label, batch.index // 8)
        assert not torch.equal(batch.view1, batch.view2)
    assert sorted(torch.cat([batch.index for batch in batches]).tolist()) == list(range(24))


def converted(root: Path, out: Path, **options: bool) -> Path:
    config = ConvertConfig(source=str(root), out=str(out), **options)  # type: ignore[arg-type]
    return convert("folder", config, Quiet())[0].path


def test_all_sources_give_the_same_views(images: Path, tmp_path: Path, loaders: Loaders) -> None:
    """Files, a tar, JPEGs and pixels in a .beton: DALI gets the same images of all."""
    sources = [
        images / "train",
        tar(tmp_path / "train.tar", folder_members(images / "train")),
        converted(images / "train", tmp_path / "jpeg"),
        converted(images / "train", tmp_path / "raw", raw=True),
    ]
    stores = [open_store(source, "train") for source in sources]
    assert [store.raw_size(0) for store in stores] == [None, None, None, (24, 24)]
    first, *others = (list(loaders(store).epoch(1)) for store in stores)
    for other in others:
        assert all(equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("prefetch", [1, 2, 5])
@pytest.mark.parametrize("workers", [0, 3])
def test_skipping_gives_the_tail_of_the_epoch(
    prefetch: int, workers: int, images: Path, loaders: Loaders
) -> None:
    loader = loaders(images / "train", batch=4, workers=workers, prefetch=prefetch)
    whole = list(loader.epoch(1))
    assert len(whole) == 6
    for skip in range(7):
        tail = list(loader.epoch(1, skip=skip))
        assert len(tail) == 6 - skip
        assert all(equal(a, b) for a, b in zip(tail, whole[skip:], strict=True))


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_same_global_batches(world: int, images: Path, loaders: Loaders) -> None:
    alone = loaders(images / "train").epoch(2)
    shares = [loaders(images / "train", rank=r, world=world).epoch(2) for r in range(world)]
    for whole, *parts in zip(alone, *shares, strict=True):
        assert equal(joined(parts), whole)


def test_epochs_can_be_abandoned(images: Path, loaders: Loaders) -> None:
    """At any step, closed or merely left; the one that begins next is whole."""
    loader = loaders(images / "train", batch=4, prefetch=3)
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


def test_two_loaders_at_once(images: Path, loaders: Loaders) -> None:
    one, other = loaders(images / "train"), loaders(images / "train", workers=1)
    for a, b in zip(one.epoch(0), other.epoch(0), strict=True):
        assert equal(a, b)


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


def test_closing_ends_all_threads(images: Path, loaders: Loaders) -> None:
    """In mid-epoch, and more than once; an epoch that was under way just ends."""
    warm = loaders(images / "train")  # DALI and torch start some threads once, for good
    next(warm.epoch(0))
    warm.close()
    before = threads()
    loader = loaders(images / "train", batch=4, workers=3)
    batches = loader.epoch(0)
    next(batches)
    own = threads() - before
    assert len(own) >= 4  # DALI's, and those that read
    loader.close()
    loader.close()
    assert ended(own)
    assert list(batches) == []
