"""Runs that meet a bad image either stop and save, or replace it with another image."""

from __future__ import annotations

import csv
import json
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from fastsiam.bad_image_list import FILE, read_bad_images
from fastsiam.config import TrainConfig
from fastsiam.config.evaluate import FeaturesConfig, KnnConfig, LinearConfig
from fastsiam.errors import DataError, ImageError
from fastsiam.evaluate.command import evaluate_knn, evaluate_linear
from fastsiam.evaluate.feature_files import write_features
from fastsiam.pipelines.bad_images import BadImages
from fastsiam.report.run_report import write_report
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from tests.configs import flags, with_settings
from tests.conftest import write_data
from tests.pipelines.cases import WITH_IMAGES, change_image, make_readable
from tests.processes import fastsiam
from tests.ranks import fastsiam_on_ranks
from tests.train.runs import CPU, Killed, assert_same_runs, train_run, train_until_kill, verify_run

BAD_NAMES = ("class0/003.jpg", "class1/004.jpg")


def corrupt_images(images: Path) -> None:
    """Truncate one image and empty another; ``write_data`` repairs them."""
    for name, length in zip(BAD_NAMES, (400, 0), strict=True):
        os.truncate(images / "train" / name, length)


@pytest.fixture
def config(small: TrainConfig) -> TrainConfig:
    """A run of four epochs with three steps each that replaces bad images."""
    return with_settings(small, pipeline="torchvision", bad_images="replace", knn_every=0)


