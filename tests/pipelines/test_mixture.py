"""Mixtures of data sets: their order, their stores, and every pipeline on them."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsiam.config import DataConfig, Pipeline
from fastsiam.errors import FileLostError
from fastsiam.pipelines import build_loader, open_split
from fastsiam.pipelines.shuffle import Mixture, full_shuffle, positions_of, shuffle_of
from fastsiam.pipelines.store import MixedStore, Store, open_store, select_images
from fastsiam.pipelines.store.base import in_order
from fastsiam.pipelines.subsets import open_training
from fastsiam.views import rng
from tests.conftest import write_images
from tests.data_formats import FORMS
from tests.pipelines.cases import SMALL, WITH_IMAGES, batches, equal, first, same
from tests.sources import jpeg, put, rotated_jpeg, tar


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    counts = draw(st.lists(st.integers(1, 300), min_size=2, max_size=4))
    weights = draw(st.one_of(st.just(counts), st.tuples(*[st.floats(0.01, 100)] * len(counts))))
    window = draw(st.sampled_from([0, 1, 50]))
    sets = np.repeat(np.arange(len(counts)), counts)
    return Mixture(sets, tuple(weights), window, in_order(len(sets)) if window else None)


@settings(max_examples=40, derandomize=True, database=None)
@given(mixtures(), st.integers(0, 2**32), st.integers(0, 50), st.integers(1, 3))
def test_epochs_have_exact_shares_and_use_images_equally(
    mixture: Mixture, seed: int, start: int, epochs: int
) -> None:
    images, seen = len(mixture), np.zeros(len(mixture), np.int64)
    for epoch in range(start, start + epochs):
        numbers = mixture.epoch(seed, epoch)
        assert len(np.unique(numbers)) == images, "two positions would get the same views"
        epoch_sets = mixture.sets[positions_of(numbers)]
        expected = np.array(mixture.weights) / sum(mixture.weights) * images
        assert np.bincount(epoch_sets, minlength=len(expected)).tolist() == mixture.shares()
        assert np.abs(mixture.shares() - expected).max() < 1
        half = np.bincount(epoch_sets[: images // 2], minlength=len(expected))
        assert np.abs(half - expected / 2).max() <= 3, "data sets are not spread over the epoch"
        seen += np.bincount(positions_of(numbers), minlength=images)
        if mixture.shares() == np.bincount(mixture.sets).tolist():  # as by default
            assert np.array_equal(np.sort(numbers), np.arange(images))
    for one in range(len(mixture.weights)):
        counts = seen[mixture.sets == one]
        assert counts.max() - counts.min() <= 1 + (start > 0), (
            "images of a data set are shown unequally"
        )


def test_passes_over_small_data_set_are_its_full_shuffles() -> None:
    mixture = Mixture(np.repeat([0, 1], [900, 4]), (1, 1))
    positions = np.concatenate([positions_of(mixture.epoch(3, epoch)) for epoch in range(2)])
    seed = int(rng.keys(3, rng.Stream.MIXTURE, 1)[0])
    passes = [full_shuffle(4, seed, number) for number in range(226)]
    np.testing.assert_array_equal(positions[positions >= 900] - 900, np.concatenate(passes))


@pytest.mark.parametrize("name", ["native", "memory", "torchvision"])
def test_row_without_bytes_is_replaced_in_mixture(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The bad image is that of the mixture, not the one at the row's place in its own data set."""
    folder = write_images(tmp_path / "folder", classes=2, each=8)
    (tmp_path / "rows").mkdir()
    rows = [{"image": {"bytes": b"" if i == 3 else jpeg(i)}, "label": 0} for i in range(8)]
    file = tmp_path / "rows" / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file, compression="none", use_dictionary=False)
    mixed_with = (str(tmp_path / "rows"),)
    loaded = batches(name, folder, mixed_with=mixed_with, workers=1, bad_images="replace")
    indices = np.concatenate([batch.index.numpy() for batch in loaded])
    assert len(indices) == 24 and 19 not in indices and 3 in indices
    assert [x.getMessage() for x in caplog.records if "bad image" in x.getMessage()] == [
        "bad image 19 (1/0/row 3): the row has no bytes; another image replaces it"
    ]


@pytest.fixture
def halves(images: Path, tmp_path: Path) -> list[Path]:
    """Two folders that split the classes of ``images``."""
    roots = [tmp_path / "first", tmp_path / "second"]
    for number, folder in enumerate(sorted((images / "train").iterdir())):
        shutil.copytree(folder, roots[number > 0] / "train" / folder.name)
    return roots


