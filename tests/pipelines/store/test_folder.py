"""Folders of every layout, lists of files, and the message for a bad image."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from fastsiam.config import ColumnNames
from fastsiam.errors import DataError
from fastsiam.kernels import library
from fastsiam.pipelines.store import FolderStore, open_store
from fastsiam.pipelines.store import folder as folder_store
from fastsiam.train.image_list import names_of
from tests.conftest import write_images
from tests.data_formats import write_list
from tests.processes import fastsiam
from tests.sources import jpeg, put, tar


def test_advice_for_corrupt_image_works_in_shell(tmp_path: Path) -> None:
    """The command in its message can be pasted into a shell."""
    data = tmp_path / "it's mine"
    write_images(data / "train", classes=1, each=3)
    bad = data / "train" / "class0" / "001.jpg"
    bad.write_bytes(b"no image")
    with pytest.raises(DataError, match="it is not an image; repair or remove") as caught:
        open_store(data, "train").decode(1)
    command = shlex.split(str(caught.value).split("the others: ")[1].split("; a run")[0])
    assert command[:3] == ["fastsiam", "convert", "folder"] and command[4] == str(data)
    fastsiam(*command[1:])
    assert len(open_store(tmp_path / "it's mine-beton", "train")) == 2
    bad.unlink()
    write_images(tmp_path / "more", classes=1, each=1)
    tar(tmp_path / "more.tar", [("a/0.jpg", b"none")])
    with pytest.raises(DataError, match=r"; repair the image, or .* --source .*more\.tar --skip"):
        open_store(tmp_path / "more.tar", "train").decode(0)


def test_circular_links_and_pipes_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """So are broken links, other formats, which warnings count, and ext4's lost+found."""
    image = put(tmp_path / "a" / "0.jpg", jpeg(0))
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    (tmp_path / "b").symlink_to(image)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "1.jpg").symlink_to(image)
    (tmp_path / "c" / "to d").symlink_to(tmp_path / "d")
    (tmp_path / "d" / "e").mkdir(parents=True)
    (tmp_path / "d" / "e" / "to c").symlink_to(tmp_path / "c")
    os.mkfifo(tmp_path / "a" / "pipe.jpg")
    for name in ("4.HEIC", "5.heic", "6.gif", "notes.txt", ".7.heic"):
        (tmp_path / "a" / name).touch()
    for name in ("2\n.jpg", "3.jpg"):
        (tmp_path / "a" / name).symlink_to(name.replace("2", "gone"))
    for one, other in ("xy", "yx", ("z", "not mounted")):
        (tmp_path / one).symlink_to(other)
    put(tmp_path / "lost+found" / "0.jpg")
    store = FolderStore(tmp_path)
    assert names_of(store) == ["a/0.jpg", "c/1.jpg", "d/e/to c/1.jpg"]
    other_formats, message = caplog.messages
    assert "has images of formats that are not read: 2 .heic, 1 .gif; convert" in other_formats
    assert "has broken links to images or folders, which are skipped: 3, such as" in message
    assert message.isprintable()


def test_compiled_code_lists_like_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More names than the buffer holds, odd ones, and folders that only Python lists.

    Python lists all folders while the kernels are not compiled.
    """
    for folder in ("long", "odd", "other", "inner/deep", "empty"):
        (tmp_path / folder).mkdir(parents=True)
    names = [b"long/%0200d.jpg" % number for number in range(1000)]
    names += [b"odd/" + name for name in (b"\xff.JPG", b"\xc3\xa9.Png", b"a b.tiff", b"B.jpeg")]
    names += [b"other/1.jpg", b"inner/2.jpg", b"inner/deep/3.jpg"]
    hidden = [b"odd/.jpg", b"odd/.txt", b"other/notes.txt", b"other/jpg", b"inner/deep/.4.jpg"]
    for name in names + hidden:
        (tmp_path / os.fsdecode(name)).touch()
    monkeypatch.setattr(folder_store, "_LISTING_BYTES", 2**10)
    store = FolderStore(tmp_path)
    assert sorted(os.fsencode(name) for name in names_of(store)) == sorted(names)
    assert store.classes == ("inner", "long", "odd", "other")
    monkeypatch.setattr(library, "_compiled", lambda: None)
    assert names_of(FolderStore(tmp_path)) == names_of(store)


# Lists of files in CSV.


def test_csv_list_has_splits_labels_and_columns(images: Path) -> None:
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


def test_csv_rows_of_unknown_split_cause_warning(
    images: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [[f"train/class0/00{i}.jpg", split] for i, split in enumerate(("train", "trian", ""))]
    root = write_list(images / "list.csv", "path,split", rows)
    assert len(open_store(root, "train")) == 1
    assert caplog.messages == [
        f"{root} has 2 rows that no split uses, such as row 2 with split 'trian'; the names of "
        "splits are train, training, val, validation, valid, test"
    ]


def test_csv_with_bom_spaces_and_blank_lines(images: Path) -> None:
    (images / "a.csv").write_text(
        "\ufeffpath, label\r\n\r\ntrain/class0/000.jpg, oak\r\n", encoding="utf-8"
    )
    store = open_store(images / "a.csv", "train")
    assert store.classes == ("oak",) and names_of(store) == ["train/class0/000.jpg"]
    blank = [["train/class0/000.jpg", "3 "], ["train/class0/001.jpg", "-1"]]
    store = open_store(write_list(images / "c.csv", "path,label", blank), "train")
    assert store.labels.tolist() == [3, -1] and store.classes == ("0", "1", "2", "3")
    numbered = write_list(images / "b.csv", ",path", [[0, "train/class0/000.jpg"]])  # like pandas
    assert open_store(numbered, "train").labels.tolist() == [-1]
