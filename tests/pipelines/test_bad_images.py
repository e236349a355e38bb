"""Bad images are replaced in the same way by every pipeline and on any number of ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastsiam.bad_image_list import FILE, BadImage, format_list, read_bad_images
from fastsiam.errors import DataError, ImageError
from fastsiam.pipelines import BadImages, open_store
from fastsiam.pipelines.store import beton
from fastsiam.views.batch import Batch
from tests.conftest import write_images
from tests.pipelines.cases import (
    PAGES,
    READERS,
    THREADED,
    assert_near,
    batches,
    central,
    change_image,
    equal,
    join_parts,
    make_readable,
    open_loader,
    same,
)
from tests.pipelines.conftest import Loaders

IMAGES, BATCH = 24, 8
BAD = (3, 10, 20)
Change = Callable[[bytes], bytes]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images")


def change_header_height(data: bytes) -> bytes:
    """Change the height in a JPEG's header, so that it contradicts the .beton file's table."""
    at = data.index(b"\xff\xc0") + 5
    height = int.from_bytes(data[at : at + 2], "big") - 8
    return data[:at] + height.to_bytes(2, "big") + data[at + 2 :]


def make_decompression_bomb(data: bytes) -> bytes:
    """Claim 12 GB of pixels: Pillow rejects such an image, and DALI would allocate the memory."""
    size = data.index(b"\xff\xc0") + 5
    return data[:size] + b"\xff\xff\xff\xff" + data[size + 4 :]


DAMAGES: dict[str, Change] = {
    "header alone": lambda data: data[:200],
    "noise": lambda data: np.random.default_rng(0).bytes(len(data)),
    "empty": lambda _: b"",
    "bomb": make_decompression_bomb,
    "truncated": lambda data: data[:-20],
    "no end marker": lambda data: data[:-2],
}
FILE_CHANGES: tuple[Change, ...] = (
    lambda data: data[: len(data) * 2 // 3], lambda _: b"no image" * 50, DAMAGES["empty"]
)  # fmt: skip
RECORD_CHANGES: tuple[Change, ...] = (
    lambda data: b"\xff\x05" * (len(data) // 2),
    lambda data: data[: len(data) // 2] + b"\xff\x05" * (len(data) // 4),
    change_header_height,
)


def damage(root: Path, indices: Sequence[int] = BAD) -> None:
    """Corrupt images in a folder or a converted file, in different ways."""
    ways = RECORD_CHANGES if list(root.glob("*.beton")) else FILE_CHANGES
    for number, index in enumerate(indices):
        change_image("native", root, index, ways[number % 3])


def load(name: str, root: Path, *epochs: int, skip: int = 0, **settings: Any) -> list[Batch]:
    """Return the batches of some epochs (default: 0 and 1), with bad images replaced."""
    settings = {"seed": 4, "bad_images": "replace", **settings}
    return batches(name, root, *(epochs or (0, 1)), skip=skip, **settings)


def collect_indices(batches: Sequence[Batch]) -> list[int]:
    return torch.cat([batch.index for batch in batches]).tolist()


def replace_bad(order: Sequence[int]) -> list[int]:
    """Return the expected images of an epoch, given its order without bad images.

    Each bad image is replaced by the next good one, starting half an epoch later.
    """
    half = [*order[IMAGES // 2 :], *order, *order]
    return [
        next(other for other in half[place:] if other not in BAD) if image in BAD else image
        for place, image in enumerate(order)
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "folder") for name in ("torchvision", "native", "memory")),
        pytest.param("dali", "folder", marks=pytest.mark.dali),
        ("native", "beton"),
        pytest.param("ffcv", "beton", marks=pytest.mark.ffcv),
    ],
)
def test_bad_images_are_replaced(name: str, kind: str, folder: Path) -> None:
    """The replacement is half an epoch away and has its own draws. Other images are unchanged.

    Two ranks show the same images. So does a run that starts at any step with the list: listed
    images stay replaced even if they are repaired.
    """
    root = folder if kind == "folder" else make_readable("ffcv", folder)
    originals, good = load(name, root), root.with_name(f"good-{root.name}")
    shutil.copytree(root, good)
    damage(root)
    bad_images = BadImages(IMAGES)
    batches = load(name, root, bad=bad_images)
    for epoch in (slice(0, 3), slice(3, 6)):
        assert collect_indices(batches[epoch]) == replace_bad(collect_indices(originals[epoch]))
    assert sorted(entry.index for entry in bad_images.list()) == list(BAD)
    assert collect_indices(batches[:3]) != collect_indices(batches[3:]) and not set(BAD) & set(
        collect_indices(batches)
    )
    assert_near(batches, load("torchvision", root))
    views, before = (torch.cat([b.view1 for b in part]) for part in (batches, originals))
    bad = torch.isin(torch.tensor(collect_indices(originals)), torch.tensor(BAD))
    assert bad.sum() == 6 and torch.equal(views[~bad], before[~bad])
    twice = torch.tensor(collect_indices(batches))
    for place in bad.nonzero().flatten().tolist():
        alike = twice == twice[place]
        alike[place] = False
        assert alike.any() and not (views[alike] == views[place]).flatten(1).all(1).any()
    parts = [load(name, root, rank=rank, world=2) for rank in (0, 1)]
    assert same([join_parts(both) for both in zip(*parts, strict=True)], batches)
    for takes_more in (True, False):
        known = BadImages(IMAGES, bad_images.list(), takes_more=takes_more)
        assert same(load(name, good, skip=1, bad=known), batches[1:])


@pytest.mark.parametrize("name", ["torchvision", "memory"])
def test_image_is_replaced_only_after_becoming_bad(name: str, folder: Path) -> None:
    """The list records since when an image is bad. Earlier epochs still show it."""
    originals = load(name, folder, 0, 1, 2)
    bad_images = BadImages(IMAGES)
    damage(folder, [5])
    rest = load(name, folder, 1, 2, bad=bad_images)
    (entry,) = bad_images.list()
    assert "truncated" in entry.reason
    at = collect_indices(originals[3:6]).index(5) // BATCH
    assert entry == BadImage(3 + at, 5, "class0/005.jpg", entry.reason, 1)
    folder = write_images(folder.parent / "again")
    assert same(load(name, folder, 0, 1, 2, bad=BadImages(IMAGES, [entry])), originals[:3] + rest)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("torchvision", 1),
        ("native", 1),
        pytest.param("dali", 1, marks=pytest.mark.dali),
        pytest.param(PAGES, 1, marks=pytest.mark.ffcv),
        pytest.param(PAGES, 9, marks=pytest.mark.ffcv),
    ],
)
def test_image_is_replaced_if_another_rank_finds_it_bad(
    name: str, step: int, folder: Path, loaders: Loaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batch may have been read, or scheduled, before the ranks share the image."""
    monkeypatch.setattr(beton, "_SMALLEST_PAGE", 2**11)  # a batch needs a few of many pages
    root = make_readable(name, folder)
    index = int(load(name, root, 0, batch=2)[step].index[1])
    damage(root, [index])
    loader = loaders(name, root, batch=2, seed=4, workers=1, bad_images="replace")
    epoch, found = loader.epoch(0), BadImage(0, index, "a", "b", 0)
    loaded = [next(epoch)]
    loader.bad.add([found])
    loaded += epoch
    assert same(loaded, load(name, root, 0, batch=2, bad=BadImages(IMAGES, [found])))


