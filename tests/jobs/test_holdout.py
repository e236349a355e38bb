"""Evaluations of data without a validation split: a share of each class is held out for it."""

from __future__ import annotations

import csv
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastsiam.config import DataConfig, TrainConfig
from fastsiam.config.evaluate import (
    EvalConfig,
    FeaturesConfig,
    FinetuneConfig,
    KnnConfig,
    LinearConfig,
    NeighboursConfig,
)
from fastsiam.distributed import Place
from fastsiam.errors import DataError, NoSplitError
from fastsiam.evaluate.records import read_records
from fastsiam.interchange import load_pretrained
from fastsiam.jobs.evaluate import evaluate_finetuned, evaluate_knn, evaluate_linear
from fastsiam.jobs.features import draw_neighbours, write_features
from fastsiam.jobs.subject import open_subject
from fastsiam.jobs.train import train_here
from fastsiam.pipelines import open_split
from fastsiam.pipelines.remembered import names_of
from tests.configs import with_settings
from tests.conftest import write_images
from tests.processes import fastsiam

HERE = Place(0, 1, torch.device("cpu"))
KNN = KnnConfig(k="5", workers=0, device="cpu")
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


def names(root: Path) -> tuple[list[str], list[str]]:
    """Return the names of the images that are left, and of those held out."""
    data = DataConfig(data=str(root), holdout="25%")
    return names_of(open_split(data, "train")), names_of(open_split(data, "val"))


def test_evaluations_of_a_run_need_no_flag(
    run: Path, images: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    left, held = names(images / "train")
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
    assert said.count("validating on 25% of each class of the training images, held out") == 3
    assert "does not count" not in said and "was trained on images" not in said


def test_a_file_takes_the_flag(weights: Path, images: Path) -> None:
    config = replace(KNN, data=str(images / "train"), stem="cifar", crop=16, resize=16)
    with pytest.raises(NoSplitError, match=r"no val.beton; --holdout 10% holds out a share"):
        evaluate_knn(weights, config, HERE)
    json = weights.with_suffix(".json")
    own = evaluate_knn(weights, replace(config, holdout="25%", json=str(json)), HERE)
    assert (own.data.train, own.data.val) == (18, 6) and '"holdout": "25%"' in json.read_text()
    with pytest.raises(DataError, match="has validation images of its own"):
        evaluate_knn(weights, replace(config, data=str(images), holdout="25%"), HERE)


def test_a_run_that_trained_on_all_says_so(
    small: TrainConfig, images: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = train_here(with_settings(small, data=str(images / "train"), max_steps=1), "imagenet")
    record = evaluate_knn(run, replace(KNN, holdout="25%"), HERE)
    assert record.data.holdout == "25%"
    assert "was trained on images that are held out here, without labels" in capfd.readouterr().err


def test_validation_images_elsewhere_go_before_the_runs_holdout(
    run: Path, images: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record = evaluate_knn(run, replace(KNN, data=str(images)), HERE)
    assert (record.data.train, record.data.val, record.data.holdout) == (24, 12, None)
    assert "holdout" not in record.identity
    assert "the run's --holdout does not count" in capfd.readouterr().err
    with pytest.raises(DataError, match="leave --holdout out"):
        evaluate_knn(run, replace(KNN, data=str(images), holdout="25%"), HERE)


def test_a_run_whose_data_moved_holds_out_the_same(run: Path, images: Path, tmp_path: Path) -> None:
    before = evaluate_knn(run, KNN, HERE)
    shutil.move(images / "train", tmp_path / "moved")
    after = evaluate_knn(run, replace(KNN, data=str(tmp_path / "moved")), HERE)
    assert after.identity == before.identity and after.results == before.results


def test_low_shot_parts_are_of_what_is_left(run: Path, images: Path, tmp_path: Path) -> None:
    left, held = names(images / "train")
    record = evaluate_linear(run, replace(LINEAR, percent=50, batch=4), HERE)
    assert (record.data.train, record.data.val) == (9, 6)
    listed = tmp_path / "some.txt"
    listed.write_text("\n".join(left[::3]))
    record = evaluate_linear(run, replace(LINEAR, subset=str(listed), batch=4), HERE)
    assert (record.data.train, record.data.val) == (6, 6)
    listed.write_text("\n".join([left[0], held[0]]))
    with pytest.raises(DataError, match=f"not there in .*: {held[0]}"):
        evaluate_linear(run, replace(LINEAR, subset=str(listed)), HERE)


def test_features_and_neighbours_take_the_same_images(
    run: Path, images: Path, tmp_path: Path
) -> None:
    left, held = names(images / "train")
    out = tmp_path / "f.npy"
    for split, expected in (("train", left), ("val", held)):
        config = FeaturesConfig(out=str(out), split=split, workers=0, force=True)  # type: ignore[arg-type]
        write_features(run, config, HERE)
        with out.with_name("f.npy.csv").open() as file:
            assert [row["name"] for row in csv.DictReader(file)] == expected
    picture = draw_neighbours(run, NeighboursConfig(images=20, k=2, workers=0), HERE)
    many = draw_neighbours(run, NeighboursConfig(images=6, k=2, workers=0), HERE)
    assert picture.size == many.size  # six queries are held out, and no more


def test_images_without_labels(small: TrainConfig, weights: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "made")
    (tmp_path / "flat").mkdir()
    for path in (tmp_path / "made").rglob("*.jpg"):
        path.rename(tmp_path / "flat" / f"{path.parent.name}{path.name}")
    how = {"data": str(tmp_path / "flat"), "holdout": "25%", "stem": "cifar", "workers": 0}
    with pytest.raises(DataError, match="has no labels, which this evaluation needs"):
        evaluate_knn(weights, KnnConfig(crop=16, resize=16, **how), HERE)  # type: ignore[arg-type]
    out = tmp_path / "f.npy"
    own = FeaturesConfig(out=str(out), split="val", crop=16, resize=16, **how)  # type: ignore[arg-type]
    write_features(weights, own, HERE)
    assert len(out.with_name("f.npy.csv").read_text().splitlines()) == 7


def test_the_commands_take_it(run: Path, weights: Path, images: Path) -> None:
    fastsiam("eval", "knn", str(run), "--k", "5", "--workers", "0", "--device", "cpu")
    flags = ["--data", str(images / "train"), "--stem", "cifar", "--crop", "16", "--k", "5"]
    flags += ["--resize", "16", "--workers", "0", "--device", "cpu", "--gpus", "1"]
    fastsiam("eval", "knn", str(weights), *flags, "--holdout", "25%")
    wrong = fastsiam("eval", "knn", str(weights), *flags, "--holdout", "25", code=2).stderr
    assert "such as 10%" in wrong
    refused = fastsiam("eval", "knn", str(weights), *flags, code=1).stderr
    assert "--holdout 10% holds out a share of each class instead" in refused
