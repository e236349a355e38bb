"""Shares of every class, samples of so many images, and lists of names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastsiam.errors import DataError
from fastsiam.pipelines import choose, open_store, read_list
from fastsiam.pipelines.subsets import sample
from tests.conftest import write_images

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(4), [1300, 1201, 732, 4]))


def test_every_class_gives_its_share() -> None:
    for percent, counts in {
        1: [13, 12, 7, 1], 10: [130, 120, 73, 1], 100: [1300, 1201, 732, 4]
    }.items():  # fmt: skip
        chosen = choose(LABELS, percent=percent, seed=0)
        assert chosen.dtype == np.int64 and (np.diff(chosen) > 0).all()
        assert np.bincount(LABELS[chosen]).tolist() == counts
    one, again, other = (choose(LABELS, percent=10, seed=seed) for seed in (0, 0, 1))
    assert one.tolist() == again.tolist() != other.tolist()
    # A draw that is noted here is a draw for ever: published numbers depend on it.
    assert choose(np.repeat([0, 1], 10), percent=30, seed=5).tolist() == [
        0, 5, 6, 15, 17, 19
    ]  # fmt: skip
    with pytest.raises(DataError, match="2 of 3 images have none"):
        choose(np.array([-1, 0, -1]), percent=1, seed=0)
    for wrong in (0, -1, 101, float("nan")):
        with pytest.raises(ValueError, match="percent must be above 0"):
            choose(LABELS, percent=wrong, seed=0)


def test_a_sample_keeps_the_proportions() -> None:
    drawn = sample(LABELS, size=300, seed=0)
    assert len(np.unique(drawn)) == 300 and (np.diff(drawn) > 0).all()
    counts = np.bincount(LABELS[drawn], minlength=4)
    assert np.abs(counts - np.array([1300, 1201, 732, 4]) * 300 / len(LABELS)).max() <= 1
    assert set(sample(LABELS, size=100, seed=0).tolist()) < set(drawn.tolist())
    # A sample that is noted here is a sample for ever.
    some = sample(np.repeat([0, 1, -1], [10, 5, 3]), size=7, seed=5)
    assert some.tolist() == [2, 4, 6, 7, 10, 12, 15]
    assert sample(np.repeat([0, 1], [10, 5]), size=3, seed=0).tolist() == [0, 5, 11]


def listed(folder: Path, *lines: str) -> list[int]:
    path = folder / "list.txt"
    path.write_text("\n".join(lines))
    return list(read_list(open_store(folder / "images", "train"), path))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes of 8 images, and in each of two one image with a name of its own."""
    write_images(tmp_path / "images")
    for kind, name in (("class0", "n01_5.JPEG"), ("class2", "n02_5.JPEG")):
        path = tmp_path / "images" / kind / "003.jpg"
        path.rename(path.with_name(name))
    return tmp_path


def test_a_list_of_names(folder: Path) -> None:
    """Whole names, files' names, blank lines, the ends of lines of Windows, one twice."""
    store = open_store(folder / "images", "train")
    lines = ["n02_5.JPEG", "", "class1/002.jpg\r", "  class0/n01_5.JPEG ", "n01_5.JPEG", ""]
    names = [store.name(i) for i in listed(folder, *lines)]
    assert names == ["class0/n01_5.JPEG", "class1/002.jpg", "class2/n02_5.JPEG"]
    missing = r"^4 of the 5 images .*list\.txt names are not there in .*: a, b, c, \.\.\.$"
    with pytest.raises(DataError, match=missing):
        listed(folder, "a", "b", "n01_5.JPEG", "c", "class1/n01_5.JPEG")
    with pytest.raises(DataError, match=r"^1 of the 2 .* there more than once in .*: 002\.jpg$"):
        listed(folder, "002.jpg", "n01_5.JPEG")
