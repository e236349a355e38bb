"""Bad images: what is shown in their place, the same by every pipeline and on several ranks."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastsiam.bad_image_list import FILE, BadImage, read_bad_images
from fastsiam.config import ConvertConfig, DataConfig
from fastsiam.errors import CheckpointError, DataError, ImageError
from fastsiam.pipelines import BadImages, build_eval_loader, build_loader, open_store
from fastsiam.pipelines.convert.command import convert_data
from fastsiam.pipelines.store import BetonStore, FolderStore
from fastsiam.views.batch import Batch
from tests.conftest import write_images
from tests.pipelines.cases import SMALL, THREADED, WITH_IMAGES, joined, readable

IMAGES, BATCH = 24, 8
BAD = (3, 10, 20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of 24 images in three classes."""
    return write_images(tmp_path / "images")


@pytest.fixture
def beton(folder: Path) -> Path:
    """The same images, converted."""
    out = folder.parent / "converted"
    convert_data("folder", ConvertConfig(source=str(folder), out=str(out)))
    return out / "train.beton"


def path_of(folder: Path, index: int) -> Path:
    return FolderStore(folder).path(index)


def damage(folder: Path, indices: Sequence[int] = BAD) -> None:
    """Cut the first off, make the second something else, and the third empty, and so on."""
    for number, index in enumerate(indices):
        path = path_of(folder, index)
        content = path.read_bytes()
        path.write_bytes([content[: len(content) * 2 // 3], b"no image" * 50, b""][number % 3])


def damage_in(beton: Path) -> None:
    """Overwrite records: all of one, the second half of one, the header's sizes of one."""
    store = open_store(beton, "train")
    assert isinstance(store, BetonStore)
    with beton.open("r+b") as file:
        for index, kind in zip(BAD, ("all", "half", "size"), strict=True):
            start, size = int(store.start[index]), int(store.size[index])
            record = bytes(store.read(index))
            if kind == "size":  # another height than the file's table says
                at = record.index(b"\xff\xc0") + 5
                file.seek(start + at)
                file.write((int(store.height[index]) - 8).to_bytes(2, "big"))
                continue
            begin = 0 if kind == "all" else size // 2
            file.seek(start + begin)
            file.write(b"\xff\x05" * ((size - begin) // 2))


def load(
    name: str,
    root: Path,
    epochs: Sequence[int] = (0, 1),
    *,
    skip: int = 0,
    bad_images: str = "replace",
    **how: Any,
) -> list[Batch]:
    """Return all batches of some epochs, the first of them from a step on."""
    workers = int(name != "torchvision")
    data = DataConfig(data=str(root), pipeline=name, workers=workers, bad_images=bad_images)  # type: ignore[arg-type]
    loader = build_loader(data, SMALL, batch=BATCH, seed=4, **how)
    try:
        return [
            Batch(tuple(view.clone() for view in batch.views), batch.index, batch.label)
            for epoch in epochs
            for batch in loader.epoch(epoch, skip=skip if epoch == epochs[0] else 0)
        ]
    finally:
        loader.close()


def shown(batches: Sequence[Batch]) -> list[int]:
    return torch.cat([batch.index for batch in batches]).tolist()


def in_place(order: Sequence[int], bad: Sequence[int] = BAD) -> list[int]:
    """Return what an epoch of whole batches shall show, by the order without bad images."""
    half = [*order[IMAGES // 2 :], *order, *order]
    return [
        next(other for other in half[place:] if other not in bad) if image in bad else image
        for place, image in enumerate(order)
    ]


def assert_alike(one: Sequence[Batch], other: Sequence[Batch], *, within: float = 0.0) -> None:
    assert shown(one) == shown(other)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.label, b.label)
        for view, expected in zip(a.views, b.views, strict=True):
            torch.testing.assert_close(view, expected, atol=within, rtol=0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(*name.values, kind, marks=name.marks)
        for name in WITH_IMAGES
        for kind in ("folder", "beton")
        if (*name.values, kind) != ("ffcv", "folder")  # it reads converted files
    ],
)
def test_others_are_shown_in_the_place_of_bad_ones(
    name: str, kind: str, folder: Path, beton: Path
) -> None:
    """The one half an epoch away, with draws of its own; all others are what they were.

    Two ranks show the same, and so does a run that has the list, from any step on: what is in the
    list stays replaced when the images are repaired.
    """
    root = folder if kind == "folder" else beton
    whole, good = load(name, root), root.with_name(f"good-{root.name}")
    (shutil.copytree if root.is_dir() else shutil.copy)(root, good)
    damage(folder) if kind == "folder" else damage_in(beton)
    found = BadImages(IMAGES)
    batches = load(name, root, bad=found)
    for epoch in (slice(0, 3), slice(3, 6)):
        assert shown(batches[epoch]) == in_place(shown(whole[epoch]))
    assert sorted(own.index for own in found.list()) == list(BAD)
    assert shown(batches[:3]) != shown(batches[3:]) and not set(BAD) & set(shown(batches))
    assert_alike(batches, load("torchvision", root), within=1e-5)
    views, before = (torch.cat([b.view1 for b in part]) for part in (batches, whole))
    bad = torch.isin(torch.tensor(shown(whole)), torch.tensor(BAD))
    assert bad.sum() == 6 and torch.equal(views[~bad], before[~bad])
    twice = torch.tensor(shown(batches))
    for place in bad.nonzero().flatten().tolist():
        alike = twice == twice[place]
        alike[place] = False
        assert alike.any() and not (views[alike] == views[place]).flatten(1).all(1).any()
    parts = [load(name, root, rank=rank, world=2) for rank in (0, 1)]
    assert_alike([joined(both) for both in zip(*parts, strict=True)], batches)
    for takes_more in (True, False):
        known = BadImages(IMAGES, found.list(), takes_more=takes_more)
        assert_alike(load(name, good, skip=1, bad=known), batches[1:])


@pytest.mark.parametrize("name", ["torchvision", "memory"])
def test_an_image_that_goes_bad_later_was_good_before(name: str, folder: Path) -> None:
    """The list says since when: epochs before show what they showed."""
    whole = load(name, folder, [0, 1, 2])
    found = BadImages(IMAGES)
    damage(folder, [5])
    rest = load(name, folder, [1, 2], bad=found)
    (own,) = found.list()
    assert "truncated" in own.reason
    at = shown(whole[3:6]).index(5) // BATCH
    assert own == BadImage(3 + at, 5, "class0/005.jpg", own.reason, 1)
    folder = write_images(folder.parent / "again")
    assert_alike(load(name, folder, [0, 1, 2], bad=BadImages(IMAGES, [own])), whole[:3] + rest)


def test_too_many(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """To be replaced, or to be left out of an evaluation."""
    data = DataConfig(data=str(folder), pipeline="torchvision", workers=0, bad_images="replace")
    damage(folder, range(8))
    assert set(range(8)).isdisjoint(shown(load("torchvision", folder, [0])))
    list(build_eval_loader(data, "train", SMALL, resize=20))
    assert f"8 bad images of {folder} are left out" in caplog.messages
    damage(folder, range(9))
    message = (
        r"9 of 24 images cannot be decoded, the last one class\d/00\d\.jpg \(.*\), .* at most 8:"
    )
    with pytest.raises(DataError, match=message) as error:
        load("torchvision", folder)
    assert not isinstance(error.value, ImageError)
    with pytest.raises(DataError, match="9 of 24 images cannot be decoded"):
        list(build_eval_loader(data, "train", SMALL, resize=20))


def test_what_ranks_find_is_told_to_all() -> None:
    """Of two finds of one image the first in the run counts."""
    kept: list[list[bytes]] = [[], []]
    told: list[str] = []

    def collect(text: str) -> list[str]:
        told.append(text)
        return [text]

    ranks = [BadImages(1000, exchange=collect, keep=own.append) for own in kept]
    ranks[0].note(ImageError("m", index=7, name="a", reason="b"), epoch=1, step=13)
    ranks[1].note(ImageError("m", index=7, name="a", reason="b"), epoch=0, step=4)
    ranks[1].note(ImageError("m", index=5, name="c", reason="d"), epoch=0, step=9)
    for rank in ranks:
        rank.share()
    together = [BadImages(1000, rank.list(), exchange=lambda _: told) for rank in ranks]
    for rank in together:
        rank.share()
        assert rank.list() == [BadImage(4, 7, "a", "b", 0), BadImage(9, 5, "c", "d", 0)]
    assert [len(own) for own in kept] == [1, 2]


def test_the_list_in_a_folder(tmp_path: Path) -> None:
    assert read_bad_images(tmp_path) == []
    bad = BadImages(1000, keep=(tmp_path / FILE).write_bytes)  # type: ignore[arg-type]
    bad.note(ImageError("m", index=7, name="a\udcff", reason="b"), epoch=1, step=13)
    assert read_bad_images(tmp_path) == bad.list()
    (tmp_path / FILE).write_text("{")
    with pytest.raises(CheckpointError, match="cannot read the list of the run's bad images"):
        read_bad_images(tmp_path)


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_central_crops_leave_bad_images_out(name: str, beton: Path) -> None:
    """On every pass, kept or made again; ``rows`` tells which rows are shown."""
    data = DataConfig(data=str(beton), pipeline=name, workers=1, bad_images="replace")  # type: ignore[arg-type]
    whole = next(iter(build_eval_loader(data, "train", SMALL, resize=20, batch=24)))
    damage_in(beton)
    left = [index for index in range(IMAGES) if index not in BAD]
    for batch in (8, 1):
        loader = build_eval_loader(data, "train", SMALL, resize=20, batch=batch)
        for _ in range(2):
            rows, shown = loader.rows(), []
            for part in loader:
                assert [next(rows) for _ in range(len(part.index))] == part.index.tolist()
                torch.testing.assert_close(part.image, whole.image[part.index], atol=1e-5, rtol=0)
                assert torch.equal(part.label, whole.label[part.index])
                shown += part.index.tolist()
            assert shown == left == list(loader.rows())
        assert loader.images == len(loader.names()) == IMAGES
    stops = replace(data, bad_images="stop")
    with pytest.raises(ImageError):
        list(build_eval_loader(stops, "train", SMALL, resize=20))


@pytest.mark.parametrize("name", THREADED)
def test_bad_is_what_pillow_refuses(name: str, tmp_path: Path) -> None:
    """Whatever is damaged: decoders that look at a part of an image, or make things up, too."""
    folder = write_images(tmp_path / "images", classes=2, each=12, side=160)
    root = readable(name, folder)
    generator = np.random.default_rng(0)
    if root == folder:
        for path in folder.rglob("*.jpg"):
            path.write_bytes(_hurt(path.read_bytes(), generator))
    else:
        store, whole = open_store(root, "train"), (root / "train.beton").read_bytes()
        assert isinstance(store, BetonStore)
        for index in range(IMAGES):
            start, end = int(store.start[index]), int(store.start[index] + store.size[index])
            whole = whole[:start] + _hurt(whole[start:end], generator) + whole[end:]
        (root / "train.beton").write_bytes(whole)
    store = open_store(root, "train")
    refused = set()
    for index in range(IMAGES):
        try:
            store.decode(index)
        except ImageError:
            refused.add(index)
    assert 5 < len(refused) < IMAGES - 5
    found, reference = BadImages(10**6), BadImages(10**6)
    batches = load(name, root, bad=found)
    assert {own.index for own in found.list()} == refused
    assert_alike(batches, load("memory", root, bad=reference), within=1e-5)
    assert found.list() == reference.list()


def _hurt(data: bytes, generator: np.random.Generator) -> bytes:
    """Overwrite some bytes anywhere in an image, by chance or by zeros."""
    length = int(generator.integers(1, generator.choice([4, 60, 2000])))
    at = int(generator.integers(0, len(data) - length))
    hurt = generator.bytes(length) if generator.random() < 0.7 else bytes(length)
    return data[:at] + hurt + data[at + length :]
