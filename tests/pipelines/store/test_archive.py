"""Tars in place: the same images in the same order as from a folder, and no trust in names."""

from __future__ import annotations

import errno
import gzip
import logging
import pickle
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from fastsiam.errors import DataError, NoSplitError
from fastsiam.pipelines.store import ArchiveStore, FolderStore, open_store
from fastsiam.pipelines.store.archive_index import ROW
from fastsiam.pipelines.store.probe import Flags
from tests.conftest import ROOT, write_images
from tests.sources import (
    VAL_WNIDS,
    WNIDS,
    encoded,
    folder_members,
    imagenet,
    imagenet_train_tar,
    jpeg,
    picture,
    rotated_jpeg,
    tar,
    tar_bytes,
)


def same(store: ArchiveStore, folder: FolderStore) -> None:
    assert store.classes == folder.classes
    np.testing.assert_array_equal(store.labels, folder.labels)
    np.testing.assert_array_equal(store.sizes(), folder.sizes())
    for i in range(len(folder)):
        assert bytes(store.read(i)) == folder.read(i)
        assert store.name(i) == folder.name(i)
        assert store.decode(i).size == folder.decode(i).size


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_a_tar_equals_its_folder(kind: int, tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", each=5)
    members = folder_members(images)
    path = tar(tmp_path / "some.tar", [("./top/" + n, d) for n, d in members[::-1]], kind=kind)
    same(ArchiveStore([path]), FolderStore(images))


def test_a_tar_of_tars_equals_its_folder(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", each=5)
    path = imagenet_train_tar(tmp_path / "train.tar", folder_members(images))
    same(ArchiveStore([path]), FolderStore(images))


def test_real_images_in_a_tar_of_tars(real_images: Path, tmp_path: Path) -> None:
    path = imagenet_train_tar(tmp_path / "train.tar", folder_members(real_images))
    same(ArchiveStore([path]), FolderStore(real_images))


def test_deep_folders_are_listed_as_a_folder_is(tmp_path: Path) -> None:
    names = ["a/z.jpg", "a/sub/b.jpg", "a/sub/a.jpg", "a-b/c.jpg", "a/aa.jpg", "b/x/y/z.jpg"]
    for i, name in enumerate(names):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(i))
    members = [(name, jpeg(i)) for i, name in enumerate(names)]
    store = ArchiveStore([tar(tmp_path / "t.tar", members)])
    folder = FolderStore(tmp_path / "images")
    assert store.classes == folder.classes
    assert [bytes(store.read(i)) for i in range(6)] == [folder.read(i) for i in range(6)]


def test_long_names(tmp_path: Path) -> None:
    name = "class/" + "long" * 60 + ".jpg"
    for number, kind in enumerate((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        store = ArchiveStore([tar(tmp_path / f"{number}.tar", [(name, jpeg(0))], kind=kind)])
        assert store.classes == ("class",) and bytes(store.read(0)) == jpeg(0)
        assert store.name(0).startswith("class/longlong")


def test_the_index_is_built_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tar(tmp_path / "t.tar", [(f"a/{i}.jpg", jpeg(i)) for i in range(3)])
    with caplog.at_level(logging.INFO):
        first = ArchiveStore([path])
    assert "indexed 3 images of 1 classes" in caplog.text
    kept = tmp_path / ".t.fastsiam-index"
    assert str(kept) in caplog.text and ROW.itemsize == 24
    caplog.clear()
    with caplog.at_level(logging.INFO):
        second = ArchiveStore([path])
    assert not caplog.text and (first.rows == second.rows).all()
    body = kept.read_bytes()
    kept.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))  # damaged
    ArchiveStore([path])
    assert kept.read_bytes() == body
    tar(path, [("a/0.jpg", jpeg(7))])  # another file
    assert len(ArchiveStore([path])) == 1


def test_a_folder_that_takes_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tar(tmp_path / "data" / "t.tar", [("a/0.jpg", jpeg(0))])
    (tmp_path / "data" / ".t.fastsiam-index").mkdir()  # in its way, for root may write anywhere
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ArchiveStore([path])
    assert len(list((tmp_path / "cache" / "fastsiam").glob("*.index"))) == 1


def test_odd_members_are_flagged(tmp_path: Path) -> None:
    members = {
        "a-plain.JPEG": (jpeg(0), 0),
        "b-gzip.JPEG": (gzip.compress(jpeg(1)), Flags.GZIP),
        "c-png.JPEG": (encoded(picture(2), "PNG"), Flags.NOT_JPEG),
        "d-cmyk.JPEG": (encoded(picture(3).convert("CMYK")), Flags.CMYK),
        "e-exif.JPEG": (rotated_jpeg(4), Flags.ROTATED),
        "f-bad.JPEG": (b"nothing", Flags.BAD),
        "g-empty.JPEG": (b"", Flags.BAD),
    }
    path = tar(tmp_path / "t.tar", [(f"x/{name}", data) for name, (data, _) in members.items()])
    store = ArchiveStore([path])
    assert store.rows["flags"].tolist() == [flags for _, flags in members.values()]
    assert store.rows["width"].tolist() == [40] * 5 + [0, 0]
    assert bytes(store.read(1)) == jpeg(1)
    for i in range(5):
        assert store.decode(i).size == (40, 30)
    with pytest.raises(DataError, match=r"cannot decode x/f-bad\.JPEG \(in .*t\.tar, 7 bytes at"):
        store.decode(5)


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


@pytest.mark.parametrize("first", ["a.jpg", "z.jpg"])
def test_images_beside_inner_tars_are_refused(first: str, tmp_path: Path) -> None:
    members = [(first, jpeg(0)), ("n01440764.tar", tar_bytes([("0.jpg", jpeg(1))]))]
    with pytest.raises(DataError, match="holds both images and tars"):
        ArchiveStore([tar(tmp_path / "t.tar", sorted(members))])


def test_tars_beside_folders_of_images_are_refused(tmp_path: Path) -> None:
    write_images(tmp_path / "train", each=2)
    tar(tmp_path / "train" / "n01440764.tar", [("0.jpg", jpeg(1))])
    with pytest.raises(DataError, match=r"both tars \(n01440764\.tar\) and folders of images"):
        open_store(tmp_path, "train")


def test_val_and_test_are_kept_apart(tmp_path: Path) -> None:
    names = ["train/a/0.jpg", "val/a/1.jpg", "val/a/2.jpg", "test/a/3.jpg", "extra/a/4.jpg"]
    path = tar(tmp_path / "all.tar", [(name, jpeg(i)) for i, name in enumerate(names)])
    train, val = open_store(path, "train"), open_store(path, "val")
    assert [bytes(train.read(0))] == [jpeg(0)] and train.classes == ("a",)
    assert [bytes(val.read(i)) for i in range(len(val))] == [jpeg(1), jpeg(2)]


def test_a_word_within_a_name_tells_no_split(tmp_path: Path) -> None:
    tar(tmp_path / "carnival.tar", [("a/0.jpg", jpeg(0))])
    (tmp_path / "._train.tar").write_bytes(b"made by another system")
    assert len(open_store(tmp_path, "train")) == 1


def test_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    for i in range(80):
        tar(tmp_path / f"train-{i:04d}.tar", [(f"{i}.jpg", jpeg(0)), (f"{i}.cls", b"0")])
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from fastsiam.pipelines.store import open_store\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 400))\n"
        "assert len(open_store(Path(sys.argv[1]), 'train')) == 80\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, check=True)


