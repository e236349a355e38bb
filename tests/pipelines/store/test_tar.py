"""Tars that are damaged, cut or made to mislead: refused, and no name leads anywhere."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path

import pytest

from fastsiam.errors import DataError
from fastsiam.pipelines.store import ArchiveStore
from tests.sources import jpeg, tar, tar_bytes


def test_long_names(tmp_path: Path) -> None:
    name = "class/" + "long" * 60 + ".jpg"
    for number, kind in enumerate((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        store = ArchiveStore([tar(tmp_path / f"{number}.tar", [(name, jpeg(0))], kind=kind)])
        assert store.classes == ("class",) and bytes(store.read(0)) == jpeg(0)
        assert store.name(0).startswith("class/longlong")


def test_names_lead_nowhere(tmp_path: Path) -> None:
    names = ["../../../etc/a.jpg", "/root/b.jpg", "x/../../c.jpg", "x/./d.jpg"]
    before = sorted(tmp_path.rglob("*"))
    path = tar(tmp_path / "t.tar", [(name, jpeg(i)) for i, name in enumerate(names)])
    store = ArchiveStore([path])
    assert store.classes == ("etc", "root", "x")
    assert {store.name(i) for i in range(4)} == {"etc/a.jpg", "root/b.jpg", "x/c.jpg", "x/d.jpg"}
    after = sorted(tmp_path.rglob("*"))
    assert set(after) - set(before) == {path, tmp_path / ".t.fastsiam-index"}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (tarfile.SYMTYPE, "holds no images"),
        (tarfile.CHRTYPE, "holds no images"),
        (tarfile.FIFOTYPE, "holds no images"),
        (tarfile.LNKTYPE, r"a/l\.jpg is a link to /etc/passwd; make the tar anew with tar --hard"),
    ],
)
def test_links_and_devices_lead_nowhere(kind: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.tar"
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("a/l.jpg")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(DataError, match=message):
        ArchiveStore([path])


def test_a_damaged_header_is_not_taken_for_the_end(tmp_path: Path) -> None:
    """Python's tarfile stops there without a word."""
    path = tar(tmp_path / "t.tar", [(f"{i // 5}/{i}.jpg", jpeg(i)) for i in range(10)])
    whole = path.read_bytes()
    header = whole.index(b"1/5.jpg")
    for data in (
        whole[: header + 3] + b"?" + whole[header + 4 :],
        whole[:header],
        whole[: header + 100],
    ):
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"is no whole tar file \(damaged or cut after"):
            ArchiveStore([path])


def with_size(size: bytes) -> bytes:
    """Return a tar whose one member says that it is of another size."""
    data = bytearray(tar_bytes([("a/0.jpg", jpeg(0))]))
    data[124:136] = size
    data[148:156] = b"        "
    data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


@pytest.mark.parametrize(
    "size",
    [
        b"\x80" + (5 * 2**30).to_bytes(11, "big"),
        b"\xff" * 11 + b"\xf0",
        b"\x80" + (2**80).to_bytes(11, "big"),
    ],
)
def test_absurd_sizes(size: bytes, tmp_path: Path) -> None:
    (tmp_path / "t.tar").write_bytes(with_size(size))
    with pytest.raises(DataError, match="is no whole tar file"):
        ArchiveStore([tmp_path / "t.tar"])


def test_a_chain_of_long_names(tmp_path: Path) -> None:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 5
    link = info.tobuf(tarfile.GNU_FORMAT) + b"name\0".ljust(512, b"\0")
    path = tmp_path / "t.tar"
    path.write_bytes(link * 5000 + tar_bytes([("a/0.jpg", jpeg(0))]))
    with pytest.raises(DataError, match="is no whole tar file"):
        ArchiveStore([path])


def test_hidden_members_are_skipped_as_in_a_folder(tmp_path: Path) -> None:
    names = ["a/0.jpg", ".checkpoints/0.jpg", "a/._0.jpg", "b/.x/1.jpg", "./b/2.jpg"]
    store = ArchiveStore([tar(tmp_path / "t.tar", [(name, jpeg(0)) for name in names])])
    assert [store.name(i) for i in range(len(store))] == ["a/0.jpg", "b/2.jpg"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"no tar at all" * 100, "is no whole tar file"),
        (gzip.compress(b"x"), "is compressed"),
    ],
    ids=["empty", "text", "gzip"],
)
def test_no_tar(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.tar").write_bytes(content)
    with pytest.raises(DataError, match=message):
        ArchiveStore([tmp_path / "t.tar"])


def test_a_truncated_tar_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole = tar(tmp_path / "t.tar", [("a/0.jpg", jpeg(0)), ("a/1.jpg", jpeg(1))]).read_bytes()
    ends_whole = len(ArchiveStore([tmp_path / "t.tar"]))
    assert ends_whole == 2
    inside = [700, 512 + len(jpeg(0)) // 2, 512 * (3 + len(jpeg(0)) // 512) + 900]
    for size in inside:
        (tmp_path / "t.tar").write_bytes(whole[:size])
        with pytest.raises(DataError, match="is no whole tar file"):
            ArchiveStore([tmp_path / "t.tar"])
