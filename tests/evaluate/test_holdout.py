"""Evaluations on data without a validation split, which hold out a share of each class."""

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
from fastsiam.config.evaluate import FeaturesConfig, FinetuneConfig, KnnConfig, LinearConfig
from fastsiam.errors import DataError, NoSplitError
from fastsiam.evaluate.command import evaluate_finetuned, evaluate_knn, evaluate_linear
from fastsiam.evaluate.feature_files import write_features
from fastsiam.evaluate.subject import open_subject
from fastsiam.interchange import load_pretrained
from fastsiam.run.records import read_records
from tests.configs import with_settings
from tests.conftest import write_images
from tests.interchange.networks import saved_run
from tests.pipelines.cases import split_names
from tests.train.runs import CPU as HERE

KNN = KnnConfig(k=(5,), workers=0, device="cpu")
LINEAR = LinearConfig(epochs=2, batch=6, workers=0, device="cpu", cached=True)


def run_on(data: Path, small: TrainConfig, holdout: str = "25%") -> Path:
    """Write a run trained with ``--holdout``."""
    config = with_settings(small, data=str(data), holdout=holdout)
    saved_run(Path(small.run.out), small.model, config=config)
    return Path(small.run.out)


@pytest.fixture
def run(small: TrainConfig, images: Path) -> Path:
    """A run on one folder of 24 images, 6 of them held out."""
    return run_on(images / "train", small)


