"""Data sets of Hugging Face's ``datasets`` in place: saved to disk, and parquet of every kind."""

from __future__ import annotations

import builtins
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastsiam.errors import DataError, NoSplitError
from fastsiam.pipelines.store import (
    ArrowStore,
    FolderStore,
    ParquetStore,
    Store,
    index,
    open_store,
    row_groups,
)
from tests.conftest import ROOT, write_images
from tests.conversions import run, same_images
from tests.pipelines.cases import build, equal
from tests.sources import encoded, jpeg, parquet, picture
from tests.tables import Row, dataset, on_the_hub, saved
from tests.tiers import rest_slow

CLASSES = ("class0", "class1", "class2")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def rows_of(folder: Path) -> list[Row]:
    store = FolderStore(folder)
    return [
        (bytes(store.read(i)), store.name(i).split("/")[1], int(store.labels[i]))
        for i in range(len(store))
    ]


def splits_of(images: Path) -> dict[str, Any]:
    return {
        "train": dataset(rows_of(images / "train"), CLASSES),
        "validation": dataset(rows_of(images / "val"), CLASSES),
    }


def as_saved(root: Path, images: Path) -> Path:
    return saved(root, splits_of(images), train=3, validation=1)


def as_on_the_hub(root: Path, images: Path) -> Path:
    return on_the_hub(root, splits_of(images))


def as_compressed(root: Path, images: Path) -> Path:
    """By pyarrow's defaults: compressed by snappy, in dictionaries."""
    for split, own in (("train", "train"), ("validation", "val")):
        rows: Any = rows_of(images / own)
        parquet(root / "data" / f"{split}-00000-of-00001.parquet", rows, list(CLASSES))
    return root


FORMS = {"saved": as_saved, "hub": as_on_the_hub, "compressed": as_compressed}


@pytest.mark.parametrize("form", FORMS)
def test_the_same_images_as_the_files(form: str, images: Path, tmp_path: Path) -> None:
    root = FORMS[form](tmp_path / "it is here", images)
    for split, own in (("train", "train"), ("val", "val")):
        store, folder = open_store(root, split), FolderStore(images / own)  # type: ignore[arg-type]
        assert isinstance(store, ArrowStore if form == "saved" else ParquetStore)
        same_images(store, folder)
        assert [store.name(i) for i in range(len(store))] == [
            folder.name(i) for i in range(len(store))
        ]
        assert store.sizes().tolist() == folder.sizes().tolist() and store.groups is None
        again: Store = pickle.loads(pickle.dumps(store))
        assert bytes(again.read(3)) == bytes(folder.read(3))
        assert store.where(9).startswith("row ") and "class1/001.jpg" in open_store(
            root, "train"
        ).where(9)


@pytest.mark.parametrize("form", rest_slow(list(FORMS)))
@pytest.mark.parametrize(
    "name",
    ["torchvision", "memory", pytest.param("dali", marks=pytest.mark.dali)],
)
def test_every_pipeline_shows_the_same_views(
    name: str, form: str, images: Path, tmp_path: Path
) -> None:
    """From loader processes too; gray and PNG among them."""
    first = images / "train" / "class0"
    (first / "000.jpg").write_bytes(encoded(picture(0).convert("L")))
    (first / "001.jpg").write_bytes(encoded(picture(1), "PNG"))
    root = FORMS[form](tmp_path / form, images)
    loaders = [build(name, own, workers=2) for own in (root, images)]
    batches = [list(loader.epoch(0)) for loader in loaders]
    for loader in loaders:
        loader.close()
    assert len(batches[0]) == 3 and all(map(equal, *batches))


@pytest.mark.parametrize("form", FORMS)
def test_converted_by_the_same_way(form: str, images: Path, tmp_path: Path) -> None:
    root = FORMS[form](tmp_path / form, images)
    kinds = ["folder"] if form == "saved" else ["folder", "parquet"]
    for kind in kinds:
        run(kind, root, tmp_path / kind, workers=2)
        for split, own in (("train", "train"), ("val", "val")):
            same_images(open_store(tmp_path / kind, split), FolderStore(images / own))  # type: ignore[arg-type]
    assert not list(root.rglob(".*"))  # a conversion reads in order: it needs no index


