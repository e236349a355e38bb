"""Evaluations of data without a validation split: a share of each class is held out for it."""

from __future__ import annotations

import csv
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastsiam.config import TrainConfig
from fastsiam.config.evaluate import (
    EvalConfig,
    FeaturesConfig,
    FinetuneConfig,
    KnnConfig,
    LinearConfig,
)
from fastsiam.errors import DataError, NoSplitError
from fastsiam.evaluate.command import evaluate_finetuned, evaluate_knn, evaluate_linear
from fastsiam.evaluate.feature_files import write_features
from fastsiam.evaluate.subject import open_subject
from fastsiam.interchange import load_pretrained
from fastsiam.run.records import read_records
from fastsiam.train.command import train_here
from tests.configs import with_settings
from tests.conftest import write_images
from tests.pipelines.test_subsets import parts
from tests.train.runs import CPU as HERE

KNN = KnnConfig(k=(5,), workers=0, device="cpu")
LINEAR = LinearConfig(epochs=2, batch=6, workers=0, device="cpu", cached=True)


@pytest.fixture
def run(small: TrainConfig, images: Path) -> Path:
    """A run on one folder of 24 images, of which 6 are held out."""
    settings = {"data": str(images / "train"), "holdout": "25%", "batch": 6, "knn_every": 0}
    return train_here(with_settings(small, max_steps=3, **settings), "imagenet")


@pytest.fixture
def weights(run: Path, tmp_path: Path) -> Path:
    """The run's backbone in a file that says nothing of a run."""
    torch.save({"state_dict": load_pretrained(run).part("backbone")}, tmp_path / "some.pth")
    return tmp_path / "some.pth"


