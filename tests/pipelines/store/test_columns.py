"""Selection of table columns by name: ``--image-column`` and ``--label-column``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fastsiam.config import ColumnNames
from fastsiam.errors import DataError
from fastsiam.pipelines.store import Store, open_store
from tests.sources import jpeg
from tests.tables import saved, two_image_columns, write_hub_splits

PHOTO, MASK = ColumnNames("photo", "species"), ColumnNames("mask", "genus")


@pytest.mark.parametrize("write", [saved, write_hub_splits])
def test_columns_are_selected_by_name(write: Callable[..., Path], tmp_path: Path) -> None:
    root = write(tmp_path / "two", {"train": two_image_columns()})
    stores: list[Store] = []
    for names, first in ((PHOTO, 0), (MASK, 100), (PHOTO, 0)):  # cached indexes are not mixed up
        for sources in (False, True):
            store = open_store(root, "train", columns=names, sources=sources)
            assert bytes(store.read(2)) == jpeg(first + 2)
        stores.append(store)
    photo, mask, again = stores
    assert photo.classes == ("ash", "oak", "elm") and photo.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert mask.classes == ("x", "y") and mask.name(3) == "y/3.jpg"
    assert photo.stamp() == again.stamp() != mask.stamp()
    places = open_store(root, "train", columns=ColumnNames("photo", "place"))
    assert places.classes == ("site 0", "site 1") and places.labels.tolist() == [0, 1] * 3


def test_ambiguous_or_invalid_columns_are_rejected(tmp_path: Path) -> None:
    root = saved(tmp_path / "two", {"train": two_image_columns()})
    there = "the columns are photo, mask, species, genus, place, weight"
    for names, message in (
        (ColumnNames(), r"2 columns .* \(photo, mask\): .* such as --image-column photo"),
        (ColumnNames("photos"), f"--image-column photos does not exist; {there}"),
        (ColumnNames("weight"), f"--image-column weight holds float, not images; {there}"),
        (ColumnNames("photo", "kind"), f"--label-column kind does not exist; {there}"),
        (ColumnNames("photo", "weight"), f"--label-column weight holds float, not labels; {there}"),
    ):
        with pytest.raises(DataError, match=message) as caught:
            open_store(root, "train", columns=names)
        assert "\n" not in str(caught.value)


def test_column_options_without_columns_are_rejected(images: Path) -> None:
    with pytest.raises(DataError, match=r"has no columns: leave out --image-column, or pass "):
        open_store(images, "train", columns=ColumnNames("photo"))
    with pytest.raises(DataError, match="leave out --image-column and --label-column"):
        open_store(images, "train", columns=PHOTO)
