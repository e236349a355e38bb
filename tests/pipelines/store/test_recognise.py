"""Recognition of the data set at a path: its images, classes and splits."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fastsiam.errors import DataError, NoImagesError, NoSplitError
from fastsiam.pipelines.store import open_store
from fastsiam.train.image_list import names_of
from tests.conversions import run
from tests.sources import WNIDS, jpeg, put, tar
from tests.tables import write_parquet

DEEP = ["a/aa.jpg", "a/z.jpg", "a/sub/a.jpg", "a/sub/b.jpg", "a-b/c.jpg", "b/x/y/z.jpg"]
KAGGLE = [f"ILSVRC/Data/CLS-LOC/train/{wnid}/0.JPEG" for wnid in WNIDS]
CASES: dict[str, tuple[dict[str, Any], dict[str, list[str]]]] = {
    "deep class folders, hidden and empty folders": (
        {"zebra/a.jpg": "", "ant/deep/deeper/b.JPEG": "", "ant/c.PNG": "", "empty/x.txt": "",
         "ant/notes.txt": "", ".hidden/x.jpg": "", "ant/._c.jpg": "", ".cache/x.parquet": ""},
        {"train": ["ant/c.PNG", "ant/deep/deeper/b.JPEG", "zebra/a.jpg"]},
    ),
    "deep folders": (dict.fromkeys(DEEP, ""), {"train": DEEP}),
    "deep folders in a tar": ({"t.tar": DEEP[::-1]}, {"train": DEEP}),
    "a word within a name is not a split": (
        {"carnival.tar": ["a/0.jpg"], "._train.tar": ""}, {"train": ["a/0.jpg"]}
    ),
    "Kaggle's": (dict.fromkeys(KAGGLE, ""), {"train": [f"{wnid}/0.JPEG" for wnid in WNIDS]}),
    "other names of splits": (
        {"Train/a/0.jpg": "", "Validation/a/1.jpg": ""},
        {"train": ["a/0.jpg"], "val": ["a/1.jpg"]},
    ),
    "more names of splits": (
        {"training/a/0.jpg": "", "test/a/1.jpg": ""}, {"train": ["a/0.jpg"], "val": ["a/1.jpg"]}
    ),
    "a class called train": (
        {"train/car/0.jpg": "", "train/train/1.jpg": ""}, {"train": ["car/0.jpg", "train/1.jpg"]}
    ),
    "a class called training": (
        {"training/0.jpg": "", "match/1.jpg": ""}, {"train": ["match/1.jpg", "training/0.jpg"]}
    ),
    "images beside parquet": (
        {"a/0.jpg": "", "a/features.parquet": "", "a/1.jpg": ""}, {"train": ["a/0.jpg", "a/1.jpg"]}
    ),
    "other names of tars": (
        {"my-training-0.tar": ["a/0.jpg"], "my-valid-0.tar": ["b/1.jpg"]},
        {"train": ["a/0.jpg"], "val": ["b/1.jpg"]},
    ),
}  # fmt: skip
"""Files (with members if a tar), and the expected images of each split."""


@pytest.mark.parametrize("case", CASES)
def test_layouts(case: str, tmp_path: Path) -> None:
    files, splits = CASES[case]
    for name, members in files.items():
        if members:
            tar(tmp_path / name, [(member, jpeg(i)) for i, member in enumerate(members)])
        else:
            put(tmp_path / name, name.encode())
    for split, names in splits.items():
        store: Any = open_store(tmp_path, split)  # type: ignore[arg-type]
        assert names_of(store) == names
        assert store.classes == tuple(sorted({name.split("/")[0] for name in names}))
        assert [store.classes[i] for i in store.labels] == [name.split("/")[0] for name in names]
        for i, name in enumerate(names):
            path = next(x for x, inside in files.items() if x.endswith(name) or name in inside)
            members = files[path]
            content = jpeg(members.index(name)) if members else path.encode()
            assert bytes(store.read(i)) == content


def test_file_has_validation_images_of_same_data(tmp_path: Path) -> None:
    for i, name in enumerate(["cats-train-0", "cats_val", "dogs-test", "dogs-train", "mice-train"]):
        tar(tmp_path / f"{name}.tar", [(f"a/{name}.jpg", jpeg(i))])
    for training, validation in (("cats-train-0", "cats_val"), ("dogs-train", "dogs-test")):
        store = open_store(tmp_path / f"{training}.tar", "val")
        assert names_of(store) == [f"a/{validation}.jpg"]
    with pytest.raises(NoSplitError, match="no file of this kind with 'val' in its name"):
        open_store(tmp_path / "mice-train.tar", "val")


def test_sources_of_converted_and_incomplete_data(images: Path, tmp_path: Path) -> None:
    """Whatever is next to them: incomplete parts, or a conversion of fewer images."""
    run("folder", images, tmp_path / "few", limit=2)
    few = (tmp_path / "few" / "train.beton").read_bytes()
    assert len(open_store(tmp_path / "few", "train", sources=True)) == 2
    shutil.copytree(images / "train", tmp_path / "train")
    put(tmp_path / "train-00001-of-00003.beton", few)
    with pytest.raises(DataError, match="1 of 3 parts"):
        open_store(tmp_path, "train")
    assert len(open_store(tmp_path, "train", sources=True)) == 24
    put(tmp_path / "damaged" / "x.tar", b"no tar")
    put(tmp_path / "damaged" / "train.beton", few)
    assert len(open_store(tmp_path / "damaged", "train")) == 2
    with pytest.raises(DataError, match=r"x\.tar"):
        open_store(tmp_path / "damaged", "train", sources=True)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            ["cat/0.jpg", "dog/0.jpg", "val/0.jpg"],
            "has a folder val/ but no train/, so the images in val/ are also training images; "
            "move the others into a folder train/",
        ),
        (
            ["cat/0.jpg", "dog/0.jpg", ".hidden/0.jpg", "texts/0.txt", "train/0.jpg"],
            "has a folder train/ with the training images, so the images in 2 other folders, "
            "such as cat/, are not used; if train/ is a class, move all class folders into a "
            "folder train/",
        ),
        (
            ["training/0.jpg", "validation/0.jpg", "test/0.jpg", "rest/0.tar", "unlabeled/1/0.png"],
            "has a folder training/ with the training images, so the images in 2 other folders, "
            "such as rest/, are not used; to train on them too, pass them with another --data",
        ),
        (
            ["train2017/0.jpg", "val2017/0.jpg"],
            "has folders train2017/ and val2017/, which are read as classes; if they are splits, "
            "rename them to train/ and val/, or pass one of them",
        ),
        (["texts/0.txt", "train/0.jpg", "val/0.jpg", "test/0.jpg"], ""),
    ],
)
def test_ambiguous_split_folders_cause_warning(
    files: list[str], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in files:
        put(tmp_path / name)
    for _ in range(2):
        open_store(tmp_path, "train")
    if any(name.startswith(("val/", "validation/")) for name in files):
        open_store(tmp_path, "val")  # without another warning
    assert caplog.messages == [f"{tmp_path} {message}"] * bool(message)


@pytest.mark.parametrize("below", ["", "train"])
@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_folders_beside_tars_or_tables_cause_warning(
    kind: str, below: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / below
    put(folder / "cats" / "0.jpg")
    put(folder / "texts" / "0.txt")
    put(tmp_path / "val" / "0.jpg")  # its images are used for validation
    if kind == "tar":
        tar(folder / "dogs-train.tar", [("a/0.jpg", jpeg(0))])
    else:
        rows = [(jpeg(0), "0.jpg", 0)]
        write_parquet(folder / "dogs-train.parquet", rows, ["a"], compression="none")
    assert len(open_store(tmp_path, "train")) == 1
    assert caplog.messages == [
        f"{folder} is read from its tars or parquet files, so the images in 1 folder, such as "
        "cats/, are not used; to use them too, pass them with another --data"
    ]


def test_files_of_no_split_cause_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In data sets for self-supervised training, they may be the most important ones."""
    for name in ("train-0", "test-0", "unlabeled-0", "extra"):
        tar(tmp_path / f"{name}.tar", [("a/0.jpg", jpeg(0))])
    assert len(open_store(tmp_path, "train")) == len(open_store(tmp_path, "val")) == 1
    assert caplog.messages == [
        f"{tmp_path} has 2 files of no split, such as extra.tar, which are not used; to train on "
        "them too, pass them with another --data"
    ]


