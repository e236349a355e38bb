"""ImageNet's official archives, and the labels of its validation images."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path

import pytest

from fastsiam.errors import DataError, NoLabelsError
from fastsiam.pipelines.store import open_store
from tests.sources import VAL_WNIDS, WNIDS, imagenet, tar_bytes


def test_imagenet_archives_with_devkit_or_kaggle_list(tmp_path: Path) -> None:
    imagenet(tmp_path)
    for place in (tmp_path, tmp_path / "ILSVRC2012_img_train.tar"):
        train, val = open_store(place, "train"), open_store(place, "val")
        assert train.classes == val.classes == WNIDS
        assert train.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert [val.classes[label] for label in val.labels] == list(VAL_WNIDS)
        assert train.name(3) == f"{WNIDS[1]}/{WNIDS[1]}_0.JPEG"
    devkit = tmp_path / "ILSVRC2012_devkit_t12.tar.gz"
    intact, members = devkit.read_bytes(), [("ILSVRC2012_devkit_t12/data/meta.mat", bytes(300))]
    for damaged in (intact[:-8] + bytes(8), gzip.compress(tar_bytes(members))):
        devkit.write_bytes(damaged)
        with pytest.raises(DataError, match=r"devkit_t12.tar.gz cannot be read .*; fetch it again"):
            open_store(tmp_path, "val")
    devkit.unlink()
    with pytest.raises(
        NoLabelsError, match=r"without their labels: put ILSVRC2012_devkit_t12\.tar\.gz"
    ):
        open_store(tmp_path, "val")
    (tmp_path / "LOC_val_solution.csv").write_text(
        f"ImageId,PredictionString\nILSVRC2012_val_00000002,{WNIDS[0]} 1 2 3 4\n"
        f"ILSVRC2012_val_00000001,{WNIDS[2]} 1 2 3 4 {WNIDS[2]} 5 6 7 8\n"
        f"ILSVRC2012_val_00000003,{WNIDS[1]} 1 2 3 4\nILSVRC2012_val_00000004,{WNIDS[2]} 1 2 3 4\n"
    )
    val = open_store(tmp_path, "val")
    assert [val.classes[label] for label in val.labels] == list(VAL_WNIDS)


def test_flat_imagenet_validation_folder_gets_labels(tmp_path: Path) -> None:
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
