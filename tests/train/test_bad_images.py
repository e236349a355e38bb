"""Runs that meet a bad image: they stop with all that was done, or continue with another one."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow import parquet as pq

from fastsiam.bad_image_list import FILE, read_bad_images
from fastsiam.config import TrainConfig
from fastsiam.config.evaluate import FeaturesConfig, KnnConfig, LinearConfig
from fastsiam.distributed import Place
from fastsiam.errors import CheckpointError, DataError, ImageError
from fastsiam.evaluate.command import evaluate_knn, evaluate_linear
from fastsiam.evaluate.feature_files import write_features
from fastsiam.evaluate.labelled import LabelledImages, cached_features
from fastsiam.evaluate.subject import open_subject
from fastsiam.pipelines import build_loader
from fastsiam.report.run import write_report
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from fastsiam.train import command as job
from fastsiam.train.command import train_here
from fastsiam.views.batch import Batch
from tests.configs import flags, with_settings
from tests.pipelines.cases import WITH_IMAGES, readable
from tests.processes import fastsiam
from tests.ranks import fastsiam_on_ranks
from tests.train.runs import Killed, Wrapped, same_state

BAD = ("class0/003.jpg", "class1/004.jpg")


def damage(images: Path) -> None:
    """Cut one image off, and make another empty."""
    one, other = (images / "train" / name for name in BAD)
    one.write_bytes(one.read_bytes()[:400])
    other.write_bytes(b"")


@pytest.fixture
def config(small: TrainConfig) -> TrainConfig:
    """A run of four epochs of three steps that replaces bad images."""
    return with_settings(small, pipeline="torchvision", bad_images="replace", knn_every=0)


@pytest.fixture
def killed_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[TrainConfig, int], None]]:
    """Train, and be killed before a step."""
    real = build_loader

    def run(config: TrainConfig, last: int) -> None:
        def kill(step: int, batch: Batch) -> None:
            if step == last:
                raise Killed

        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(job, "build_loader", lambda *a, **k: Wrapped(real(*a, **k), kill))
            train_here(config, "imagenet")

    yield run


def outcome(config: TrainConfig) -> tuple[dict[str, torch.Tensor], list[object]]:
    run = train_here(config, "imagenet")
    lines = [(line["step"], line["loss"]) for line in read_metrics(run) if line["kind"] == "train"]
    return checkpoints.load(run).model, [*lines, [own.index for own in read_bad_images(run)]]


def assert_same(one: tuple[object, object], other: tuple[object, object]) -> None:
    assert same_state(one[0], other[0]) and one[1] == other[1]


def test_the_run_goes_on_and_remembers(
    config: TrainConfig, images: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(images)
    run = train_here(config, "imagenet")
    assert checkpoints.load(run).step == 12
    found = [json.loads(line) for line in (run / FILE).read_text().splitlines()]
    assert sorted(own["name"] for own in found) == sorted(BAD)
    assert all(own["reason"] and own["epoch"] == own["step"] // 3 == 0 for own in found)
    for own in found:
        line = (
            f"bad image {own['index']} ({own['name']}): {own['reason']}; another one is shown in "
            "its place"
        )
        assert caplog.messages.count(line) == 1
    again = train_here(with_settings(config, epochs=4), "imagenet")
    assert len(read_bad_images(again)) == 2


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_resumed_from_the_midst_of_an_epoch_it_is_the_same_run(
    name: str, config: TrainConfig, images: Path, tmp_path: Path,
    killed_at: Callable[[TrainConfig, int], None],
) -> None:  # fmt: skip
    """Bit for bit, also when somebody repaired the files meanwhile."""
    if name == "ffcv":
        data = readable(name, images)
        damage_in(data / "train.beton")
    else:
        data = images
    files = [data / "train.beton"] if name == "ffcv" else [images / "train" / n for n in BAD]
    good = {} if name == "ffcv" else {file: file.read_bytes() for file in files}
    if name != "ffcv":
        damage(images)
    config = with_settings(config, pipeline=name, data=str(data), save_every=1)
    whole = outcome(with_settings(config, out=str(tmp_path / "whole")))
    killed_at(config, 5)
    for file, content in good.items():
        file.write_bytes(content)
    assert_same(outcome(config), whole)


def damage_in(beton: Path) -> None:
    from fastsiam.pipelines import open_store
    from fastsiam.pipelines.store import BetonStore

    store = open_store(beton, "train")
    assert isinstance(store, BetonStore)
    with beton.open("r+b") as file:
        for index in (3, 12):
            file.seek(int(store.start[index]))
            file.write(b"\xff" * int(store.size[index]))


def test_stopped_by_one_it_goes_on_with_another_in_its_place(
    config: TrainConfig, images: Path, tmp_path: Path
) -> None:
    """As the message says; the result is that of a run that replaced from the start."""
    damage(images)
    whole = outcome(with_settings(config, out=str(tmp_path / "whole")))
    with pytest.raises(ImageError) as error:
        train_here(with_settings(config, bad_images="stop"), "imagenet")
    (note,) = error.value.__notes__
    assert re.fullmatch(
        r"saved .*last\.pt at step \d+; "
        r"--bad-images replace continues with another image in its place",
        note,
    )
    assert error.value.name in BAD and error.value.name in str(error.value)
    assert not (Path(config.run.out) / FILE).exists()
    assert_same(outcome(config), whole)


def test_where_nothing_can_be_saved_the_image_is_still_named(
    config: TrainConfig, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_settings(config, bad_images="stop")
    damage(images)

    def full(*_: object, **__: object) -> None:
        raise CheckpointError("cannot save last.pt: the disk is full")

    monkeypatch.setattr(checkpoints, "save", full)
    with pytest.raises(ImageError) as error:
        train_here(config, "imagenet")
    (note,) = error.value.__notes__
    assert re.fullmatch(
        r"step \d+ could not be saved: cannot save last\.pt: the disk is full", note
    )


def test_what_is_in_the_list_stays_replaced_when_others_stop_the_run(
    config: TrainConfig, images: Path
) -> None:
    damage(images)
    train_here(with_settings(config, max_steps=4), "imagenet")
    train_here(with_settings(config, max_steps=8, bad_images="stop"), "imagenet")
    (images / "train" / "class2" / "001.jpg").write_bytes(b"")
    with pytest.raises(ImageError, match=r"class2/001\.jpg: it is empty"):
        train_here(with_settings(config, bad_images="stop"), "imagenet")


def test_a_branch_takes_the_list_along_and_a_new_run_none(
    config: TrainConfig, images: Path, tmp_path: Path
) -> None:
    damage(images)
    run = train_here(with_settings(config, max_steps=4), "imagenet")
    branch = with_settings(config, resume=str(run), out=str(tmp_path / "branch"), max_steps=5)
    assert read_bad_images(train_here(branch, "imagenet")) == read_bad_images(run)
    (run / "checkpoints" / "last.pt").unlink()
    for name in BAD:
        (images / "train" / name).write_bytes((images / "train/class2/000.jpg").read_bytes())
    assert read_bad_images(train_here(with_settings(config, max_steps=4), "imagenet")) == []


def test_too_many_are_one_line(config: TrainConfig, images: Path) -> None:
    for number in range(8):
        for kind in (0, 1):
            (images / "train" / f"class{kind}" / f"{number:03d}.jpg").write_bytes(b"no image")
    said = fastsiam("train", *flags(config), code=1).stderr
    assert len(re.findall("error: ", said)) == 1 and "Traceback" not in said
    assert len(re.findall(r"^bad image \d+ \(", said, re.MULTILINE)) == 8, said
    assert re.search(r"error: 9 of 24 images cannot be decoded, .*check what is wrong", said)
    with pytest.raises(DataError):
        train_here(config, "imagenet")


@pytest.fixture
def damaged_run(config: TrainConfig, images: Path) -> Path:
    """A run of two epochs on damaged images, in which a validation image is damaged too."""
    damage(images)
    (images / "val" / "class0" / "001.jpg").write_bytes(b"")
    return train_here(with_settings(config, epochs=2, knn_every=1), "imagenet")


def test_evaluations_leave_them_out(
    damaged_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(0, 1, torch.device("cpu"))
    knn = [line for line in read_metrics(damaged_run) if line["kind"] == "knn"]
    assert [line["bank"] for line in knn] == [22] * 3
    assert evaluate_knn(damaged_run, KnnConfig(workers=0), place).results[0]["bank"] == 22
    assert any(f"2 bad images of {tmp_path / 'data' / 'train'} are" in m for m in caplog.messages)
    for cached in (True, False):
        config = LinearConfig(workers=0, cached=cached, epochs=1, batch=8, lrs="0.1")
        linear = evaluate_linear(damaged_run, config, place)
        assert linear.best["top1"] >= 0
    with pytest.raises(ImageError, match=r"class0/001\.jpg: it is empty"):
        evaluate_knn(damaged_run, KnnConfig(workers=0, bad_images="stop"), place)


def test_cached_features_are_those_of_the_good_images(damaged_run: Path) -> None:
    place = Place(0, 1, torch.device("cpu"))
    config = LinearConfig(workers=0, cached=True, epochs=1, batch=8, lrs="0.1")
    images = LabelledImages(open_subject(damaged_run, config, place), config)
    batches = cached_features(images, torch.float32)
    good = {
        row.numpy().tobytes(): int(label)
        for features, labels in images.subject.extract(images.train, "image")
        for row, label in zip(features, labels, strict=True)
    }
    assert len(good) == 22
    seen = [
        (row.numpy().tobytes(), int(label))
        for features, labels in batches(0)
        for row, label in zip(features, labels, strict=True)
    ]
    assert len(seen) == 24 and dict(seen) == good


def test_features_have_no_row_of_them(damaged_run: Path, tmp_path: Path) -> None:
    place = Place(0, 1, torch.device("cpu"))
    paths = []
    for name in ("of.npy", "of.parquet"):
        out = str(tmp_path / name)
        config = FeaturesConfig(workers=0, split="train", out=out, feature_batch=4)
        paths += write_features(damaged_run, config, place)
    array = np.load(paths[0])
    with paths[1].open() as file:
        table = list(csv.DictReader(file))
    assert array.shape[0] == len(table) == 22
    assert [int(row["row"]) for row in table] == list(range(22))
    assert {row["name"].split("/")[0] == row["class"] for row in table} == {True}
    assert not {row["name"] for row in table} & set(BAD)
    parquet = pq.read_table(paths[2])
    assert parquet.column("name").to_pylist() == [row["name"] for row in table]
    assert np.array_equal(np.stack(parquet.column("feature").to_pylist()), array)


def test_the_report_lists_them(damaged_run: Path) -> None:
    page = write_report([damaged_run], damaged_run / "report.html").read_text()
    assert "<h2>Bad images</h2>" in page and "Each of these 2 was replaced" in page
    for own in read_bad_images(damaged_run):
        assert f"<td>{own.name}</td><td>{own.reason}</td>" in page
    (damaged_run / FILE).unlink()
    page = write_report([damaged_run], damaged_run / "report.html").read_text()
    assert "Bad images" not in page


def test_two_ranks_save_together_before_they_stop(
    config: TrainConfig, images: Path, tmp_path: Path
) -> None:
    """Only one of them meets the image; one process continues with another in its place."""
    damage(images)
    stopping = with_settings(config, gpus=2, bad_images="stop")
    done = fastsiam_on_ranks(2, "train", *flags(stopping), code=1)
    said = "".join(one.stderr for one in done)
    errors = [line for line in said.splitlines() if "cannot decode" in line]
    assert len(errors) == 1 and re.search(r"/(class0/003|class1/004)\.jpg: ", errors[0])
    assert "Traceback" not in said
    (saved,) = re.findall(r"saved .*last\.pt at step (\d+); --bad-images replace", said)
    run = Path(config.run.out)
    assert checkpoints.load(run).step == int(saved)
    train_here(config, "imagenet")
    alone = train_here(with_settings(config, out=str(tmp_path / "alone")), "imagenet")
    assert read_bad_images(run) == read_bad_images(alone)


@pytest.mark.slow
def test_on_two_ranks_it_is_the_same_run(config: TrainConfig, images: Path, tmp_path: Path) -> None:
    """Whichever rank meets an image, and whether it stops the run for a while."""
    damage(images)
    two = with_settings(config, gpus=2, save_every=2)
    whole, run = tmp_path / "whole", Path(config.run.out)
    fastsiam_on_ranks(2, "train", *flags(with_settings(two, out=str(whole))))
    fastsiam_on_ranks(2, "train", *flags(with_settings(two, bad_images="stop")), code=1)
    fastsiam_on_ranks(2, "train", *flags(two))
    assert same_state(checkpoints.load(run).model, checkpoints.load(whole).model)
    alone = train_here(with_settings(config, out=str(tmp_path / "alone")), "imagenet")
    assert read_bad_images(run) == read_bad_images(whole) == read_bad_images(alone)


def test_its_digests_are_found_again(config: TrainConfig, images: Path) -> None:
    """Also by another pipeline, and where the files are repaired by now."""
    good = {name: (images / "train" / name).read_bytes() for name in BAD}
    damage(images)
    run = train_here(with_settings(config, epochs=2), "imagenet")
    for name, content in good.items():
        (images / "train" / name).write_bytes(content)
    fastsiam("verify", str(run))
    (run / FILE).unlink()
    fastsiam("verify", str(run), code=1)
