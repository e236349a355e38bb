"""A hold-out: a share of each class by the images' names, the same in every command."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fastsiam.config import ConvertConfig, DataConfig
from fastsiam.errors import DataError, NoSplitError
from fastsiam.pipelines import open_split, open_store
from fastsiam.pipelines.convert.command import convert_data
from fastsiam.pipelines.subsets import hold_out
from fastsiam.train.image_list import names_of
from tests.conftest import write_images
from tests.sources import folder_members, tar


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """One folder of 3 classes of 20 images, without splits."""
    return write_images(tmp_path / "photos", each=20)


def parts(root: Path, holdout: str = "10%") -> tuple[list[str], list[str]]:
    """Return the names of the images that are left, and of those held out."""
    data = DataConfig(data=str(root), holdout=holdout)
    return names_of(open_split(data, "train")), names_of(open_split(data, "val"))


def test_a_share_of_each_class_is_held_out(photos: Path) -> None:
    every = names_of(open_store(photos, "train"))
    for holdout, each in (("10%", 2), ("12.5%", 2), ("50%", 10), ("1%", 1), ("99.9%", 19)):
        left, held = parts(photos, holdout)
        assert sorted(left + held) == every and left == sorted(left) and held == sorted(held)
        assert [name.split("/")[0] for name in held] == [
            f"class{i // each}" for i in range(3 * each)
        ]
    val = open_split(DataConfig(data=str(photos), holdout="10%"), "val")
    assert val.labels.tolist() == [0, 0, 1, 1, 2, 2] and val.classes == (
        "class0",
        "class1",
        "class2",
    )


def test_the_same_are_held_out_for_ever_and_in_any_container(photos: Path, tmp_path: Path) -> None:
    """Runs that are resumed and records of evaluations depend on it."""
    expected = parts(photos)
    assert expected[1] == [
        "class0/001.jpg", "class0/007.jpg", "class1/007.jpg",
        "class1/014.jpg", "class2/011.jpg", "class2/017.jpg",
    ]  # fmt: skip
    packed = tar(tmp_path / "photos.tar", folder_members(photos))
    out = tmp_path / "converted"
    convert_data("folder", ConvertConfig(source=str(photos), out=str(out)))
    shutil.copytree(photos, tmp_path / "moved")
    for path in (packed, out, out / "train.beton", tmp_path / "moved"):
        assert parts(path) == expected, path


def test_a_class_of_one_image_keeps_it(tmp_path: Path) -> None:
    write_images(tmp_path / "few", classes=2, each=1)
    assert len(hold_out(open_store(tmp_path / "few", "train"), percent=50)) == 0
    with pytest.raises(DataError, match=r"no class of .*few has two: leave --holdout out, or sort"):
        parts(tmp_path / "few")
    write_images(tmp_path / "few", classes=1, each=3)
    left, held = parts(tmp_path / "few", "99%")
    assert len(held) == 2 and all(name.startswith("class0/") for name in held)
    assert "class1/000.jpg" in left


def test_validation_images_are_refused_beside_it(images: Path) -> None:
    with pytest.raises(DataError, match="has validation images of its own, and --holdout 10%"):
        parts(images)
    with pytest.raises(NoSplitError):
        open_split(DataConfig(data=str(images / "train")), "val")
    assert len(parts(images / "train")[1]) == 3
