"""Lists of image files as data: CSV and parquet with a column of paths."""

from __future__ import annotations

import csv
import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest

from fastsiam.config import AUTOMATIC, ColumnNames, ConvertConfig, DataConfig
from fastsiam.errors import DataError, NoSplitError
from fastsiam.pipelines import open_split
from fastsiam.pipelines.convert import convert
from fastsiam.pipelines.store import FolderStore, ListedStore, listed, open_store
from fastsiam.train.remembered import names_of
from tests.conversions import Quiet, same_images

Rows = Sequence[Sequence[object]]


def write(path: Path, header: str, rows: Rows) -> Path:
    """Write a list as CSV or as parquet, by the file's name."""
    names = header.split(",")
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([names, *rows])
    else:
        import pyarrow as pa
        from pyarrow import parquet

        columns = zip(*rows, strict=True) if rows else [[] for _ in names]
        parquet.write_table(pa.table(dict(zip(names, map(list, columns), strict=True))), path)
    return path


def rows_of(images: Path) -> list[list[object]]:
    """Return the folder's images as rows: relative to it, and absolute in turns."""
    store = FolderStore(images / "train")
    paths = [store.path(i).relative_to(images) for i in range(len(store))]
    classes = [store.class_name(i) for i in range(len(store))]
    return [
        [str(images / path if i % 2 else path), name]
        for i, (path, name) in enumerate(zip(paths, classes, strict=True))
    ]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_list_is_its_files(ending: str, images: Path) -> None:
    root = write(images / f"list.{ending}", "path,label", rows_of(images))
    store, folder = open_store(root, "train"), FolderStore(images / "train")
    assert isinstance(store, ListedStore) and str(store) == f"{root} (files of a list)"
    same_images(store, folder)
    assert store.name(0) == "train/class0/000.jpg"
    assert store.name(1) == store.where(1) == str(images / "train/class0/001.jpg")
    assert store.sizes().tolist() == folder.sizes().tolist()
    assert bytes(pickle.loads(pickle.dumps(store)).read(3)) == bytes(folder.read(3))
    with pytest.raises(NoSplitError, match="it has no column 'split'"):
        open_store(root, "val")
    before = store.stamp()
    write(root, "path,label", rows_of(images)[1:])
    assert open_store(root, "train").stamp() != before


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_splits_labels_and_names_of_columns(ending: str, images: Path) -> None:
    names = ColumnNames("file", "kind")
    rows = [[f"train/class0/00{i}.jpg", i % 3 - 1, "Train"] for i in range(6)]
    rows += [["val/class1/000.jpg", 5, "validation"], ["val/class1/001.jpg", 0, "test"]]
    root = write(images / f"list.{ending}", "file,kind,split", rows)
    train, val = (open_store(root, split, columns=names) for split in ("train", "val"))
    assert train.labels.tolist() == [-1, 0, 1, -1, 0, 1] and val.labels.tolist() == [5]
    assert train.classes == val.classes == tuple("012345")
    assert names_of(val) == ["val/class1/000.jpg"]
    assert open_store(root, "train", columns=ColumnNames("file")).classes == ()
    texts = [["val/class0/000.jpg", "a"], ["val/class0/001.jpg", ""], ["val/class0/000.jpg", "b"]]
    store = open_store(write(root, "path,label", texts), "train")
    assert store.labels.tolist() == [0, -1, 1] and store.classes == ("a", "b")
    write(root, "path,split", [[path, "none"] for path, _ in texts])
    with pytest.raises(NoSplitError, match="no row whose split is train, only 'none'"):
        open_store(root, "train")


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_lists_that_are_refused(ending: str, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = images / f"list.{ending}"
    there = "train/class0/000.jpg"

    def refused(header: str, rows: Rows, said: str, names: ColumnNames = AUTOMATIC) -> None:
        write(root, header, rows)
        with pytest.raises(DataError, match=said) as caught:
            open_store(root, "train", columns=names)
        assert "\n" not in str(caught.value)

    rows = [[there, "a"], ["x.jpg", "b"], ["y.jpg", "b"]]
    refused("path,label", rows, "2 of 3 files, the first .*x.jpg; relative")
    refused("name,label", [[there, "a"]], "no column .*, only name, label")
    refused("path,label", [[there, "a"], ["", "b"]], "no path in row 2")
    refused("path,label", [[there, 10**9]], "label 1000000000, which is no number of a class")
    for names in (ColumnNames("", "b"), ColumnNames("b")):
        refused("path,a", [[there, "a"]], "column b is not there|no column 'b'", names)
    if ending == "csv":
        refused("path,label", [], "names no images: it has no rows")
        refused("path,label", [[there, "a", "b"]], "has 3 fields in line 2 and 2 in its first")
    monkeypatch.setattr(listed, "_LOOKED_FOR", 2)
    refused("path", [["x"], [there], ["y"]], "2 of 2 files that were looked for, the first .*x")


def test_files_that_are_no_csv(tmp_path: Path) -> None:
    for content, said in (
        (b"", "has no column 'path': name the columns in its first line"),
        (b"path;label\na.jpg;x\n", "has fields between ';': save it with commas instead"),
        ("path,label\na.jpg,caf\xe9\n".encode("latin-1"), "is not in UTF-8: save it in UTF-8"),
        (b'path\n"a.jpg\n', "is damaged in line 2"),
        (b"path\na\0.jpg\n", "no path in row 1|damaged"),
    ):
        (tmp_path / "a.csv").write_bytes(content)
        with pytest.raises(DataError, match=said):
            open_store(tmp_path / "a.csv", "train")


def test_csv_as_spreadsheets_write_it(images: Path) -> None:
    (images / "a.csv").write_text(
        "\ufeffpath, label\r\n\r\ntrain/class0/000.jpg, oak\r\n", encoding="utf-8"
    )
    store = open_store(images / "a.csv", "train")
    assert store.classes == ("oak",) and names_of(store) == ["train/class0/000.jpg"]


def test_a_list_is_held_out_and_converted(images: Path, tmp_path: Path) -> None:
    root = write(images / "list.csv", "path,label", rows_of(images))
    data = DataConfig(data=str(root), holdout="25%")
    left, held = open_split(data, "train"), open_split(data, "val")
    assert (len(left), len(held)) == (18, 6) and not set(names_of(left)) & set(names_of(held))
    config = ConvertConfig(source=str(root), out=str(tmp_path / "out"))
    convert("folder", config, Quiet())
    converted = open_store(tmp_path / "out", "train")
    same_images(converted, open_store(root, "train"))
    assert names_of(converted) == names_of(open_store(root, "train"))
    assert [file.there for file in convert("folder", config, Quiet())] == [True]
    write(root, "path,label", rows_of(images)[:-1])
    with pytest.raises(DataError, match="was made of other images"):
        convert("folder", config, Quiet())