def test_evaluations_of_a_run_need_no_flag(
    run: Path, images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    left, held = parts(images / "train", "25%")
    train, val = open_subject(run, EvalConfig(workers=0), HERE).loaders()
    assert (train.names(), val.names()) == (left, held)
    records = [evaluate_knn(run, KNN, HERE), evaluate_linear(run, LINEAR, HERE)]
    tuning = FinetuneConfig(epochs=1, batch=6, workers=0, device="cpu")
    records.append(evaluate_finetuned(run, tuning, HERE))
    for record in records:
        assert (record.data.train, record.data.val, record.data.holdout) == (18, 6, "25%")
        assert '"holdout": "25%"' in record.identity
    assert {r.kind for r in read_records(run)} == {"knn", "linear", "finetune"}
    said = capfd.readouterr().err
    assert said.count("25% of each class of the training images held out for validation") == 3
    assert "was trained on images" not in said
    # Low-shot parts are of what is left, and cannot name a held-out image.
    record = evaluate_linear(run, replace(LINEAR, percent=50, batch=4), HERE)
    assert (record.data.train, record.data.val) == (9, 6)
    listed = tmp_path / "some.txt"
    listed.write_text("\n".join([left[0], held[0]]))
    with pytest.raises(DataError, match=f"not there in .*: {held[0]}"):
        evaluate_linear(run, replace(LINEAR, subset=str(listed)), HERE)


def test_a_file_takes_the_flag(weights: Path, images: Path, tmp_path: Path) -> None:
    config = replace(KNN, data=str(images / "train"), stem="cifar", crop=16, resize=16)
    with pytest.raises(NoSplitError, match=r"no val.beton; --holdout 10% holds out a share"):
        evaluate_knn(weights, config, HERE)
    json = weights.with_suffix(".json")
    own = evaluate_knn(weights, replace(config, holdout="25%", json=str(json)), HERE)
    assert (own.data.train, own.data.val) == (18, 6) and '"holdout": "25%"' in json.read_text()
    with pytest.raises(DataError, match="has validation images of its own"):
        evaluate_knn(weights, replace(config, data=str(images), holdout="25%"), HERE)
    # Images without labels have features.
    flat = str(images / "train" / "class0")
    how: dict[str, Any] = {"data": flat, "holdout": "25%", "stem": "cifar", "crop": 16}
    assert len(rows(weights, tmp_path / "f.npy", split="val", resize=16, **how)) == 2


@pytest.mark.parametrize(("held", "warned"), [("", True), ("15%", True), ("40%", False)])
def test_a_run_that_trained_on_held_out_images_says_so(
    held: str, warned: bool, small: TrainConfig, images: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A smaller holdout than the run's is part of it."""
    settings = {"data": str(images / "train"), "holdout": held, "knn_every": 0, "max_steps": 1}
    run = train_here(with_settings(small, **settings), "imagenet")
    record = evaluate_knn(run, replace(KNN, holdout="25%"), HERE)
    assert record.data.holdout == "25%"
    said = "was trained on images that are held out here" in capfd.readouterr().err
    assert said == warned


def test_other_data_than_the_runs(
    run: Path, images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Validation images go before the run's holdout; data that moved hold out the same.

    Their records have files of their own.
    """
    record = evaluate_knn(run, replace(KNN, data=str(images)), HERE)
    assert (record.data.train, record.data.val, record.data.holdout) == (24, 12, None)
    assert "holdout" not in record.identity
    said = f"the run's --holdout 25% does not apply: {images} is not the run's data"
    assert said in capfd.readouterr().err
    before = evaluate_knn(run, KNN, HERE)
    moved = Path(shutil.move(images / "train", tmp_path / "moved"))
    with pytest.raises(NoSplitError, match=r"--holdout 25% holds out a share"):
        evaluate_knn(run, replace(KNN, data=str(moved)), HERE)
    after = evaluate_knn(run, replace(KNN, data=str(moved), holdout="25%"), HERE)
    assert after.results == before.results
    assert (before.data.other_data, after.data.other_data) == (None, str(moved))
    assert after.path(run) != before.path(run)  # other images may have the same labels


def test_validation_images_that_came_later_go_before_the_runs_holdout(
    images: Path, small: TrainConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.move(images / "val", tmp_path / "val")
    later = train_here(with_settings(small, holdout="25%", batch=6, max_steps=1), "imagenet")
    with pytest.raises(NoSplitError, match=r"--holdout 10% holds out a share"):
        evaluate_knn(later, replace(KNN, holdout="0"), HERE)
    shutil.move(tmp_path / "val", images / "val")
    record = evaluate_knn(later, KNN, HERE)
    assert (record.data.train, record.data.val, record.data.holdout) == (24, 12, None)
    said = f"the run's --holdout 25% does not apply: {images} has validation images"
    assert said in capfd.readouterr().err


def rows(run: Path, out: Path, **settings: Any) -> list[dict[str, str]]:
    """Write features, and return the table beside them."""
    settings = {"workers": 0, "force": True} | settings
    write_features(run, FeaturesConfig(out=str(out), **settings), HERE)
    with out.with_name(f"{out.name}.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(np.load(out)) == len(table)
    return table


def test_features_are_of_every_image(
    run: Path, images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of the run's data with the split of each; of other data, which no holdout applies to."""
    left, held = parts(images / "train", "25%")
    table = rows(run, tmp_path / "f.npy")
    assert [row["name"] for row in table] == sorted(left + held)
    assert {row["name"] for row in table if row["split"] == "val"} == set(held)
    assert [row["class"] for row in table] == [row["name"].split("/")[0] for row in table]
    of_val = {row["row"] for row in table if row["split"] == "val"}
    every = np.load(tmp_path / "f.npy")
    assert [row["name"] for row in rows(run, tmp_path / "t.npy", split="train")] == left
    held_out = rows(run, tmp_path / "v.npy", split="val")
    assert [row["name"] for row in held_out] == held and held_out[0]["split"] == "val"
    np.testing.assert_allclose(
        np.load(tmp_path / "v.npy"), every[sorted(map(int, of_val))], rtol=1e-5, atol=1e-6
    )
    own = str(write_images(tmp_path / "own", each=5))
    capfd.readouterr()
    for settings, count in (({"holdout": "0"}, 24), ({"data": own}, 15)):
        table = rows(run, tmp_path / "f.npy", **settings)
        assert len(table) == count and "split" not in table[0]
        said = capfd.readouterr().err
        assert ("the run's --holdout 25% does not apply" in said) == ("data" in settings)
    table = rows(run, tmp_path / "f.npy", data=own, holdout="20%")
    assert sum(row["split"] == "val" for row in table) == 3 and len(table) == 15