def test_gzip_in_several_members(tmp_path: Path) -> None:
    data = jpeg(0)
    packed = gzip.compress(data[:100]) + gzip.compress(data[100:])
    store = ArchiveStore([tar(tmp_path / "t.tar", [("a/0.jpg", packed)])])
    assert bytes(store.read(0)) == data


def test_odd_class_files(tmp_path: Path) -> None:
    path = tar(tmp_path / "t.tar", [("0.jpg", jpeg(0)), ("0.cls", "²".encode())])
    assert ArchiveStore([path]).classes == ("²",)
    tar(path, [("0.jpg", jpeg(0)), ("0.cls", b"99999999999")])
    with pytest.raises(DataError, match="which is no number of a class"):
        ArchiveStore([path])


def test_a_place_that_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a read-only file system: neither writing nor clearing up works."""
    path = tar(tmp_path / "t.tar", [("a/0.jpg", jpeg(0))])

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with caplog.at_level(logging.INFO):
        assert len(ArchiveStore([path])) == 1
    assert "not kept" in caplog.text


def test_a_folder_of_data_sets_is_not_taken_for_one(tmp_path: Path) -> None:
    write_images(tmp_path / "birds" / "train", each=1)
    write_images(tmp_path / "cars" / "train", each=1)
    with pytest.raises(DataError, match=r"data sets of their own: name one, such as .*birds"):
        open_store(tmp_path, "train")


def test_kaggles_layout_and_other_names_of_splits(tmp_path: Path) -> None:
    for wnid in WNIDS:
        path = tmp_path / "kaggle" / "ILSVRC/Data/CLS-LOC/train" / wnid / "0.JPEG"
        path.parent.mkdir(parents=True)
        path.write_bytes(jpeg(0))
    assert open_store(tmp_path / "kaggle", "train").classes == WNIDS
    write_images(tmp_path / "mixed" / "Train", each=2)
    write_images(tmp_path / "mixed" / "Validation", each=1)
    assert len(open_store(tmp_path / "mixed", "train")) == 6
    assert len(open_store(tmp_path / "mixed", "val")) == 3


def test_webdataset_shards(tmp_path: Path) -> None:
    for shard in range(2):
        members: list[tuple[str, bytes]] = []
        for i in range(3):
            key = f"{shard}{i}.v1"
            members += [(f"{key}.jpg", jpeg(i)), (f"{key.split('.')[0]}.cls", str(10 * i).encode())]
        tar(tmp_path / f"train-{shard:06d}.tar", members)
    tar(tmp_path / "val-000000.tar", [("0.jpg", jpeg(0)), ("0.cls", b"5"), ("0.json", b"{}")])
    store = open_store(tmp_path, "train")
    assert store.labels.tolist() == [0, 0, 10, 10, 20, 20]
    assert store.classes == tuple(map(str, range(21)))
    assert open_store(tmp_path, "val").labels.tolist() == [5]
    tar(tmp_path / "val-000000.tar", [("0.jpg", jpeg(0)), ("0.cls", b"5"), ("1.jpg", jpeg(1))])
    with pytest.raises(DataError, match=r"1\.jpg has no \.cls file"):
        open_store(tmp_path, "val")


def test_splits_within_a_tar(tmp_path: Path) -> None:
    names = ["data/train/a/0.jpg", "data/train/b/1.jpg", "data/val/a/2.jpg"]
    path = tar(tmp_path / "all.tar", [(name, jpeg(i)) for i, name in enumerate(names)])
    train, val = open_store(path, "train"), open_store(tmp_path, "val")
    assert train.classes == val.classes == ("a", "b")
    assert train.labels.tolist() == [0, 1] and val.labels.tolist() == [0]
    assert bytes(val.read(0)) == jpeg(2)


def test_a_tar_without_a_validation_split(tmp_path: Path) -> None:
    path = tar(tmp_path / "all.tar", [("a/0.jpg", jpeg(0)), ("b/0.jpg", jpeg(0))])
    for place in (path, tmp_path):
        with pytest.raises(NoSplitError):
            open_store(place, "val")


def test_the_official_archives(tmp_path: Path) -> None:
    imagenet(tmp_path)
    for place in (tmp_path, tmp_path / "ILSVRC2012_img_train.tar"):
        train, val = open_store(place, "train"), open_store(place, "val")
        assert train.classes == val.classes == WNIDS
        assert train.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert [val.classes[label] for label in val.labels] == list(VAL_WNIDS)
        assert train.name(3) == f"{WNIDS[1]}/{WNIDS[1]}_0.JPEG"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("val.txt", "ILSVRC2012_val_00000001.JPEG 2\nILSVRC2012_val_00000002.JPEG 0\n"),
        ("imagenet_2012_validation_synset_labels.txt", f"{WNIDS[2]}\n{WNIDS[0]}\n{WNIDS[1]}\n"),
        (
            "LOC_val_solution.csv",
            f"ImageId,PredictionString\nILSVRC2012_val_00000002,{WNIDS[0]} 1 2 3 4\n"
            f"ILSVRC2012_val_00000001,{WNIDS[2]} 1 2 3 4 {WNIDS[2]} 5 6 7 8\n"
            f"ILSVRC2012_val_00000003,{WNIDS[1]} 1 2 3 4\n",
        ),
    ],
)
def test_plain_lists_of_validation_labels(name: str, text: str, tmp_path: Path) -> None:
    imagenet(tmp_path, val=2 if name == "val.txt" else 3)
    (tmp_path / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    with pytest.raises(
        DataError, match=r"without their labels: put ILSVRC2012_devkit_t12\.tar\.gz"
    ):
        open_store(tmp_path, "val")
    (tmp_path / name).write_text(text)
    val = open_store(tmp_path, "val")
    wanted = VAL_WNIDS[: len(val)]
    assert [val.classes[label] for label in val.labels] == list(wanted)


def test_the_devkits_own_list_needs_the_devkit(tmp_path: Path) -> None:
    imagenet(tmp_path)
    (tmp_path / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    (tmp_path / "ILSVRC2012_validation_ground_truth.txt").write_text("1\n2\n3\n1\n")
    with pytest.raises(DataError, match="numbers the classes as the devkit does"):
        open_store(tmp_path, "val")


def test_a_flat_validation_folder_gets_labels_too(tmp_path: Path) -> None:
    imagenet(tmp_path / "kaggle")
    for name in ("train", "val"):
        archive = tmp_path / "kaggle" / f"ILSVRC2012_img_{name}.tar"
        (tmp_path / "kaggle" / name).mkdir()
        with tarfile.open(archive) as content:
            content.extractall(tmp_path / "kaggle" / name, filter="data")
        archive.unlink()
    train, val = open_store(tmp_path / "kaggle", "train"), open_store(tmp_path / "kaggle", "val")
    assert train.classes == val.classes == WNIDS  # the class tars in train/ are read in place
    assert [val.classes[label] for label in val.labels] == list(VAL_WNIDS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"no tar at all" * 100, "is no whole tar file"),
        (gzip.compress(b"x"), "is compressed"),
    ],
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


def test_compressed_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "t.tar.gz").write_bytes(b"")
    with pytest.raises(DataError, match="compressed as a whole"):
        open_store(tmp_path / "t.tar.gz", "train")


def test_images_beside_folders(tmp_path: Path) -> None:
    path = tar(tmp_path / "t.tar", [("a/0.jpg", jpeg(0)), ("1.jpg", jpeg(1))])
    with pytest.raises(DataError, match=r"both by themselves \(1.jpg\) and in folders \(a/\)"):
        ArchiveStore([path])


def test_a_store_travels_to_another_process(tmp_path: Path) -> None:
    path = tar(tmp_path / "t.tar", [("a/0.jpg", jpeg(0))])
    assert bytes(pickle.loads(pickle.dumps(ArchiveStore([path]))).read(0)) == jpeg(0)


def test_an_index_of_imagenets_size(tmp_path: Path) -> None:
    """1.28 million rows are 30 MB, and open in a fraction of a second (not timed here)."""
    from fastsiam.pipelines.store.archive_index import Index, file_facts, keep
    from fastsiam.pipelines.store.mapped import Mapped

    path = tar(tmp_path / "t.tar", [("a/0.jpg", jpeg(0))])
    rows = np.zeros(1_281_167, ROW)
    rows["offset"], rows["size"] = 512, len(jpeg(0))
    names = zlib.compress(b"\0".join(b"a/%07d.jpg" % i for i in range(len(rows))), 1)
    index = Index(rows, ("a",), False, names)
    kept = keep(index, [tmp_path / ".t.fastsiam-index"], file_facts([Mapped(path)]))
    assert rows.nbytes < 31e6 and kept is not None and kept.stat().st_size < 36e6
    store = ArchiveStore([path])
    assert len(store) == 1_281_167 and bytes(store.read(1_281_166)) == jpeg(0)
