"""Every store returns the images that were written, in any form and for any kind of image."""

from __future__ import annotations

import ctypes
import os
import pickle
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastsiam.pipelines.store import (
    ArchiveStore,
    ArrowStore,
    BetonStore,
    CifarStore,
    FolderStore,
    ListedStore,
    ParquetStore,
    Store,
    base,
    open_store,
    select_images,
)
from fastsiam.pipelines.store.base import BLOCK_IMAGES, blocks
from fastsiam.pipelines.store.decode import decode
from tests.conftest import write_images
from tests.data_formats import FORMS
from tests.pipelines.dali_cases import KINDS
from tests.sources import cifar

Images = list[tuple[str, bytes]]
"""Names and bytes of the images that were written."""

SAMPLES = {kind: make(number) for number, (kind, make) in enumerate(KINDS.items())}
STORES = {
    "folder": FolderStore, "csv": ListedStore, "saved": ArrowStore, "hub": ParquetStore,
    "converted": BetonStore, "parts": BetonStore, "pixels": BetonStore,
}  # fmt: skip
"""Store type of each form; the other forms are tars."""


@st.composite
def data_sets(draw: st.DrawFn) -> tuple[Images, list[int]]:
    """Draw sorted images in class folders, and positions to pick, possibly repeated."""
    images = []
    for number, name in enumerate(draw(st.lists(st.sampled_from(["ant", "b c", "ü"]), min_size=3))):
        images.append((f"{name}/{number:03} é.jpg", SAMPLES[draw(st.sampled_from([*SAMPLES]))]))
    places = st.integers(0, len(images) - 1)
    return sorted(images), draw(st.lists(places, min_size=1, max_size=9))


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=3, derandomize=True, database=None,
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(data_sets())
def test_every_store_returns_stored_images(form: str, data_set: tuple[Images, list[int]]) -> None:
    images, positions = data_set
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "images")
        for place, data in images:
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / place).write_bytes(data)
        path = FORMS[form](folder, Path(name, form))
        store = open_store(path, "train")
        assert isinstance(store, STORES.get(form, ArchiveStore))
        assert_holds(store, form, images)
        assert_holds(pickle.loads(pickle.dumps(store)), form, images)
        assert_holds(open_store(path, "train", sources=True), form, images, in_order=True)
        assert_picked(store, np.array(positions))
        assert open_store(path, "train").stamp() == store.stamp()
        if (places := store.locate(np.arange(len(store)))) is not None:
            for i, (address, size) in enumerate(np.transpose(places).tolist()):
                assert ctypes.string_at(address, size) == bytes(store.read(i))
        if isinstance(store, BetonStore) and form != "parts":
            assert store.crc is not None
            assert store.crc.tolist() == [zlib.crc32(store.read(i)) for i in range(len(store))]
        before = store.stamp()
        for file in path.rglob("*.*") if path.is_dir() else (path, *folder.rglob("*.*")):
            os.utime(file, (1, 1))
        assert open_store(path, "train").stamp() != before


def assert_holds(store: Store, form: str, images: Images, *, in_order: bool = False) -> None:
    """Check that a store has the written images; ``in_order`` if it was opened as a source."""
    every = np.arange(len(images))
    names = [name for name, _ in images]
    classes = sorted({name.split("/")[0] for name in names})
    assert len(store) == len(images)
    assert store.labels.tolist() == [classes.index(name.split("/")[0]) for name in names]
    if form == "shards":
        assert store.classes == tuple(map(str, range(len(classes))))
    else:
        assert store.classes == tuple(classes)
        store_names = [store.name(i) for i in every.tolist()]
        if form == "csv":  # its paths are absolute
            store_names = [
                full_name[-len(name) :] for full_name, name in zip(store_names, names, strict=True)
            ]
        assert store_names == names
    data = [bytes(store.read(i)) for i in every.tolist()]
    chunks = store.read_into(every, lambda: memoryview(bytearray(3000)))
    assert data == [bytes(chunk) for chunk in chunks]
    if form == "pixels":
        assert [store.raw_size(i) for i in every.tolist()] == [
            decode(content).size[::-1] for _, content in images
        ]
    elif form not in ("converted", "parts"):  # these re-encode PNGs
        assert data == [content for _, content in images]
    known = store.dimensions()
    store.prefetch(every.tolist())
    store.check()
    for i, (_, source) in enumerate(images):
        decoded = store.decode(i)
        assert decoded.tobytes() == decode(data[i], store.raw_size(i)).tobytes()
        if data[i] == source or form == "pixels":
            assert decoded.tobytes() == decode(source).tobytes()
        assert store.is_intact(i, data[i])
        assert known is None or known[i].tolist() == [*decoded.size[::-1]]
        if not (in_order and isinstance(store, ParquetStore)):
            assert store.sizes()[i] == len(data[i])
        assert Path(name := store.name(i)).name in store.where(i) and "\n" not in name


def assert_picked(store: Store, positions: np.ndarray) -> None:
    """Check that a store of selected images has the images of the given positions."""
    subset = select_images(store, positions)
    assert type(subset) is type(store) and str(subset) == str(store)
    assert len(subset) == len(positions) and subset.classes == store.classes
    sizes, known = store.dimensions(), subset.dimensions()
    assert (sizes is None) == (known is None)
    assert subset.blocks().tolist() == store.blocks()[positions].tolist()
    for i, position in enumerate(positions.tolist()):
        data = store.read(position)
        assert bytes(subset.read(i)) == bytes(data) and subset.is_intact(i, data)
        assert subset.name(i) == store.name(position) and subset.where(i) == store.where(position)
        assert subset.labels[i] == store.labels[position]
        assert subset.sizes()[i] == store.sizes()[position]
        assert subset.raw_size(i) == store.raw_size(position)
        assert subset.decode(i).tobytes() == store.decode(position).tobytes()
        if sizes is not None and known is not None:
            assert known[i].tolist() == sizes[position].tolist()
    again = select_images(subset, np.array([len(subset) - 1, 0, 0]))
    assert again.name(0) == store.name(int(positions[-1]))
    assert bytes(again.read(1)) == bytes(store.read(int(positions[0])))
    assert select_images(store, np.arange(len(store))) is store


def test_cifar_store_locates_pixels(tmp_path: Path) -> None:
    store = open_store(cifar(tmp_path / "cifar-10-python.tar.gz"), "train")
    assert isinstance(store, CifarStore)
    assert_picked(store, np.array([23, 0, 0, 7, 11, 2]))
    address, size = store.locate(np.arange(len(store)))
    assert size.tolist() == [len(store.read(i)) for i in range(len(store))]
    assert [ctypes.string_at(at, 9) for at in address.tolist()] == [
        bytes(store.read(i))[:9] for i in range(len(store))
    ]


def test_blocks_are_contiguous_in_one_file(tmp_path: Path) -> None:
    file = np.repeat([1, 0], [100, 10])
    offset = np.concatenate([np.arange(100)[::-1], np.arange(10)])
    block = blocks(file, offset)
    assert block[100:].tolist() == [0] * 10  # file 0 comes first
    assert (block[100 - BLOCK_IMAGES : 100] == 1).all() and (block[: 100 - BLOCK_IMAGES] == 2).all()
    assert blocks(np.zeros(0, int), np.zeros(0, int)).shape == (0,)
    images = write_images(tmp_path / "images", classes=2, each=BLOCK_IMAGES + 9)
    for form in ("folder", "converted"):
        store = open_store(FORMS[form](images, tmp_path / form), "train")
        assert store.blocks().tolist() == base.in_order(len(store)).tolist()
