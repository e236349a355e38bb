"""What a run remembers of its images: their names, whatever container they lie in."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from fastsiam.config import ConvertConfig
from fastsiam.errors import CheckpointError
from fastsiam.pipelines import open_store
from fastsiam.pipelines.convert.command import convert_data
from fastsiam.train.image_list import FILE, ImageList, fingerprint, names_of, with_replacements
from tests.sources import folder_members, imagenet_train_tar, tar


@pytest.mark.parametrize(
    ("then", "now", "places"),
    [
        ("abcd", "dbca", [3, 1, 2, 0]),
        ("abcd", "xacyd", [1, -1, 2, 4]),
        ("aabb", "abab", [0, 2, 1, 3]),  # names that several images have
        ("aab", "ab", [0, -1, 1]),
    ],
)
def test_each_image_keeps_its_place(then: str, now: str, places: list[int]) -> None:
    assert ImageList(tuple(then)).positions_in(now).tolist() == places


@pytest.mark.parametrize(
    ("places", "replaced"),
    [([0, -1, 2], [0, 2, 2]), ([0, -1, -1, 1], [0, 1, 1, 1]), ([-1, 4, -1], [4, 4, 4])],
)
def test_a_missing_image_is_replaced_by_the_next(places: list[int], replaced: list[int]) -> None:
    assert with_replacements(np.array(places)).tolist() == replaced


def test_a_list_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert ImageList.load(tmp_path) is None
    odd = ImageList(("a/\udcff.jpg", "b/ä\n.jpg"), accepted=fingerprint(["x"]))
    (tmp_path / FILE).write_bytes(odd.to_bytes())
    assert ImageList.load(tmp_path) == odd
    (tmp_path / "images.npz").write_bytes((tmp_path / "images.npz").read_bytes()[:60])
    with pytest.raises(CheckpointError, match="the list of the run's images is corrupt"):
        ImageList.load(tmp_path)


def test_blocks_are_read_as_they_were_written(tmp_path: Path) -> None:
    blocks = np.array([0, 0, 1], np.int32)
    (tmp_path / FILE).write_bytes(ImageList(("a", "b", "c"), blocks=blocks).to_bytes())
    found = ImageList.load(tmp_path)
    assert found is not None and found.blocks is not None
    assert found.blocks.tolist() == [0, 0, 1]
    for wrong in (blocks[:2], blocks.astype(float), blocks[:, None]):
        (tmp_path / FILE).write_bytes(ImageList(("a", "b", "c"), blocks=wrong).to_bytes())
        with pytest.raises(CheckpointError, match="is corrupt"):
            ImageList.load(tmp_path)


def test_a_container_changes_no_name(images: Path, tmp_path: Path) -> None:
    """Folder, moved folder, tar, tar of tars, converted file and parts of one."""
    train = images / "train"
    expected = names_of(open_store(images, "train"))
    assert expected[0] == "class0/000.jpg" and len(expected) == 24
    moved = tmp_path / "elsewhere"
    shutil.copytree(train, moved)
    packed = tar(tmp_path / "packed" / "photos.tar", folder_members(train))
    of_tars = imagenet_train_tar(tmp_path / "tars" / "train.tar", folder_members(train))
    for path in (moved, packed, packed.parent, of_tars):
        assert names_of(open_store(path, "train")) == expected, path
    for source in (images, packed):
        out = tmp_path / f"converted-{source.name}"
        convert_data("folder", ConvertConfig(source=str(source), out=str(out)))
        assert names_of(open_store(out, "train")) == expected
    parts = tmp_path / "parts"
    for part in ("1/2", "2/2"):
        convert_data("folder", ConvertConfig(source=str(images), out=str(parts), part=part))
    assert names_of(open_store(parts, "train")) == expected
