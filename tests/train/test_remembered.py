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
from fastsiam.train.remembered import FILE, Change, Remembered, fingerprint, names_of
from tests.sources import folder_members, imagenet_train_tar, tar

NONE = np.zeros(0, np.int64)


def change(then: str, now: str, held: list[int] | None = None) -> Change:
    """Compare images whose names are letters."""
    return Change.between(Remembered(tuple(then)), list(now), np.array(held or [], np.int64))


@pytest.mark.parametrize(
    ("then", "now", "shown", "gone", "new"),
    [
        ("abcd", "abcd", "abcd", "", ""),
        ("abcd", "dbca", "abcd", "", ""),  # another order
        ("abcd", "acd", "accd", "b", ""),
        ("abcd", "ad", "addd", "bc", ""),
        ("abcd", "ab", "abaa", "cd", ""),  # after the last comes the first
        ("abcd", "xacyd", "accd", "b", "xy"),
        ("abcd", "acde", "accd", "b", "e"),  # as many as before
        ("aabb", "abab", "aabb", "", ""),  # names that several images have
        ("aab", "ab", "abb", "a", ""),
    ],
)
def test_each_image_keeps_its_place(then: str, now: str, shown: str, gone: str, new: str) -> None:
    found = change(then, now)
    assert "".join(now[i] for i in found.positions()) == shown
    assert ("".join(found.gone), "".join(found.new)) == (gone, new)
    assert bool(found) == bool(gone or new)


def test_images_that_are_held_out_are_not_new() -> None:
    assert change("ac", "abcd", held=[1]).new == ("d",)
    assert change("abc", "abc", held=[1]).positions().tolist() == [0, 1, 2]


def test_a_message_names_a_few() -> None:
    assert str(change("abcdefg", "agxy")) == ("5 of 7 images missing (b, c, d, ...), 2 new (x, y)")


def test_a_list_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert Remembered.load(tmp_path) is None
    odd = Remembered(("a/\udcff.jpg", "b/ä\n.jpg"))
    (tmp_path / FILE).write_bytes(odd.to_bytes())
    assert Remembered.load(tmp_path) == odd
    agreed = odd.accepting(["x", "y"])
    (tmp_path / FILE).write_bytes(agreed.to_bytes())
    again = Remembered.load(tmp_path)
    assert again == agreed and again.accepts(["y", "x"]) and not again.accepts(["x"])
    (tmp_path / "images.npz").write_bytes((tmp_path / "images.npz").read_bytes()[:60])
    with pytest.raises(CheckpointError, match="the list of the run's images is corrupt"):
        Remembered.load(tmp_path)


def test_blocks_are_read_as_they_were_written(tmp_path: Path) -> None:
    blocks = np.array([0, 0, 1], np.int32)
    (tmp_path / FILE).write_bytes(Remembered(("a", "b", "c"), blocks=blocks).to_bytes())
    found = Remembered.load(tmp_path)
    assert found is not None and found.blocks is not None
    assert found.blocks.tolist() == [0, 0, 1]
    for wrong in (blocks[:2], blocks.astype(float), blocks[:, None]):
        (tmp_path / FILE).write_bytes(Remembered(("a", "b", "c"), blocks=wrong).to_bytes())
        with pytest.raises(CheckpointError, match="is corrupt"):
            Remembered.load(tmp_path)


def test_a_fingerprint_is_of_a_set() -> None:
    assert fingerprint(["a", "b"]) == fingerprint(["b", "a"]) != fingerprint(["a", "bb"])


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
