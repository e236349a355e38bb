"""Runs on a named column of a table, and what comes after them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastsiam.config import TrainConfig
from fastsiam.config.evaluate import KnnConfig
from fastsiam.config.run import VerifyConfig
from fastsiam.distributed import Place
from fastsiam.errors import CheckpointError, DataError
from fastsiam.evaluate.command import evaluate_knn
from fastsiam.train.command import train_here
from fastsiam.train.verify import verify
from tests.configs import flags, with_settings
from tests.pipelines.store.test_columns import saved, table
from tests.processes import fastsiam

KNN = KnnConfig(k=(1,), workers=0, device="cpu")
HERE = Place(0, 1, torch.device("cpu"))


@pytest.fixture
def photos(small: TrainConfig, tmp_path: Path) -> TrainConfig:
    """A run on one of two image columns, with a third of the rows held out."""
    columns = {"image_column": "photo", "label_column": "species", "holdout": "34%"}
    root = saved(table(rows=12), tmp_path / "two")
    return with_settings(small, data=str(root), batch=4, max_steps=2, **columns)


def test_a_run_and_its_evaluations_take_the_named_columns(
    photos: TrainConfig, tmp_path: Path
) -> None:
    run = train_here(photos, "imagenet")
    own = evaluate_knn(run, KNN, HERE)
    assert (own.data.classes, own.data.image_column) == (3, "photo")
    other = evaluate_knn(run, replace(KNN, image_column="mask", label_column="genus"), HERE)
    assert other.data.classes == 2 and other.identity != own.identity
    assert any("log lines agree" in line for line in verify(run, VerifyConfig()))
    elsewhere = str(saved(table(), tmp_path / "elsewhere"))
    with pytest.raises(DataError, match=r"2 columns .* --image-column photo"):
        evaluate_knn(run, replace(KNN, data=elsewhere), HERE)
    with pytest.raises(DataError, match=r"2 columns .* --image-column photo"):
        list(verify(run, VerifyConfig(data=elsewhere)))
    with pytest.raises(CheckpointError, match="image-column: photo -> mask"):
        train_here(with_settings(photos, image_column="mask"), "imagenet")


def test_the_command_line(photos: TrainConfig, tmp_path: Path) -> None:
    refused = fastsiam("train", *flags(with_settings(photos, image_column="")), code=1).stderr
    assert "--image-column photo" in refused.splitlines()[-1]
    out = tmp_path / "views.png"
    columns = ["--image-column", "mask", "--label-column", "genus"]
    fastsiam("views", "--data", photos.data.data, *columns, "--images", "2", "--out", str(out))
    assert out.exists()
