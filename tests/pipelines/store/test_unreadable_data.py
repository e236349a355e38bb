"""Data that cannot be read, and the one-line error that says what is wrong."""

from __future__ import annotations

import errno
import functools
import gzip
import json
import os
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fastsiam.errors import DataError, NoSplitError
from fastsiam.pipelines.store import ArchiveStore, BetonStore, FolderStore, open_store
from fastsiam.pipelines.store.beton import FIELD, HEADER, MARK
from fastsiam.pipelines.store.index import ROW, file_facts, keep, pack_texts
from fastsiam.train.image_list import names_of
from tests.conftest import write_images
from tests.conversions import assert_same_images, run, stub_raising
from tests.data_formats import (
    FORMS,
    rows_of,
    without_checksums,
    write_converted,
    write_hub_dataset,
    write_list,
    write_saved_dataset,
)
from tests.sources import cifar, folder_members, huge_tar, jpeg, put, tar
from tests.sources import tar_bytes as tarred
from tests.tables import dataset, write_parquet, write_table

Build = Callable[[Path], Path]
"""Writes unreadable data below a folder; returns the path to open."""


def images(root: Path) -> Path:
    return write_images(root / "images", each=2)


def tar_of(*names: str) -> Build:
    members = [(name, jpeg(i)) for i, name in enumerate(names)]
    return lambda root: tar(root / "train.tar", members)


def tar_damaged(change: Callable[[bytes], bytes]) -> Build:
    """Build a tar of two classes with changed bytes."""
    members = [(f"{i // 5}/{i}.jpg", jpeg(i)) for i in range(10)]
    return lambda root: put(root / "train.tar", change(tarred(members)))


def tar_with_member(name: str, **header: object) -> Build:
    """Build a tar of an image and a member without content; ``header``: fields of its header."""
    member = tarfile.TarInfo(name)
    for field, value in header.items():
        setattr(member, field, value)

    def build(root: Path) -> Path:
        path = tar(root / "t.tar", [("a/0.jpg", jpeg(0))])
        with tarfile.open(path, "a") as archive:
            archive.addfile(member)
        return path

    return build


SPARSE = {"GNU.sparse.map": "0,1", "GNU.sparse.size": "900", "size": "1"}
"""POSIX headers of a sparse file, as stored by ``tar --sparse``."""


def tar_with_a_huge_header(kind: bytes) -> Build:
    """Build a tar with a GNU or POSIX header that claims more bytes than any machine has memory."""
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, 2**45
    return lambda root: put(root / "t.tar", header.tobuf(tarfile.GNU_FORMAT) + bytes(4096))


def index_outside(root: Path) -> Path:
    path = tar(root / "t.tar", [("a/0.jpg", jpeg(0))])
    rows = np.zeros(2, ROW)
    rows["offset"], rows["size"] = 512, [1, 2**31]
    texts = {"names": pack_texts(["a", "b"]), "classes": pack_texts(["a"])}
    keep({"rows": rows, **texts}, [root / ".t.fastsiam-index"], file_facts([path]))
    return path


def damaged(form: str, pattern: str, change: Callable[[bytes], bytes] | None) -> Build:
    """Build images in a form, and change or remove the first file that matches a pattern."""

    def build(root: Path) -> Path:
        path = FORMS[form](images(root), root / "data")
        target = sorted(path.rglob(pattern))[0]
        target.write_bytes(change(target.read_bytes())) if change else target.unlink()
        return path

    return build


def labels(*columns: Sequence[object]) -> Build:
    def build(root: Path) -> Path:
        bare = dataset([(jpeg(i), None, 0) for i in range(2)], ()).remove_columns("label")
        for number, column in enumerate(columns):
            bare.add_column("label", list(column)).to_parquet(root / f"train-{number}.parquet")
        return root

    return build


def classes(*names: str) -> Build:
    """Build a parquet file for each string, whose letters are the names of the classes."""

    def build(root: Path) -> Path:
        for number, class_names in enumerate(names):
            rows = dataset([(jpeg(i), None, i) for i in range(len(class_names))], class_names)
            rows.to_parquet(root / f"train-{number}.parquet")
        return root

    return build


@functools.cache
def converted() -> bytes:
    with tempfile.TemporaryDirectory() as name:
        return (write_converted(images(Path(name)), Path(name, "out")) / "train.beton").read_bytes()


def beton(change: Callable[[bytes], bytes]) -> Build:
    return lambda root: put(root / "train.beton", change(converted())).parent


def foreign(change: Callable[[bytes], bytes]) -> Build:
    """Build a changed .beton file without checksums, as written by FFCV."""
    return beton(lambda data: change(without_checksums(data)))


