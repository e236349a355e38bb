"""Data sets in all forms that they are published in: found, converted, or said how to get."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastsiam.config import ConvertConfig
from fastsiam.errors import DataError
from fastsiam.pipelines.convert import convert
from fastsiam.pipelines.store import BetonStore, FolderStore, open_store
from tests.conftest import write_images
from tests.conversions import Quiet, run
from tests.processes import fastsiam
from tests.sources import (
    CIFAR_CLASSES,
    VAL_WNIDS,
    WNIDS,
    cifar,
    evil_pickle,
    imagenet,
    jpeg,
    python2_pickle,
)
from tests.tiers import rest_slow


def test_the_official_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no options: found under the data root, converted beside it, read from there."""
    root, out = tmp_path / "my data", tmp_path / "my data-beton"
    monkeypatch.setenv("FASTSIAM_DATA", str(root))
    imagenet(root)
    before = {path.name for path in root.iterdir()}
    done = fastsiam("convert", "imagenet")
    assert "train.beton: 9 images of 3 classes" in done.stdout
    assert done.stdout.endswith(f"fastsiam convert verify '{out}'; use it with: --data '{out}'\n")
    assert {path.name for path in out.iterdir()} == {"train.beton", "val.beton", "manifest.json"}
    assert {path.name for path in root.iterdir() if path.name[0] != "."} == before
    train, val = open_store(out, "train"), open_store(out, "val")
    assert isinstance(train, BetonStore) and train.classes == val.classes == WNIDS
    assert [val.classes[label] for label in val.labels] == list(VAL_WNIDS)
    again = fastsiam("convert", "imagenet")
    files = f"rm '{out}/train.beton' '{out}/val.beton'; or choose another --out\n"
    assert again.stdout.startswith(f"there already: {out}/train.beton: 9 images of 3 classes, ")
    assert again.stdout.endswith(f"nothing done; to do it again, delete it first: {files}")
    (out / "val.beton").unlink()
    partly = fastsiam("convert", "imagenet").stdout
    assert f"there already: {out}/train" in partly and f"\n{out}/val.beton: 4 images" in partly
    assert "nothing done" not in partly
    assert "whole" in fastsiam("convert", "verify", str(out), "--decode").stdout


@pytest.mark.parametrize("place", ["", "imagenet", "ILSVRC/Data/CLS-LOC"])
def test_imagenet_in_folders(place: str, tmp_path: Path) -> None:
    for wnid in WNIDS:
        for split in ("train", "val"):
            path = tmp_path / place / split / wnid / f"{wnid}_1.JPEG"
            path.parent.mkdir(parents=True)
            path.write_bytes(jpeg(1))
    written = run("imagenet", tmp_path, tmp_path / "out")
    assert [w.about["images"] for w in written] == [3, 3]


def test_nothing_found_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("x")
    with pytest.raises(DataError) as caught:
        run("imagenet", tmp_path, tmp_path)
    for word in ("ILSVRC2012_img_train.tar", "parquet", "image-net.org", "--source", str(tmp_path)):
        assert word in str(caught.value)
    with pytest.raises(DataError, match="cifar-10-python"):
        run("cifar10", tmp_path, tmp_path)
    with pytest.raises(DataError, match=r"no data at .*nowhere"):
        run("folder", tmp_path / "nowhere", tmp_path)


