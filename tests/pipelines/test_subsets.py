"""Subsets of a data set: shares of each class, samples, lists of names and hold-outs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastsiam.config import DataConfig
from fastsiam.errors import DataError
from fastsiam.pipelines import choose, open_split, open_store, read_list
from fastsiam.pipelines.subsets import hold_out, sample
from fastsiam.train.image_list import names_of
from tests.conftest import write_images
from tests.conversions import run
from tests.pipelines.cases import split_names

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(4), [1300, 1201, 732, 4]))


def test_subset_has_same_share_of_every_class() -> None:
    for percent, counts in {
        1: [13, 12, 7, 1], 10: [130, 120, 73, 1], 100: [1300, 1201, 732, 4]
    }.items():  # fmt: skip
        chosen = choose(LABELS, percent=percent, seed=0)
        assert chosen.dtype == np.int64 and (np.diff(chosen) > 0).all()
        assert np.bincount(LABELS[chosen]).tolist() == counts
    one, again, other = (choose(LABELS, percent=10, seed=seed) for seed in (0, 0, 1))
    assert one.tolist() == again.tolist() != other.tolist()
    # The expected draw must never change: published results depend on it.
    assert choose(np.repeat([0, 1], 10), percent=30, seed=5).tolist() == [
        0, 5, 6, 15, 17, 19
    ]  # fmt: skip
    with pytest.raises(DataError, match="2 of 3 images have none"):
        choose(np.array([-1, 0, -1]), percent=1, seed=0)
    for wrong in (0, -1, 101, float("nan")):
        with pytest.raises(ValueError, match="percent must be above 0"):
            choose(LABELS, percent=wrong, seed=0)


def test_sample_keeps_class_proportions() -> None:
    positions = sample(LABELS, size=300, seed=0)
    assert len(np.unique(positions)) == 300 and (np.diff(positions) > 0).all()
    counts = np.bincount(LABELS[positions], minlength=4)
    assert np.abs(counts - np.array([1300, 1201, 732, 4]) * 300 / len(LABELS)).max() <= 1
    assert set(sample(LABELS, size=100, seed=0).tolist()) < set(positions.tolist())
    # The expected samples must never change.
    some = sample(np.repeat([0, 1, -1], [10, 5, 3]), size=7, seed=5)
    assert some.tolist() == [2, 4, 6, 7, 10, 12, 15]
    assert sample(np.repeat([0, 1], [10, 5]), size=3, seed=0).tolist() == [0, 5, 11]


def read_names(folder: Path, *lines: str) -> list[int]:
    path = folder / "list.txt"
    path.write_text("\n".join(lines))
    return list(read_list(open_store(folder / "images", "train"), path))


def test_subset_is_read_from_list_of_names(tmp_path: Path) -> None:
    """Full names, file names, blank lines, Windows line endings and a duplicate.

    Two of the three classes have one image with a unique file name.
    """
    images = write_images(tmp_path / "images")
    for kind, name in (("class0", "n01_5.JPEG"), ("class2", "n02_5.JPEG")):
        (images / kind / "003.jpg").rename(images / kind / name)
    store = open_store(images, "train")
    lines = ["n02_5.JPEG", "", "class1/002.jpg\r", "  class0/n01_5.JPEG ", "n01_5.JPEG", ""]
    names = [store.name(i) for i in read_names(tmp_path, *lines)]
    assert names == ["class0/n01_5.JPEG", "class1/002.jpg", "class2/n02_5.JPEG"]
    (images / "class1/000.jpg").rename(images / "class1/a\u2028b.jpg")
    assert len(read_names(tmp_path, "a\u2028b.jpg")) == 1  # Python's splitlines splits here
    missing = r"^4 of the 5 images listed in .*list\.txt are missing from .*: a, b, c, \.\.\.$"
    with pytest.raises(DataError, match=missing):
        read_names(tmp_path, "a", "b", "n01_5.JPEG", "c", "class1/n01_5.JPEG")
    with pytest.raises(DataError, match=r"^1 of the 2 .* are ambiguous in .*: 002\.jpg$"):
        read_names(tmp_path, "002.jpg", "n01_5.JPEG")
    table = tmp_path / "images.csv"
    table.write_text("path" + "\nimages/class0/n01_5.JPEG" * 2)
    (tmp_path / "list.txt").write_text("\ufeffimages/class0/n01_5.JPEG", encoding="utf-8")
    with pytest.raises(DataError, match=r"are ambiguous in .*: images/class0/n01_5\.JPEG"):
        read_list(open_store(table, "train"), tmp_path / "list.txt")


# A hold-out is a share of each class, selected by image name, so every command selects the same.


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder without splits, with 3 classes of 20 images."""
    return write_images(tmp_path / "photos", each=20)


def test_holdout_takes_share_of_each_class(photos: Path) -> None:
    every = names_of(open_store(photos, "train"))
    for holdout, each in (("10%", 2), ("12.5%", 2), ("50%", 10), ("1%", 1), ("99.9%", 19)):
        left, held_out = split_names(photos, holdout)
        assert (
            sorted(left + held_out) == every
            and left == sorted(left)
            and held_out == sorted(held_out)
        )
        assert [name.split("/")[0] for name in held_out] == [
            f"class{i // each}" for i in range(3 * each)
        ]
    val = open_split(DataConfig(data=str(photos), holdout="10%"), "val")
    assert val.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert val.classes == ("class0", "class1", "class2")
    for holdout in ("10%", ""):
        with pytest.raises(ValueError, match="split must be train or val, not 'test'"):
            open_split(DataConfig(data=str(photos), holdout=holdout), "test")  # type: ignore[arg-type]


def test_holdout_is_pinned(photos: Path) -> None:
    """Resumed runs and records of evaluations depend on it."""
    assert split_names(photos)[1] == [
        "class0/001.jpg", "class0/007.jpg", "class1/007.jpg",
        "class1/014.jpg", "class2/011.jpg", "class2/017.jpg",
    ]  # fmt: skip


def test_holdout_has_all_or_no_rows_of_listed_file(tmp_path: Path) -> None:
    write_images(tmp_path, classes=2, each=4)
    files = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.jpg"))
    rows = [f"{file},{file.split('/')[0]}" for file in (files + files[1:3]) * 3]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *rows, ""]))
    run("folder", tmp_path / "list.csv", tmp_path / "out")
    for root in (tmp_path / "list.csv", tmp_path / "out"):
        left, held_out = split_names(root, "30%")
        assert not set(left) & set(held_out) and len(left) + len(held_out) == 30
        assert len(set(held_out)) == 2


def test_class_with_one_image_is_not_held_out(tmp_path: Path) -> None:
    write_images(tmp_path / "few", classes=2, each=1)
    assert len(hold_out(open_store(tmp_path / "few", "train"), percent=50)) == 0
    with pytest.raises(DataError, match=r"no class of .*few has two: remove --holdout, or sort"):
        split_names(tmp_path / "few")
    write_images(tmp_path / "few", classes=1, each=3)
    left, held_out = split_names(tmp_path / "few", "99%")
    assert len(held_out) == 2 and all(name.startswith("class0/") for name in held_out)
    assert "class1/000.jpg" in left