def with_images(data: bytes, count: int) -> bytes:
    """Change the number of images in the header of a .beton file."""
    return data[:8] + count.to_bytes(8, "little") + data[16:]


def with_annex(data: bytes, annex: bytes) -> bytes:
    """Replace the annex of a .beton file by a shorter one, with correct checksums."""
    changed, mark = bytearray(data), HEADER.itemsize + 17
    magic, version, start, *_ = MARK.unpack_from(data, mark)
    changed[start : start + len(annex)] = annex
    facts = magic, version, start, len(annex), zlib.crc32(annex)
    MARK.pack_into(changed, mark, *facts, 0)
    check = zlib.crc32(changed[: HEADER.itemsize + 2 * FIELD.itemsize])
    MARK.pack_into(changed, mark, *facts, check)
    return bytes(changed)


THERE = "images/class0/000.jpg"


def listing(header: str, rows: list[list[object]]) -> Build:
    """Build a CSV list next to the folder of ``images``."""
    return lambda root: write_list(images(root).parent / "list.csv", header, rows)


WHOLE_TAR = r"is not a complete tar file"
CASES: dict[str, tuple[Build, str]] = {
    # folders
    "nowhere": (lambda root: root / "nowhere", "no data at"),
    "an empty folder": (lambda root: root, "holds no images"),
    "compressed tars": (
        lambda root: put(root / "0.tar.gz").parent,
        r"holds no images .*; 0\.tar\.gz is compressed: unpack it, or gunzip it to a plain \.tar",
    ),
    "two folders of one split": (
        lambda root: put(put(root / "train" / "0.jpg").parents[1] / "Train" / "1.jpg").parents[1],
        "has folders Train/ and train/ for one split: move the images from one to the other",
    ),
    "one image": (lambda root: put(root / "a.jpg", jpeg(0)), "is neither a folder of images nor a"),
    "images next to folders": (
        lambda root: put(put(root / "c" / "two.jpg").parents[1] / "one.jpg").parent,
        r"both outside folders \(one.jpg\) and in folders \(c/\)",
    ),
    "several data sets": (
        lambda root: write_images(write_images(root / "b/train").parents[1] / "a/train").parents[1],
        r"separate data sets: pass one of them, such as .*a$",
    ),
    "a compressed tar": (lambda root: put(root / "t.tar.gz"), "is compressed: unpack it"),
    # tars
    "a sparse image": (
        tar_with_member("a.jpg", pax_headers=SPARSE),
        "a sparse file; create the tar without --sparse",
    ),
    "another sparse file": (
        tar_with_member("a.bin", pax_headers=SPARSE), "a sparse file; create the tar without"
    ),
    "an empty tar": (lambda root: put(root / "t.tar"), "is empty"),
    "a gzip named tar": (lambda root: put(root / "t.tar", gzip.compress(b"x")), "is compressed"),
    "two splits in a tar": (
        tar_of("data/train/a/0.jpg", "data/train/b/1.jpg", "data/val/a/2.jpg"),
        "holds folders train/, val/, which are splits: unpack it, or create one tar per",
    ),
    "a damaged header": (
        tar_damaged(lambda d: d.replace(b"1/5.jpg", b"1/5?jpg")), f"{WHOLE_TAR}.*or truncated"
    ),
    "cut off in a later image": (tar_damaged(lambda d: d[: d.index(b"1/5.jpg") + 900]), WHOLE_TAR),
    "another tar behind it": (
        tar_damaged(lambda d: d + d), "another tar after its end, at .* or join them with tar --con"
    ),
    "a huge image": (
        lambda root: huge_tar(root / "t.tar", "a/1.jpg"),
        r"a/1.jpg has 4,294,967,296 bytes, but the limit is 4,294,967,295; create",
    ),
    "a huge long name": (tar_with_a_huge_header(tarfile.GNUTYPE_LONGNAME), WHOLE_TAR),
    "a huge POSIX header": (tar_with_a_huge_header(tarfile.XHDTYPE), WHOLE_TAR),
    "a link to an image": (
        tar_with_member("a/1.jpg", type=tarfile.SYMTYPE, linkname="0.jpg"),
        "a link to 0.jpg; .* tar --dereference$",
    ),
    "an image's second name": (
        tar_with_member("a/1.jpg", type=tarfile.LNKTYPE, linkname="0.jpg"),
        "0.jpg; .* tar --hard-dereference$",
    ),
    "two splits": (
        tar_of("x/Training/a/0.jpg", "x/Val/a/1.jpg"),
        "t.*tar holds folders Training/, Val/, which are splits: unpack it, or create one tar per",
    ),
    "two splits without training images": (tar_of("val/a/0.jpg", "test/a/1.jpg"), "are splits"),
    "an index that leads outside": (index_outside, r"t\.tar is damaged: image 1 lies outside the"),
    # lists of files
    "an empty CSV": (
        lambda root: put(root / "a.csv"), "must name its columns in its first line, which is empty"
    ),
    "CSV in Latin-1": (
        lambda root: put(root / "a.csv", b"path,label\na.jpg,caf\xe9\n"),
        "is not UTF-8: save it as UTF-8",
    ),
    "missing files of a list": (
        listing("path,label", [[THERE, "a"], ["x.jpg", "b"], ["y.jpg", "b"]]),
        "2 of 3 that were checked, the first .*x.jpg; paths",
    ),
    "a list without paths": (
        listing('na\nme,label', [[THERE, "a"]]), r"no column 'path', only 'na\\nme, label'"
    ),
    "a list with two columns of labels": (
        listing("path,label,label", [[THERE, "a", "b"]]), "several columns named label: rename all"
    ),
    "a row without a path": (listing("path,label", [[THERE, "a"], ["", "b"]]), "no path in row 2"),
    "a list without rows": (listing("path,label", []), "lists no images: it has no rows"),
    "a row of another length": (
        listing("path,label", [[THERE, "a", "b"]]), "has 3 fields in line 2 but 2 in its"
    ),
    "an open quote": (lambda root: put(root / "a.csv", b'path\n"a.jpg\n'), "is damaged in line 2"),
    # tables
    "a truncated table": (
        damaged("saved", "data-00001*", lambda d: d[:2000]), r"data-00001-of-00003.arrow"
    ),
    "a missing table": (damaged("saved", "data-00001*", None), r"data-00001-of-00003.arrow"),
    "a damaged state.json": (
        damaged("saved", "state.json", lambda _: json.dumps({"_data_files": "none"}).encode()),
        r"state.json cannot be read: .*; save the data set again",
    ),
    "a footer of another schema": (
        damaged("hub", "train-*", lambda d: d.replace(b"\x05image\x05by", b"\x05imagf\x05by")),
        r"\.parquet is damaged: row group 0 has no column 'image.b",
    ),
    "not a parquet file": (
        lambda root: put(root / "a.parquet", b"PAR1 and no more"), "is not a complete parquet file"
    ),
    "no image column": (
        lambda root: write_table(root / "none.parquet", {"la\nbel": [0]}),
        r"no column that can hold images .*, only 'la\\nbel'",
    ),
    "other classes in a second file": (
        classes("ab", "bc"), r"train-1.* and .*train-0.* have different classes: .* each"
    ),
    "numbers and names": (labels([0, 1], "ab"), "numbers in some files and names in others"),
    # .beton files
    "a zip named beton": (beton(lambda d: b"PK\x03\x04" + d[4:]), "its format is"),
    "half a beton": (beton(lambda d: d[:3000]), "annex is missing|incomplete"),
    "a missing row": (beton(lambda d: d[:-24]), "lacks images"),
    "a damaged mark": (
        beton(lambda d: d.replace(b"fastsiam", b"fastsial", 1)),
        "the arguments of its image field are not fastsiam's",
    ),
    "a crafted annex": (beton(lambda d: with_annex(d, b"garbage")), "its annex cannot be read"),
    "no images in a beton": (foreign(lambda d: with_images(d, 0)), "holds no images"),
    "more images than fit": (
        foreign(lambda d: with_images(d, 10**6)), "it ends before its metadata of 1,000,000 images"
    ),
    "a cut-off allocation table": (foreign(lambda d: d[:-5]), "its allocation table is incomplete"),
    "an oversized allocation table": (
        foreign(lambda d: d + bytes(1200)), "its allocation table is not at the end of the file"
    ),
    # third-party archives
    "half of CIFAR": (
        lambda root: put(root / "cifar-10-python.tar.gz",
                         cifar(root / "whole.gz").read_bytes()[:1000]),
        "is not the archive that CIFAR's authors publish",
    ),
}  # fmt: skip