def test_one_saved_dataset(images: Path, tmp_path: Path) -> None:
    dataset(rows_of(images / "train"), ()).save_to_disk(tmp_path / "one")
    store = open_store(tmp_path / "one", "train")
    assert len(store) == 24 and store.classes == ("0", "1", "2")
    with pytest.raises(NoSplitError):
        open_store(tmp_path / "one", "val")
    one = dataset(rows_of(images / "train"), ()).remove_columns("label")
    one.save_to_disk(tmp_path / "bare")
    bare = open_store(tmp_path / "bare", "train")
    assert bare.classes == () and set(bare.labels) == {-1} and bare.name(0) == "000.jpg"


def test_one_parquet_file(images: Path, tmp_path: Path) -> None:
    root = as_on_the_hub(tmp_path / "hub", images) / "data"
    assert len(open_store(root / "train-00001-of-00002.parquet", "train")) == 12
    assert len(open_store(root / "train-00001-of-00002.parquet", "val")) == 12
    alone = (root / "validation-00000-of-00002.parquet").rename(tmp_path / "mine.parquet")
    assert len(open_store(alone, "train")) == 6
    with pytest.raises(NoSplitError, match="no val split beside it"):
        open_store(alone, "val")


def test_configurations_of_a_data_set_are_not_mixed(images: Path, tmp_path: Path) -> None:
    as_on_the_hub(tmp_path / "hub", images)
    (tmp_path / "hub" / "data").rename(tmp_path / "hub" / "first")
    assert len(open_store(tmp_path / "hub", "train")) == 24
    shutil.copytree(tmp_path / "hub" / "first", tmp_path / "hub" / "second")
    with pytest.raises(DataError, match=r"in several folders .*\(first, second\): name one"):
        open_store(tmp_path / "hub", "train")


