"""Tars read in place: unusual members and names, and their index; see also test_store."""

from __future__ import annotations

import logging
import os
import resource
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastsiam.errors import NoImagesError
from fastsiam.pipelines.store import ArchiveStore, archive, index, open_store
from fastsiam.pipelines.store.index import ROW
from fastsiam.pipelines.store.mapped_files import File, Mapped
from fastsiam.train.image_list import names_of
from tests.pipelines.cases import batches
from tests.processes import Forked
from tests.sources import encoded, huge_tar, imagenet_train_tar, jpeg, picture, tar, tar_bytes


def test_open_file_limit_is_raised_for_many_shards(tmp_path: Path) -> None:
    """The limit is raised for them, and for files that are opened later."""
    for i in range(80):
        tar(tmp_path / f"train-{i:04d}.tar", [(f"{i}.jpg", jpeg(0)), (f"{i}.cls", b"0")])
    for limit in (40, 100):
        result = Forked(count_with_few_files, tmp_path, limit).wait()
        assert result.stdout == "80\n", result.stderr


def count_with_few_files(folder: Path, limit: int) -> None:
    """Count a store's images under a limit on open files, open 60 more files, print the count."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, 400))
    store = open_store(folder, "train")
    more = [os.open(os.devnull, os.O_RDONLY) for _ in range(60)]
    print(len(store) * len(set(more)) // 60)


def test_index_is_built_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tar(tmp_path / "t.tar", [(f"a/{i}.jpg", jpeg(i)) for i in range(3)])
    with caplog.at_level(logging.INFO):
        first = ArchiveStore([path])
    assert "indexed 3 images" in caplog.text
    index_file = tmp_path / ".t.fastsiam-index"
    assert str(index_file) in caplog.text and ROW.itemsize == 24
    caplog.clear()
    with caplog.at_level(logging.INFO):
        second = ArchiveStore([path])
    assert not caplog.text and first.stamp() == second.stamp()
    body = index_file.read_bytes()
    at = body.index(b"rows.npy") + 200  # within the rows
    flipped = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
    too_large = body.replace(b"'shape': (3,)", b"'shape': (9**99,)")
    for damaged in (flipped, too_large, body[:-100], b"", b"{}\n"):
        index_file.write_bytes(damaged)
        assert damaged != body and ArchiveStore([path]).stamp() == first.stamp()
        assert len(index_file.read_bytes()) == len(body)
    tar(path, [("a/0.jpg", jpeg(7))])  # another file
    assert len(ArchiveStore([path])) == 1


def test_tar_without_images_is_scanned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example annotations next to a folder's images, which are read instead."""
    Image.new("RGB", (8, 8)).save(tmp_path / "0.jpg")
    path = tar(tmp_path / "annotations.tar", [("a.json", b"{}")])
    assert len(open_store(tmp_path, "train")) == 1
    monkeypatch.setattr(archive, "_scan", None)
    assert len(open_store(tmp_path, "train")) == 1
    with pytest.raises(NoImagesError, match=r"annotations\.tar holds no images$"):
        ArchiveStore([path])


def test_concurrent_processes_build_one_index(tmp_path: Path) -> None:
    """It uses worker processes, which it forks while it holds the lock."""
    path = imagenet_train_tar(
        tmp_path / "t.tar", [(f"n{i % 5:08d}/{i}.jpg", jpeg(i)) for i in range(40)]
    )
    processes = [Forked(index_slowly, tmp_path) for _ in range(3)]
    assert [one.wait().stdout for one in processes] == ["40\n"] * 3
    assert (tmp_path / "built").read_text() == "built\n"
    assert sorted(os.listdir(tmp_path)) == [".t.fastsiam-index", "built", "t.tar"]
    loaded_index = index.load([tmp_path / ".t.fastsiam-index"], index.file_facts([path]))
    assert loaded_index is not None
    for name, array in archive.build_index([Mapped(path)], "by one process").items():
        np.testing.assert_array_equal(loaded_index[name], array)


def index_slowly(folder: Path) -> None:
    """Print a tar's number of images; record in a file if this process built the index."""

    def build(files: Sequence[File], source: str) -> index.Index:
        with (folder / "built").open("a") as file:
            file.write("built\n")
        time.sleep(0.5)
        return built(files, source)

    built, archive.build_index = archive.build_index, build
    archive._SMALL_BYTES = 0
    print(len(ArchiveStore([folder / "t.tar"])))