def refused(path: Path, expected: str) -> str:
    with pytest.raises(DataError, match=expected) as caught:
        open_store(path, "train")
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize(("build", "expected"), CASES.values(), ids=CASES)
def test_unreadable_data_is_one_line_error(build: Build, expected: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    message = refused(build(tmp_path / "here"), expected)
    assert str(tmp_path / "here") in message


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda root: tar(root / "t.tar", [("a/0.jpg", b"")]), "no val"),
        (lambda root: write_converted(images(root), root / "out"), "no val"),
        (images, r"no val/ or test/ folder"),
        (listing("path", [["x"]]), "no column 'split'"),
        (listing("path,split", [["x", "none"]]), "no row whose split is val or .*, only 'none'"),
    ],
)
def test_missing_split_is_rejected(build: Build, expected: str, tmp_path: Path) -> None:
    with pytest.raises(NoSplitError, match=expected):
        open_store(build(tmp_path), "val")


def test_tables_with_paths_instead_of_bytes_are_rejected(tmp_path: Path) -> None:
    """If only some images lack bytes, the data set opens, and reading such an image fails."""
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    one, two = (tmp_path / name for name in ("one.parquet", "two.parquet"))
    for path, data in ((one, None), (two, jpeg(0))):
        rows = [{"bytes": data, "path": "0.jpg"}, {"bytes": None, "path": "1.jpg"}]
        write_table(path, {"image": pa.array(rows, kind)}, compression="none")
    refused(one, r"paths of images \(such as 0\.jpg\), .* save_to_disk")
    store = open_store(two, "train")
    assert bytes(store.read(0)) == jpeg(0)
    expected = r"row 1 of .*: the row has no bytes, only the path 1\.jpg.*--skip"
    with pytest.raises(DataError, match=expected):
        store.read(1)