def test_the_index_is_kept_until_the_files_change(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    root = as_on_the_hub(tmp_path / "hub", images)
    for times in (1, 1):
        open_store(root, "train")
        assert len([r for r in caplog.records if "indexed 24 images" in r.message]) == times
    (kept,) = root.rglob(".*.fastsiam-index")
    assert f"kept in {kept}" in caplog.text
    rows = rows_of(images / "train")[::-1]
    shutil.rmtree(root)
    on_the_hub(root, {"train": dataset(rows, CLASSES)})
    store = open_store(root, "train")
    assert [bytes(store.read(i)) for i in range(24)] == [data for data, _, _ in rows]


def test_large_files_are_indexed_by_several_processes(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_groups, "ALONE_BYTES", 0)
    store = open_store(as_on_the_hub(tmp_path / "hub", images), "train")
    same_images(store, FolderStore(images / "train"))


def test_compressed_images_are_unpacked_once_and_said_where(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    root = as_compressed(tmp_path / "old", images)
    for _ in range(2):
        open_store(root, "train")
    (kept,) = root.rglob(".*.fastsiam-images")
    (said,) = [r.message for r in caplog.records if "unpacked" in r.message]
    assert f"into {kept}" in said and " MB)" in said
    assert kept.stat().st_size == FolderStore(images / "train").sizes().sum()
    kept.write_bytes(b"damage")
    same_images(open_store(root, "train"), FolderStore(images / "train"))


def test_a_place_that_cannot_be_written_is_not_said(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    root = as_compressed(tmp_path / "old", images)
    device = Path("/proc/sys/x.index")  # no file can be made there, by root neither
    monkeypatch.setattr(index, "homes", lambda *_: [device, tmp_path / "cache" / "x.index"])
    room = SimpleNamespace(free=10**12)  # which is 0 there
    monkeypatch.setattr("shutil.disk_usage", lambda _: room)
    same_images(open_store(root, "train"), FolderStore(images / "train"))
    (said,) = [r.message for r in caplog.records if "unpacked" in r.message]
    assert f"into {tmp_path / 'cache' / 'x.fastsiam-images'}" in said


def test_too_many_compressed_images_are_refused(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = as_compressed(tmp_path / "old ones", images)
    monkeypatch.setattr(row_groups, "MOST_UNPACKED", 1000)
    with pytest.raises(DataError, match=r"compressed .* fastsiam convert parquet --source '.*old "):
        open_store(root, "train")
    assert len(open_store(root, "train", sources=True)) == 24


def test_no_room_for_unpacked_images(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = as_compressed(tmp_path / "old", images)
    full = SimpleNamespace(total=9, used=9, free=0)
    monkeypatch.setattr("shutil.disk_usage", lambda _: full)
    with pytest.raises(DataError, match=r"could not be had in .* convert parquet"):
        open_store(root, "train")


def test_images_that_are_alike_are_found(tmp_path: Path) -> None:
    """A dictionary holds one of them; pyarrow compresses none here."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    data = [jpeg(i % 3) for i in range(12)] + [jpeg(50 + i, quality=95) for i in range(9)]
    table = pa.table({"jpg": data, "label": [0] * 21})
    pq.write_table(table, tmp_path / "x.parquet", compression="none", row_group_size=8)
    store = open_store(tmp_path, "train")
    assert [bytes(store.read(i)) for i in range(21)] == data
    assert not list(tmp_path.glob("*.fastsiam-images"))


def test_an_image_column_is_found_by_its_type(tmp_path: Path) -> None:
    rows: list[Row] = [(jpeg(i), None, 0) for i in range(3)]
    one = dataset(rows, ["a"], image="picture")
    one.save_to_disk(tmp_path / "one")
    store = open_store(tmp_path / "one", "train")
    assert bytes(store.read(1)) == jpeg(1) and store.name(1) == "a/row 1"
    two = one.add_column("mask", one.with_format("arrow")[:]["picture"].to_pylist())
    two.save_to_disk(tmp_path / "two")
    two.to_parquet(tmp_path / "two.parquet")
    three = two.cast_column("mask", one.features["picture"])
    three.save_to_disk(tmp_path / "three")
    assert bytes(open_store(tmp_path / "two", "train").read(1)) == jpeg(1)
    with pytest.raises(DataError, match=r"2 columns that can hold images \(picture, mask\)"):
        open_store(tmp_path / "three", "train")
    one.remove_columns("picture").to_parquet(tmp_path / "none.parquet")
    with pytest.raises(DataError, match=r"no column that can hold images .*, only label"):
        open_store(tmp_path / "none.parquet", "train")


@pytest.mark.parametrize("write", ["save", "none", "snappy"])
def test_paths_alone_are_refused(write: str, images: Path, tmp_path: Path) -> None:
    """A path of one image among others that have bytes is that image's fault."""
    path = str(images / "train" / "class0" / "000.jpg")
    target = tmp_path / ("x" if write == "save" else "x.parquet")

    def stored(rows: list[Row]) -> Path:
        import pyarrow as pa
        from pyarrow import parquet as pq

        shutil.rmtree(target, ignore_errors=True)
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        column = pa.array([{"bytes": data, "path": own} for data, own, _ in rows], kind)
        table = pa.table({"image": column})
        if write in ("none", "snappy"):
            pq.write_table(table, target, compression=write)
            return target
        dataset(rows, ()).save_to_disk(target)  # which would take the bytes in: put them out
        (file,) = target.glob("*.arrow")
        with pa.ipc.new_stream(file, table.schema) as out:
            out.write_table(table)
        return target

    with pytest.raises(DataError, match=rf"paths of images \(such as {path}\), .* save_to_disk"):
        open_store(stored([(None, path, 0)] * 2), "train")
    store = open_store(stored([(jpeg(0), "a.jpg", 0), (None, path, 0)]), "train")
    assert bytes(store.read(0)) == jpeg(0)
    with pytest.raises(
        DataError, match=rf"row 1 of .*: the row has no bytes, but the path {path}.*--skip"
    ):
        store.read(1)


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_a_row_group_is_never_in_memory_as_a_whole(compression: str, tmp_path: Path) -> None:
    """Not when its images are looked up, and not when they are read in order."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    data = [os.urandom(50_000) for _ in range(2400)]
    table = pa.table({"image": pa.array(data, pa.binary())})
    pq.write_table(
        table, tmp_path / "x.parquet", compression=compression, data_page_size=2**16,
        write_batch_size=1, use_dictionary=False,
    )  # fmt: skip
    code = (
        "import sys, threading, time; from pathlib import Path\n"
        "from pipelines.store import open_store\n"
        "import pyarrow.parquet\n"
        "def held(): return int(open('/proc/self/status').read().split('RssAnon:')[1].split()[0])\n"
        "def watch():\n"
        "    while True: most.append(held()); time.sleep(.002)\n"
        "before, most = held(), []\n"
        "threading.Thread(target=watch, daemon=True).start()\n"
        "for sources in False, True:\n"
        "    store = open_store(Path(sys.argv[1]), 'train', sources=sources)\n"
        "    assert sum(len(store.read(i)) for i in range(2400)) == 120_000_000\n"
        "print(max(most) - before)\n"
    )
    grown = subprocess.check_output([sys.executable, "-c", code, tmp_path / "x.parquet"], cwd=ROOT)
    assert int(grown) < 80_000  # of 120,000


def test_labels_that_name_no_class_count_as_none(tmp_path: Path) -> None:
    rows: list[Row] = [(jpeg(i), None, 0) for i in range(3)]
    images = dataset(rows, ()).remove_columns("label")
    for name, labels in (("lists", [[0, 1], [2], []]), ("fractions", [0.5, 1.5, 2.5])):
        images.add_column("label", labels).to_parquet(tmp_path / f"{name}.parquet")
        store = open_store(tmp_path / f"{name}.parquet", "train")
        assert store.labels.tolist() == [-1, -1, -1] and store.classes == ()
    (tmp_path / "both").mkdir()
    for first, second in ((0, 1), (1, 0)):
        images.add_column("label", [0, 1, 2]).to_parquet(tmp_path / f"both/train-{first}.parquet")
        images.add_column("label", list("abc")).to_parquet(
            tmp_path / f"both/train-{second}.parquet"
        )
        with pytest.raises(DataError, match="numbers in some files and names in others"):
            open_store(tmp_path / "both", "train")


def test_the_cache_of_datasets_is_refused(images: Path, tmp_path: Path) -> None:
    folder = as_saved(tmp_path / "saved", images) / "train"
    (folder / "state.json").unlink()
    with pytest.raises(DataError, match=r"Arrow files without a state.json, as the cache of data"):
        open_store(folder, "train")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:2000])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, emptied, Path.unlink])
def test_damage_is_one_line(damage: Callable[[Path], None], images: Path, tmp_path: Path) -> None:
    root = as_saved(tmp_path / "saved", images)
    damage(root / "train" / "data-00001-of-00003.arrow")
    with pytest.raises(DataError, match=r"data-00001-of-00003.arrow"):
        open_store(root, "train")
    state = root / "validation" / "state.json"
    state.write_text(json.dumps({"_data_files": "none"}))
    with pytest.raises(DataError, match=r"state.json cannot be read: .*; save the data set again"):
        open_store(root, "val")


def test_a_footer_that_names_other_columns_than_the_schema(images: Path, tmp_path: Path) -> None:
    root = as_on_the_hub(tmp_path / "hub", images)
    path = sorted(root.rglob("train-*.parquet"))[0]
    content = path.read_bytes()
    assert content.count(b"\x05image\x05bytes") > 0  # where a row group says whose pages they are
    path.write_bytes(content.replace(b"\x05image\x05bytes", b"\x05imagf\x05bytes"))
    with pytest.raises(DataError, match=rf"{path} is damaged: row group 0 has no column 'image.b"):
        open_store(root, "train")


def test_without_pyarrow(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = [as_saved(tmp_path / "saved", images), as_on_the_hub(tmp_path / "hub", images)]
    real = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name.split(".")[0] == "pyarrow":
            raise ModuleNotFoundError("No module named 'pyarrow'")
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    for root in roots:
        with pytest.raises(DataError, match=r"takes pyarrow: pip install 'fastsiam\[convert\]'$"):
            open_store(root, "train")


def test_class_folders_beside_a_saved_dataset_name_it(images: Path, tmp_path: Path) -> None:
    saved(tmp_path / "test-alone", {"test": dataset(rows_of(images / "val"), CLASSES)})
    with pytest.raises(DataError, match=r"holds data sets of their own: name one, such as .*test$"):
        open_store(tmp_path / "test-alone", "train")
    write_images(tmp_path / "plain", classes=2, each=1)
    assert np.array_equal(open_store(tmp_path / "plain", "train").labels, [0, 1])