def test_index_falls_back_to_user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tar(tmp_path / "data" / "t.tar", [("a/0.jpg", jpeg(0))])
    (tmp_path / "data" / ".t.fastsiam-index").mkdir()  # root may write, but not over a folder
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ArchiveStore([path])
    assert len(list((tmp_path / "cache" / "fastsiam").glob("*.index"))) == 1


def test_webdataset_numeric_labels(tmp_path: Path) -> None:
    """Samples are identified by the name up to its first dot. Some numbers have no images."""
    members = [("0.v1.jpg", jpeg(0)), ("0.cls", b"-1"), ("1.jpg", jpeg(1)), ("1.cls", b"20")]
    store = ArchiveStore([tar(tmp_path / "t.tar", [*members, ("1.json", b"{}")])])
    assert store.labels.tolist() == [-1, 20] and store.classes == tuple(map(str, range(21)))


def test_unusual_webdataset_samples_cause_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Numbers that cannot be classes, and several images in a sample."""
    members = [("0.jpg", jpeg(0)), ("0.mask.png", encoded(picture(1), "PNG")), ("0.cls", b"9" * 11)]
    store = ArchiveStore([tar(tmp_path / "t.tar", members)])
    assert store.labels.tolist() == [-1, -1] and store.classes == ()
    samples, labels = caplog.messages
    assert "has 1 sample with several images, such as /0.*; all of them are used" in samples
    assert "are unlabelled: the label 99999999999 is not a class number" in labels
    shards = [tar(tmp_path / f"{i}.tar", [("0.jpg", jpeg(i)), ("0.cls", b"1")]) for i in range(2)]
    caplog.clear()
    assert ArchiveStore(shards).labels.tolist() == [1, 1]
    assert not caplog.messages  # numbered from 0 in each tar


def test_size_too_large_for_index_is_unknown(tmp_path: Path) -> None:
    wide = encoded(Image.new("RGB", (2**16, 2)), "PNG")
    store = ArchiveStore([tar(tmp_path / "t.tar", [("a/0.png", wide), ("a/1.jpg", jpeg(1))])])
    dimensions = store.dimensions()
    assert dimensions is not None and dimensions.tolist() == [[0, 0], [30, 40]]
    assert batches("memory", tmp_path / "t.tar", batch=2)


@pytest.mark.parametrize(
    ("members", "images"),
    [
        # If there are images and tars, the images are read, whichever come first.
        ([("a.tar", tar_bytes([("0.jpg", jpeg(0))])), ("b/1.jpg", jpeg(1))], {"b/1.jpg": jpeg(1)}),
        ([("b/1.jpg", jpeg(1)), ("c.tar", b"")], {"b/1.jpg": jpeg(1)}),
        # Of members with the same name, the last one counts, as for ``tar -x``.
        (
            [("a/0.jpg", jpeg(0)), ("a/1.jpg", jpeg(1)), ("./a/0.jpg", jpeg(2))],
            {"a/0.jpg": jpeg(2), "a/1.jpg": jpeg(1)},
        ),
    ],
)
def test_tar_members_that_are_read(
    members: list[tuple[str, bytes]], images: dict[str, bytes], tmp_path: Path
) -> None:
    store = ArchiveStore([tar(tmp_path / "t.tar", members)])
    assert {store.name(i): store.read(i) for i in range(len(store))} == images


def test_hidden_members_are_skipped(tmp_path: Path) -> None:
    """Images, tars, and links to images, which are rejected if they are not hidden."""
    members = [(".a/0.jpg", jpeg(0)), ("b/.c/1.tar", b""), ("b/2.tar", tar_bytes([("2.jpg", b"")]))]
    path = tar(tmp_path / "t.tar", members)
    with tarfile.open(path, "a") as file:
        link = tarfile.TarInfo("./.git/y.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "x"
        file.addfile(link)
    store = ArchiveStore([path])
    assert names_of(store) == ["2/2.jpg"]


def test_other_members_may_exceed_4_gib(tmp_path: Path) -> None:
    store = ArchiveStore([huge_tar(tmp_path / "t.tar", "a/weights.bin")])
    assert len(store) == 1 and store.decode(0).size