def test_bad_images_are_replaced_and_recorded(
    config: TrainConfig, images: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Later runs keep using the list, even if the files are repaired. `verify` needs it."""
    corrupt_images(images)
    run = train_run(config)
    assert checkpoints.load(run).step == 12
    entries = [json.loads(line) for line in (run / FILE).read_text().splitlines()]
    assert sorted(bad["name"] for bad in entries) == sorted(BAD_NAMES)
    assert all(bad["reason"] and bad["epoch"] == bad["step"] // 3 == 0 for bad in entries)
    for bad in entries:
        line = (
            f"bad image {bad['index']} ({bad['name']}): {bad['reason']}; another image replaces it"
        )
        assert caplog.messages.count(line) == 1
    assert len(read_bad_images(train_run(config))) == 2
    write_data(images)
    assert "12 log lines agree" in verify_run(run)
    (run / FILE).unlink()
    fastsiam("verify", str(run), code=1)


def test_control_characters_of_bad_image_name_are_escaped(
    config: TrainConfig, images: Path
) -> None:
    (images / "train" / "class0" / "0\n\x1b[1m.jpg").write_bytes(b"")
    stderr = fastsiam("train", *flags(config)).stderr
    assert r"(class0/0\n\x1b[1m.jpg): it is empty; another image" in stderr
    assert "\x1b" not in stderr


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_run_with_bad_images_resumes_bit_for_bit(
    name: str, config: TrainConfig, images: Path, tmp_path: Path
) -> None:
    """The result is bitwise equal, even if the files are repaired before the run resumes."""
    data = make_readable(name, images)
    if name == "ffcv":
        for index in (3, 12):
            change_image(name, images, index, lambda content: b"\xff" * len(content))
    else:
        corrupt_images(images)
    config = with_settings(config, pipeline=name, data=data, save_every=1)
    reference = train_run(config, out=tmp_path / "whole")
    run = train_until_kill(config, 5)
    write_data(images)
    assert_same_runs(train_run(config), reference)
    assert [entry.index for entry in read_bad_images(run)] == [
        entry.index for entry in read_bad_images(reference)
    ]


def test_run_stopped_by_bad_image_resumes_with_replacement(
    config: TrainConfig, images: Path, tmp_path: Path
) -> None:
    """The result equals that of a run that replaced bad images from the start."""
    corrupt_images(images)
    reference = train_run(config, out=tmp_path / "whole")
    with pytest.raises(ImageError) as error:
        train_run(config, bad_images="stop")
    (note,) = error.value.__notes__
    assert re.fullmatch(
        r"saved .*last\.pt at step \d+; pass "
        r"--bad-images replace to continue with another image in its place",
        note,
    )
    assert error.value.name in BAD_NAMES and error.value.name in str(error.value)
    assert not (Path(config.run.out) / FILE).exists()
    assert_same_runs(train_run(config), reference)


def test_run_with_too_many_bad_images_saves_and_ends(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On several ranks, a save can find that they have too many together."""
    too_many = DataError("too many bad images")
    monkeypatch.setattr(BadImages, "share", Mock(side_effect=[None, *[too_many] * 3]))
    with pytest.raises(DataError, match="too many bad images") as caught:
        train_run(config, save_every=2)
    state = checkpoints.load(Path(config.run.out))
    assert state.step == 2 and "last.pt at step 2" in caught.value.__notes__[0]


def test_ranks_with_too_many_bad_images_save_and_end(config: TrainConfig, images: Path) -> None:
    """Each rank finds up to eight, which is the limit; they exchange them after the first epoch."""
    for name in sorted((images / "train").glob("class?/00[0-3].jpg"))[:10]:
        name.write_bytes(b"")
    results = fastsiam_on_ranks(2, "train", *flags(config), code=1)
    assert checkpoints.load(Path(config.run.out)).step == 3
    for result in results:
        assert "10 of 24 images cannot be decoded" in result.stderr
        assert "last.pt at step 3)" in result.stderr


def test_branch_copies_bad_image_list(config: TrainConfig, images: Path, tmp_path: Path) -> None:
    """A branch that was killed at its first checkpoint already has its own copy of the list."""
    corrupt_images(images)
    run, save = train_run(config, max_steps=4), checkpoints.save

    def save_and_end(*content: Any) -> None:
        save(*content)
        raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(checkpoints, "save", save_and_end)
        train_run(config, resume=run, out=tmp_path / "branch")
    branch = train_run(config, resume=run, out=tmp_path / "branch", max_steps=5)
    assert read_bad_images(branch) == read_bad_images(run)
    checkpoints.last(run).unlink()
    write_data(images)
    assert read_bad_images(train_run(config, max_steps=4)) == []


def test_evaluations_skip_and_report_lists_bad_images(
    config: TrainConfig, images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bad images are skipped in the validation set too, and features have no rows for them."""
    corrupt_images(images)
    (images / "val" / "class0" / "001.jpg").write_bytes(b"")
    run = train_run(config, epochs=2, knn_every=1)
    assert [line["bank"] for line in read_metrics(run) if line["kind"] == "knn"] == [22] * 3
    assert evaluate_knn(run, KnnConfig(workers=0), CPU).results[0]["bank"] == 22
    assert any(f"2 bad images of {images / 'train'} are" in m for m in caplog.messages)
    for cached in (True, False):
        linear = LinearConfig(workers=0, cached=cached, epochs=1, batch=8, lrs=(0.1,))
        assert evaluate_linear(run, linear, CPU).best["top1"] >= 0
    with pytest.raises(ImageError, match=r"class0/001\.jpg: it is empty"):
        evaluate_knn(run, KnnConfig(workers=0, bad_images="stop"), CPU)

    out = str(tmp_path / "of.npy")
    features = FeaturesConfig(workers=0, split="train", out=out, feature_batch=4)
    array, names = write_features(run, features, CPU)[:2]
    with names.open() as file:
        table = list(csv.DictReader(file))
    assert np.load(array).shape[0] == len(table) == 22
    assert all(row["name"].split("/")[0] == row["class"] for row in table)
    assert not {row["name"] for row in table} & set(BAD_NAMES)

    page = write_report([run], run / "report.html").read_text()
    assert "<h2>Bad images</h2>" in page and "Each of these 2 images was replaced" in page
    for entry in read_bad_images(run):
        assert f"<td>{entry.name}</td><td>{entry.reason}</td>" in page
    (run / FILE).unlink()
    assert "Bad images" not in write_report([run], run / "report.html").read_text()