def test_compressed_parquet_must_be_converted(tmp_path: Path) -> None:
    """Compressed images have no offset in the file, so they can only be read in order."""
    folder, root = images(tmp_path), tmp_path / "old ones"
    write_parquet(root / "data" / "train-0.parquet", rows_of(folder), FolderStore(folder).classes)
    command = "fastsiam convert parquet --source '.*old ones' --out DIR, and pass --data DIR"
    refused(root, f"the images in .* are compressed, so they can only be .*: {command}")
    assert_same_images(open_store(root, "train", sources=True), FolderStore(folder))


def test_missing_pyarrow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = images(tmp_path)
    roots = [
        write_saved_dataset(folder, tmp_path / "saved"),
        write_hub_dataset(folder, tmp_path / "hub"),
    ]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for root in roots:
        refused(root, r"needs pyarrow: pip install 'fastsiam\[convert\]'$")


# Errors of the operating system.

GONE = r"cannot read .*: No such file or directory; check the path$"


@pytest.mark.parametrize(("of", "method"), [(Path, "exists"), (os, "scandir"), (Path, "glob")])
def test_unlistable_folder_is_reported(
    of: Any, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path / "train", classes=1, each=1)
    monkeypatch.setattr(of, method, stub_raising(errno.EIO))
    assert str(tmp_path) in refused(tmp_path, f": {os.strerror(errno.EIO)}; ")


def test_deleted_files_are_reported(tmp_path: Path) -> None:
    """A missing file is an error when its size is needed; a missing image, when it is read."""
    folder = images(tmp_path)
    packed = tar(tmp_path / "t.tar", folder_members(folder))
    converted = write_converted(folder, tmp_path / "out") / "train.beton"
    files = FolderStore(folder)
    stores = [ArchiveStore([packed]), BetonStore(converted), files]
    for path in (packed, converted, files.path(0)):
        path.unlink()
    for store in stores:
        with pytest.raises(DataError, match=GONE):
            store.stamp()
    files.path(1).unlink()
    files.path(1).mkdir()
    for index, expected in ((0, "No such file"), (1, "Is a directory; check the path")):
        with pytest.raises(DataError, match=rf"^cannot read .*00{index}\.jpg: {expected}"):
            files.decode(index)


# Malicious names and contents.


def test_member_names_cannot_escape_folder(tmp_path: Path) -> None:
    """Neither reading nor converting writes to such paths. Hidden members are skipped."""
    source, out = tmp_path / "a" / "b", tmp_path / "a" / "out"
    names = ["../../evil/0.jpg", "/tmp/fastsiam-evil/1.jpg", "c/../../../evil/./2.jpg"]
    names += [".checkpoints/0.jpg", "a/._0.jpg", "b/.x/1.jpg"]
    tar(source / "train.tar", [(name, jpeg(i)) for i, name in enumerate(names)])
    before = set(tmp_path.rglob("*"))
    store = open_store(source / "train.tar", "train")
    assert names_of(store) == ["c/evil/2.jpg", "evil/0.jpg", "tmp/fastsiam-evil/1.jpg"]
    run("folder", source, out)
    assert not Path("/tmp/fastsiam-evil").exists()
    new = set(tmp_path.rglob("*")) - before
    assert all(out in (path, *path.parents) or path.parent == source for path in new), new