def test_mixed_store_reads_stores_of_every_kind(images: Path, tmp_path: Path) -> None:
    folder = images / "train"
    stores: list[Store] = [
        open_store(write(folder, tmp_path / name.replace(" ", "-")), "train")
        for name, write in FORMS.items()
    ]
    mixed = MixedStore(stores)
    first = np.cumsum([0, *map(len, stores)])
    assert len(mixed) == first[-1] and set(mixed.classes) >= set(stores[0].classes)
    some = np.concatenate([[a, b - 1] for a, b in pairwise(first)])[::-1].copy()
    contents = mixed.read_into(some, lambda: memoryview(bytearray(1 << 20)))
    part = select_images(mixed, some)
    for row, index in enumerate(some.tolist()):
        number = int(np.searchsorted(first, index, "right")) - 1
        position, store = index - int(first[number]), stores[number]
        assert bytes(contents[row]) == bytes(store.read(position)) == bytes(part.read(row))
        assert mixed.name(index) == f"{number}/{store.name(position)}" == part.name(row)
        assert mixed.where(index) == store.where(position)
        assert mixed.class_name(index) == store.class_name(position)
        assert mixed.sizes()[index] == store.sizes()[position]
        assert mixed.decode(index).tobytes() == store.decode(position).tobytes()
    blocks = mixed.blocks()
    assert all(blocks[a:b].min() > blocks[:a].max() for a, b in pairwise(first[1:]))


def test_mixed_store_check_detects_truncated_file(tmp_path: Path) -> None:
    """Even if together they have more files than a single data set checks."""
    names = [tmp_path / "one" / "0.tar", *(tmp_path / "many" / f"{i}.tar" for i in range(17))]
    tars = [tar(path, [("a/0.jpg", jpeg(0))]) for path in names]
    mixed = MixedStore([open_store(tmp_path / name, "train") for name in ("one", "many")])
    mixed.check()
    os.truncate(tars[0], 100)
    with pytest.raises(FileLostError, match=r"one/0\.tar changed while it was read"):
        mixed.check()


@pytest.mark.parametrize("name", [one for one in WITH_IMAGES if one.values != ("ffcv",)])
def test_mixture_batches_equal_single_folder(
    name: Pipeline, images: Path, halves: list[Path]
) -> None:
    two: Any = {"data": str(halves[0]), "mixed_with": (str(halves[1]),), "weights": "3,1"}
    data = DataConfig(**two, pipeline=name, workers=0)
    store, _, _ = open_training(data)
    one = replace(data, data=str(images), mixed_with=(), weights=())
    assert [store.name(i).partition("/")[2] for i in range(len(store))] == [
        open_split(one, "train").name(i) for i in range(len(store))
    ]
    make = partial(build_loader, augment=SMALL, batch=8, seed=5)
    shuffle = shuffle_of(data, sets=store.sets, blocks=None)
    for epoch in (0, 3):
        mixed = first(make(data), epoch)
        assert equal(mixed, first(make(one, shuffle=shuffle), epoch))
        assert mixed.names == [store.name(i) for i in mixed.index.tolist()]


@pytest.mark.parametrize("name", ["native", "torchvision", "memory"])
def test_exif_applies_in_mixture_with_converted_data_set(name: Pipeline, tmp_path: Path) -> None:
    """``--exif`` applies to the other data sets of a mixture, whichever data set is first."""
    plain = write_images(tmp_path / "plain", classes=1)
    for i in range(8):
        put(tmp_path / f"turned/a/{i}.jpg", rotated_jpeg(i))
    turned, converted = tmp_path / "turned", FORMS["converted"](plain, tmp_path / "converted")
    files, beton, ignored = (
        batches(name, root, batch=4, mixed_with=(str(turned),), exif=exif)
        for root, exif in ((plain, "apply"), (converted, "apply"), (plain, "ignore"))
    )
    assert same(files, beton) and not same(files, ignored)


def test_holdout_applies_to_each_data_set(halves: list[Path]) -> None:
    data = DataConfig(data=str(halves[0]), mixed_with=(str(halves[1]),), holdout="25%")
    store, train_positions, held_out = open_training(data)
    parts = [open_training(part) for part in data.parts]
    assert len(train_positions) == sum(len(part[1]) for part in parts)
    names = [f"{number}/{part[0].name(i)}" for number, part in enumerate(parts) for i in part[2]]
    assert [store.name(i) for i in held_out.tolist()] == names


def test_invalid_weights_are_rejected() -> None:
    for weights in ("1", "1,2,3", "1,0", "1,-1", "a,b", "1,nan"):
        with pytest.raises(ValueError, match=r"weights must (be|have)"):
            DataConfig(data="a", mixed_with=("b",), weights=weights)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weights must (be|have)"):
        DataConfig(data="a", weights=(1,))