@pytest.mark.parametrize("name", ["train", "Val"])
def test_broken_link_of_split_is_error(name: str, tmp_path: Path) -> None:
    put(tmp_path / "cats" / "0.jpg")
    (tmp_path / name).symlink_to(tmp_path / "not mounted")
    with pytest.raises(DataError, match=f"/{name} is a broken link: mount its target, or remove"):
        open_store(tmp_path, "train")


@pytest.mark.parametrize("below", ["", "train"])
def test_folder_with_tars_is_named_if_nothing_is_read(below: str, tmp_path: Path) -> None:
    shards = tar(tmp_path / below / "shards" / "0.tar", [("a/0.jpg", jpeg(0))]).parent
    with pytest.raises(NoImagesError, match=f"holds no images .* their folder, such as {shards}$"):
        open_store(tmp_path, "train")
    assert len(open_store(shards, "train")) == 1


def test_listing_folder_does_not_stat_each_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each ``stat`` takes time on a network file system. Links are followed, loops are skipped."""
    root, elsewhere = tmp_path / "data", put(tmp_path / "elsewhere" / "0.jpg").parent
    for i in range(3):
        put(root / f"{i}.jpg")
    for name in ("loop", "loop.parquet"):
        (root / name).symlink_to(name)
    stat, suffixes = Path.stat, list[str]()

    def note(path: Path, **options: Any) -> os.stat_result:
        suffixes.append(path.suffix)
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", note)
    assert len(open_store(root, "train")) == 3
    assert ".jpg" not in suffixes
    (root / "train").symlink_to(elsewhere)
    assert len(open_store(root, "train")) == 1