def test_cifars_own_archive(tmp_path: Path) -> None:
    path = cifar(tmp_path / "cifar-10-python.tar.gz")
    train, val = run("cifar10", tmp_path, tmp_path / "out")
    assert train.about["stored"] == {"unchanged": 50} and train.about["raw"] == 50
    assert val.about["images"] == 5
    store, source = BetonStore(train.path), open_store(path, "train")
    assert store.classes == CIFAR_CLASSES and store.labels.tolist()[:12] == [*range(10), 0, 1]
    for i in range(50):
        np.testing.assert_array_equal(np.asarray(store.decode(i)), np.asarray(source.decode(i)))
    first = np.random.default_rng(0).integers(0, 256, (10, 3072), dtype=np.uint8)[0]
    np.testing.assert_array_equal(
        np.asarray(store.decode(0)), first.reshape(3, 32, 32).transpose(1, 2, 0)
    )
    (jpegs, _) = run("cifar10", tmp_path, tmp_path / "jpegs", raw=False)
    assert jpegs.about["stored"] == {"re-encoded: pixels": 50}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("evil", r"names posix\.mkdir, which CIFAR's files do not; nothing of it was run"),
        (b"\x80\x02garbage", "is damaged"),
        (python2_pickle([1, 2]), "is no file of CIFAR"),
        (python2_pickle({b"data": b"short", b"labels": [1]}), "is damaged"),
    ],
)
def test_a_pickle_runs_nothing(extra: str | bytes, message: str, tmp_path: Path) -> None:
    target = tmp_path / "made-by-the-pickle"
    content = evil_pickle(target) if extra == "evil" else bytes(extra)  # type: ignore[arg-type]
    cifar(tmp_path / "cifar-10-python.tar.gz", extra=content)
    with pytest.raises(DataError, match=message):
        run("cifar10", tmp_path, tmp_path / "out")
    assert not target.exists()


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A small data set in the folders of CIFAR-10's JPEGs."""
    for split in ("train", "test"):
        write_images(tmp_path / "cifar10" / split, classes=10, each=25, side=32)
        for number, name in enumerate(CIFAR_CLASSES):
            (tmp_path / "cifar10" / split / f"class{number}").rename(
                tmp_path / "cifar10" / split / name
            )
    return tmp_path / "cifar10"


@pytest.mark.parametrize(("files", "limit"), rest_slow([("made", 200), ("cifar10", 2000)]))
def test_cifar10_as_files_becomes_pixels(
    files: str, limit: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The zip of JPEGs, unzipped -> folder -> .beton."""
    source = request.getfixturevalue(files)
    train, val = run("cifar10", source, tmp_path / "out", raw=True, limit=limit)
    store = BetonStore(train.path)
    assert np.bincount(store.labels).tolist() == [limit // 10] * 10
    assert val.about["images"] == limit
    folder = FolderStore(source / "train")
    place = {folder.name(i): i for i in range(len(folder))}
    for i in range(0, limit, 97):
        image = folder.decode(place[store.name(i)])
        np.testing.assert_array_equal(np.asarray(store.decode(i)), np.asarray(image))


def test_imagenet_without_validation_labels(tmp_path: Path) -> None:
    imagenet(tmp_path)
    (tmp_path / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    quiet = Quiet()
    config = ConvertConfig(source=str(tmp_path), out=str(tmp_path / "out"))
    assert [w.path.name for w in convert("imagenet", config, quiet)] == ["train.beton"]
    assert quiet.said[0].startswith("no val.beton: ") and "devkit" in quiet.said[0]


def test_where_it_goes_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what was found: two data sets under one root do not meet."""
    monkeypatch.setenv("FASTSIAM_DATA", str(tmp_path))
    imagenet(tmp_path / "imagenet")
    (tmp_path / "cifar10").mkdir()
    cifar(tmp_path / "cifar10" / "cifar-10-python.tar.gz")
    for kind in ("imagenet", "cifar10"):
        written = convert(kind, ConvertConfig(), Quiet())
        assert {w.path.parent for w in written} == {tmp_path / f"{kind}-beton"}
    with pytest.raises(DataError, match="holds data sets of their own: name one"):
        open_store(tmp_path, "train")


def test_the_demos_images(tmp_path: Path) -> None:
    done = fastsiam("convert", "demo", "--out", str(tmp_path / "demo"))
    assert "train.beton: 4,000 images of 10 classes" in done.stdout
    assert len(open_store(tmp_path / "demo", "val")) == 1000
    done = fastsiam("convert", "demo", "--source", str(tmp_path), code=1)
    assert done.stderr == "error: the demo generates its own images; leave out --source\n"