def test_evaluations_use_holdout_of_run(
    run: Path, images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    left, held_out = split_names(images / "train", "25%")
    train, val = open_subject(run, KNN, HERE).loaders()
    assert (train.names(), val.names()) == (left, held_out)
    records = [evaluate_knn(run, KNN, HERE), evaluate_linear(run, LINEAR, HERE)]
    tuning = FinetuneConfig(epochs=1, batch=6, workers=0, device="cpu")
    records.append(evaluate_finetuned(run, tuning, HERE))
    for record in records:
        assert (record.data.train, record.data.val, record.data.holdout) == (18, 6, "25%")
        assert '"holdout": "25%"' in record.identity
    assert {r.kind for r in read_records(run)} == {"knn", "linear", "finetune"}
    stderr = capfd.readouterr().err
    assert stderr.count("25% of each class of the training images held out for validation") == 3
    # Low-shot subsets are taken from the remaining images; held-out images cannot be listed.
    record = evaluate_linear(run, replace(LINEAR, percent=50, batch=4), HERE)
    assert (record.data.train, record.data.val) == (9, 6)
    listed = tmp_path / "some.txt"
    listed.write_text("\n".join([left[0], held_out[0]]))
    with pytest.raises(DataError, match=f"missing from .*: {held_out[0]}"):
        evaluate_linear(run, replace(LINEAR, subset=str(listed)), HERE)


def test_holdout_option_applies_to_weights_file(
    run: Path, images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    weights, json = tmp_path / "some.pth", tmp_path / "some.json"
    torch.save({"state_dict": load_pretrained(run).part("backbone")}, weights)
    config = replace(KNN, data=str(images / "train"), stem="cifar", crop=16, resize=16)
    with pytest.raises(NoSplitError, match=r"no val.beton; --holdout 10% holds out a share"):
        evaluate_knn(weights, config, HERE)
    record = evaluate_knn(weights, replace(config, holdout="25%", json=str(json)), HERE)
    assert "crop, mean and std are assumed unless given (--crop" in capfd.readouterr().err
    assert (record.data.train, record.data.val) == (
        18,
        6,
    ) and '"holdout": "25%"' in json.read_text()
    with pytest.raises(DataError, match="already has validation images"):
        evaluate_knn(weights, replace(config, data=str(images), holdout="25%"), HERE)
    # Features do not need labels.
    flat = str(images / "train" / "class0")
    settings: dict[str, Any] = {"data": flat, "holdout": "25%", "stem": "cifar", "crop": 16}
    assert len(rows(weights, tmp_path / "f.npy", split="val", resize=16, **settings)) == 2


def test_training_on_holdout_images_causes_warning(
    small: TrainConfig, images: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """There is no warning if the holdout is a subset of the run's."""
    for holdout, expected in (("", True), ("15%", True), ("25%", False), ("40%", False)):
        run = run_on(images / "train", small, holdout)
        open_subject(run, replace(KNN, holdout="25%"), HERE).print_summary()
        warns = "was trained on images that are held out here" in capfd.readouterr().err
        assert warns == expected


def test_holdout_of_run_does_not_apply_to_other_data(
    run: Path, images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A validation split is preferred to the run's holdout; moved data hold out the same images.

    Records for moved data get their own files.
    """
    record = evaluate_knn(run, replace(KNN, data=str(images)), HERE)
    assert (record.data.train, record.data.val, record.data.holdout) == (24, 12, None)
    assert '"holdout"' not in record.identity
    message = f"the run's --holdout 25% does not apply: {images} is not the run's data"
    assert message in capfd.readouterr().err
    before = evaluate_knn(run, KNN, HERE)
    moved = Path(shutil.move(images / "train", tmp_path / "moved"))
    with pytest.raises(NoSplitError, match=r"--holdout 25% holds out a share"):
        evaluate_knn(run, replace(KNN, data=str(moved)), HERE)
    after = evaluate_knn(run, replace(KNN, data=str(moved), holdout="25%"), HERE)
    assert after.results == before.results
    assert (before.data.other_data, after.data.other_data) == (None, str(moved))
    assert after.path(run) != before.path(run)  # other images may have the same labels


def test_validation_split_replaces_holdout_of_run(
    images: Path, small: TrainConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.move(images / "val", tmp_path / "val")
    later = run_on(images, small)
    with pytest.raises(NoSplitError, match=r"--holdout 10% holds out a share"):
        open_subject(later, replace(KNN, holdout="0"), HERE).loaders()
    shutil.move(tmp_path / "val", images / "val")
    record = evaluate_knn(later, KNN, HERE)
    assert (record.data.train, record.data.val, record.data.holdout) == (24, 12, None)
    message = f"the run's --holdout 25% does not apply: {images} has validation images"
    assert message in capfd.readouterr().err


def rows(run: Path, out: Path, **settings: Any) -> list[dict[str, str]]:
    """Write features and return the rows of their CSV table."""
    settings = {"workers": 0, "force": True} | settings
    write_features(run, FeaturesConfig(out=str(out), **settings), HERE)
    with out.with_name(f"{out.name}.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(np.load(out)) == len(table)
    return table


def test_features_cover_every_image(run: Path, images: Path, tmp_path: Path) -> None:
    """The run's data are listed with each image's split; other data have no holdout."""
    left, held_out_names = split_names(images / "train", "25%")
    table = rows(run, tmp_path / "f.npy")
    assert [row["name"] for row in table] == sorted(left + held_out_names)
    of_val = [row["name"] for row in table if row["split"] == "val"]
    assert sorted(of_val) == sorted(held_out_names)
    assert [row["class"] for row in table] == [row["name"].split("/")[0] for row in table]
    assert [row["name"] for row in rows(run, tmp_path / "t.npy", split="train")] == left
    held_out_rows = rows(run, tmp_path / "v.npy", split="val")
    assert [row["name"] for row in held_out_rows] == held_out_names and held_out_rows[0][
        "split"
    ] == "val"
    every = np.load(tmp_path / "f.npy")[[row["split"] == "val" for row in table]]
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), every, rtol=1e-5, atol=1e-6)
    other_data = str(write_images(tmp_path / "own", each=5))
    for settings, count in (({"holdout": "0"}, 24), ({"data": other_data}, 15)):
        table = rows(run, tmp_path / "f.npy", **settings)
        assert len(table) == count and "split" not in table[0]
    table = rows(run, tmp_path / "f.npy", data=other_data, holdout="20%")
    assert sum(row["split"] == "val" for row in table) == 3 and len(table) == 15