def test_too_many_bad_images_raise_error(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Too many to replace, or to leave out of an evaluation."""
    damage(folder, range(8))
    assert set(range(8)).isdisjoint(collect_indices(load("torchvision", folder, 0)))
    list(central("torchvision", folder, bad_images="replace"))
    assert f"8 bad images of {folder} are left out" in caplog.messages
    damage(folder, [8])
    message = (
        r"9 of 24 images cannot be decoded, the last one class\d/00\d\.jpg \(.*\), .* at most 8:"
    )
    bad_images = BadImages(IMAGES)
    with pytest.raises(DataError, match=message) as error:
        load("torchvision", folder, bad=bad_images)
    assert not isinstance(error.value, ImageError)
    bad_images.share()  # like a run that saves before it ends
    assert len(bad_images) == 8
    with pytest.raises(DataError, match="9 of 24 images cannot be decoded"):
        list(central("torchvision", folder, bad_images="replace"))


def test_ranks_share_and_keep_bad_images(tmp_path: Path) -> None:
    """If two ranks find the same image, the find at the earlier step counts."""
    assert read_bad_images(tmp_path) == []
    files_by_rank: list[list[bytes]] = [[], []]
    texts: list[str] = []

    def collect(text: str) -> list[str]:
        texts.append(text)
        return [text]

    ranks = [BadImages(1000, exchange=collect, keep=files.append) for files in files_by_rank]
    ranks[0].note(ImageError("m", index=7, name="a\udcff", reason="b"), epoch=1, step=13)
    ranks[1].note(ImageError("m", index=7, name="a\udcff", reason="b"), epoch=0, step=4)
    ranks[1].note(ImageError("m", index=5, name="c", reason="d"), epoch=0, step=9)
    for rank in ranks:
        rank.share()
    keep: Any = (tmp_path / FILE).write_bytes
    together = [BadImages(1000, rank.list(), exchange=lambda _: texts, keep=keep) for rank in ranks]
    expected = [BadImage(4, 7, "a\udcff", "b", 0), BadImage(9, 5, "c", "d", 0)]
    for rank in together:
        rank.share()
        assert rank.list() == expected
    assert read_bad_images(tmp_path) == expected
    assert [len(files) for files in files_by_rank] == [1, 1]


def test_list_of_rank_is_kept_if_ranks_have_too_many_bad_images() -> None:
    found, files = [BadImage(0, index, "a", "b", 0) for index in range(9)], list[bytes]()
    bad = BadImages(72, exchange=lambda text: [text, format_list(found[1:])], keep=files.append)
    bad.add(found[:1])
    with pytest.raises(DataError, match="9 of 72 images cannot be decoded"):
        bad.share()
    assert files == [format_list(found[:1]).encode()]


def test_central_crops_skip_bad_images(folder: Path) -> None:
    """On every pass, with cached or recomputed crops."""
    beton = make_readable("ffcv", folder)
    full_batch = next(iter(central("native", beton, batch=24)))
    damage(beton)
    left = [index for index in range(IMAGES) if index not in BAD]
    for batch in (8, 1):
        loader = central("native", beton, batch=batch, bad_images="replace")
        for _ in range(2):
            loaded = []
            for part in loader:
                torch.testing.assert_close(
                    part.image, full_batch.image[part.index], atol=1e-5, rtol=0
                )
                assert torch.equal(part.label, full_batch.label[part.index])
                loaded += part.index.tolist()
            assert loaded == left
        assert loader.images == len(loader.names()) == IMAGES
    with pytest.raises(ImageError):
        list(central("native", beton))


@pytest.mark.parametrize("name", THREADED)
def test_bad_images_are_those_pillow_rejects(name: str, tmp_path: Path) -> None:
    """Wherever the image is corrupt, even if a decoder reads only part of it or fills in pixels."""
    root = make_readable(name, write_images(tmp_path / "images", classes=2, each=12, side=160))
    generator = np.random.default_rng(0)
    for index in range(IMAGES):
        change_image("native", root, index, lambda data: _overwrite_bytes(data, generator))
    store = open_store(root, "train")
    refused = set()
    for index in range(IMAGES):
        try:
            store.decode(index)
        except ImageError:
            refused.add(index)
    assert 5 < len(refused) < IMAGES - 5
    bad_images, reference = BadImages(10**6), BadImages(10**6)
    batches = load(name, root, bad=bad_images)
    assert {entry.index for entry in bad_images.list()} == refused
    assert_near(batches, load("memory", root, bad=reference))
    assert bad_images.list() == reference.list()


def _overwrite_bytes(data: bytes, generator: np.random.Generator) -> bytes:
    """Overwrite some bytes anywhere in an image, with random values or zeros."""
    length = int(generator.integers(1, generator.choice([4, 60, 2000])))
    at = int(generator.integers(0, len(data) - length))
    hurt = generator.bytes(length) if generator.random() < 0.7 else bytes(length)
    return data[:at] + hurt + data[at + length :]


# Without replacement: a bad image is an error.


DECODE_ERROR = r"cannot decode .*class1/003\.jpg"


@pytest.mark.parametrize("name", READERS)
def test_corrupt_image_raises_error_at_its_step(name: str, images: Path, loaders: Loaders) -> None:
    """Batches before it are loaded, also of central crops. Once it is repaired, all batches are.

    A deleted file is an error, too.
    """
    root = images / "train"
    damages = list(DAMAGES)
    if name in ("ffcv", PAGES):  # records have a fixed size: zeros at the end are harmless
        damages = damages[:3]
    loader = None if name == "memory" else loaders(name, root, batch=4, workers=2)
    expected = [] if loader is None else list(loader.epoch(0))
    for damage in damages:
        intact = change_image(name, root, 11, DAMAGES[damage])
        got = []
        with pytest.raises(DataError, match=DECODE_ERROR) as caught:
            for batch in (loader or open_loader(name, root)).epoch(0):
                got.append(batch)
        assert "\n" not in str(caught.value)
        assert loader is None or 11 in expected[len(got)].index.tolist()
        assert all(equal(a, b) for a, b in zip(got, expected, strict=False))
        crops = central(name, root)
        for _ in range(2 if name in ("native", "ffcv") else 0):  # the engine crops for all
            part = iter(crops)
            assert next(part).index.tolist() == list(range(8))
            with pytest.raises(DataError, match=DECODE_ERROR):
                next(part)
        change_image(name, root, 11, lambda _, intact=intact: intact)  # type: ignore[misc]
    assert loader is None or same(list(loader.epoch(0)), expected)
    if loader is not None and name not in ("ffcv", PAGES):
        (root / "class1" / "003.jpg").unlink()
        with pytest.raises(DataError, match=r"cannot read .*class1/003\.jpg"):
            list(loader.epoch(0))
