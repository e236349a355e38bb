"""Lists of image files as data: CSV with a column of paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastsiam.config import ColumnNames, ConvertConfig
from fastsiam.errors import DataError
from fastsiam.pipelines.convert import convert
from fastsiam.pipelines.store import open_store
from fastsiam.train.image_list import names_of
from tests.conversions import Quiet
from tests.forms import as_list, write_list


def test_splits_labels_and_names_of_columns(images: Path) -> None:
    names = ColumnNames("file", "kind")
    rows = [[f"train/class0/00{i}.jpg", i % 3 - 1, "Train"] for i in range(6)]
    rows += [["val/class1/000.jpg", 5, "validation"], ["val/class1/001.jpg", 0, "test"]]
    root = write_list(images / "list.csv", "file,kind,split", rows)
    train, val = (open_store(root, split, columns=names) for split in ("train", "val"))
    assert train.labels.tolist() == [-1, 0, 1, -1, 0, 1] and val.labels.tolist() == [5]
    assert train.classes == val.classes == tuple("012345")
    assert names_of(val) == ["val/class1/000.jpg"]
    assert open_store(root, "train", columns=ColumnNames("file")).classes == ()
    texts = [["val/class0/000.jpg", "a"], ["val/class0/001.jpg", ""], ["val/class0/000.jpg", "b"]]
    store = open_store(write_list(root, "path,label", texts), "train")
    assert store.labels.tolist() == [0, -1, 1] and store.classes == ("a", "b")


def test_csv_as_spreadsheets_write_it(images: Path) -> None:
    (images / "a.csv").write_text(
        "\ufeffpath, label\r\n\r\ntrain/class0/000.jpg, oak\r\n", encoding="utf-8"
    )
    store = open_store(images / "a.csv", "train")
    assert store.classes == ("oak",) and names_of(store) == ["train/class0/000.jpg"]


def test_a_list_is_converted(images: Path, tmp_path: Path) -> None:
    """With the names of the list; a list of fewer rows is another source."""
    root = as_list(images / "train", tmp_path)
    config = ConvertConfig(source=str(root), out=str(tmp_path / "out"))
    convert("folder", config, Quiet())
    assert names_of(open_store(tmp_path / "out", "train")) == names_of(open_store(root, "train"))
    root.write_text("\n".join(root.read_text().splitlines()[:-1]))
    with pytest.raises(DataError, match="was made with other options, of other images"):
        convert("folder", config, Quiet())
