"""Runs whose data moved, changed, or are held out in part: which images they train on."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fastsiam.config import ConvertConfig, TrainConfig
from fastsiam.errors import CheckpointError, DataError
from fastsiam.pipelines import build_loader, open_store
from fastsiam.pipelines.convert.command import convert_data
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from fastsiam.train import command as job
from fastsiam.train.command import train_here
from fastsiam.train.image_list import ImageList, names_of
from fastsiam.views.batch import Batch
from tests.configs import flags, with_settings
from tests.processes import fastsiam
from tests.sources import folder_members, tar
from tests.train.runs import Wrapped

Seen = dict[int, Batch]
"""The batches that a run was trained on, by step."""
NAME, LOST = "class1/001.jpg", 9
"""Name and place of an image that is lost."""


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Callable[[TrainConfig], Seen]:
    """Train, and return the batches."""
    real = build_loader

    def run(config: TrainConfig) -> Seen:
        seen: Seen = {}
        note = seen.__setitem__
        monkeypatch.setattr(job, "build_loader", lambda *a, **k: Wrapped(real(*a, **k), note))
        train_here(config, "imagenet")
        return seen

    return run


def test_data_that_changed_are_refused(small: TrainConfig, images: Path, tmp_path: Path) -> None:
    """By a run that resumes, its branches, and those of a checkpoint that was copied elsewhere."""
    run = train_here(with_settings(small, max_steps=2), "imagenet")
    kept = shutil.copy(checkpoints.last(run), run / "kept.pt")
    before = {path: path.read_bytes() for path in run.glob("*.*")}
    (images / "train" / NAME).rename(images / "train" / "class1" / "other.jpg")
    for path in ("auto", run, kept):
        out = run if path == "auto" else tmp_path / "branch"
        with pytest.raises(CheckpointError) as refused:
            train_here(with_settings(small, resume=str(path), out=str(out)), "imagenet")
        assert str(refused.value) == (
            f"the data changed since the run started: 1 of 24 images missing ({NAME}), 1 new "
            "(class1/other.jpg); restore the data, pass --data-changed accept to continue with the "
            "present images, or choose another --out for a new run"
        )
    assert before == {path: path.read_bytes() for path in run.glob("*.*")}


def test_a_run_continues_with_the_images_that_are_left(
    small: TrainConfig, images: Path, tmp_path: Path, batches: Callable[..., Seen],
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Other images stay at their steps, and the consent holds for one change; also as in 0.2."""
    config = with_settings(small, knn_every=0)
    whole = batches(with_settings(config, out=str(tmp_path / "whole")))
    run = tmp_path / "run"
    batches(with_settings(config, max_steps=2))
    (images / "train" / NAME).unlink()
    (images / "train" / "class1" / "new.jpg").write_bytes(
        (images / "train" / "class0" / "000.jpg").read_bytes()
    )
    seen = batches(with_settings(config, max_steps=4, data_changed="accept"))
    assert "(accepted); each missing image is replaced by the next" in capfd.readouterr().err
    assert checkpoints.load(run).config.run.data_changed == "refuse"
    # The fingerprint that version 0.2 wrote, computed from the present names.
    names = sorted(names_of(open_store(images, "train")))
    text = hashlib.blake2b("\0".join(names).encode(), digest_size=16).hexdigest()
    listed = ImageList.load(run)
    assert listed and listed.accepted == text and NAME in listed.names
    seen |= batches(config)
    assert sorted(seen) == list(range(2, 12))
    for step, batch in seen.items():
        assert torch.equal(batch.index, whole[step].index)
        others = batch.index != LOST
        assert torch.equal(batch.view1[others], whole[step].view1[others])
        assert not (batch.view1[~others] == whole[step].view1[~others]).flatten(1).all(1).any()
    assert any(LOST in batch.index for batch in seen.values())
    shutil.rmtree(images / "train" / "class2")
    with pytest.raises(CheckpointError, match="9 of 24 images missing"):
        batches(with_settings(config, max_steps=12))


def test_another_container_is_no_change(
    small: TrainConfig, images: Path, tmp_path: Path, batches: Callable[..., Seen]
) -> None:
    """A folder moved, converted and packed while the run is under way."""
    config = with_settings(small, knn_every=0)
    whole = batches(with_settings(config, out=str(tmp_path / "whole")))
    shutil.copytree(images, tmp_path / "moved")
    convert_data("folder", ConvertConfig(source=str(images), out=str(tmp_path / "converted")))
    packed = tar(tmp_path / "photos.tar", folder_members(images / "train"))
    shuffled = tar(tmp_path / "other.tar", folder_members(images / "train")[::-1])
    places = (images, tmp_path / "moved", tmp_path / "converted", packed, shuffled, images)
    for number, place in enumerate(places):
        stop = with_settings(config, data=str(place), max_steps=2 * (number + 1))
        for step, batch in batches(stop).items():
            assert torch.equal(batch.view1, whole[step].view1), place


def test_names_of_another_kind_are_taken_for_the_same_images_if_there_are_as_many(
    small: TrainConfig, images: Path, tmp_path: Path, batches: Callable[..., Seen],
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Shards number their images, which a folder names: nothing but the count can be compared."""
    config = with_settings(small, knn_every=0)
    whole = batches(with_settings(config, out=str(tmp_path / "whole")))
    batches(with_settings(config, max_steps=5))
    members = [(f"{i:05d}.jpg", data) for i, (_, data) in enumerate(
        folder_members(images / "train"))]  # fmt: skip
    shards = tar(tmp_path / "shards.tar", members)
    for step, batch in batches(with_settings(config, data=str(shards), max_steps=8)).items():
        assert torch.equal(batch.view1, whole[step].view1)
    assert "all images have other names than" in capfd.readouterr().err
    tar(shards, members[:-1])
    with pytest.raises(CheckpointError, match=r"24 of 24 images missing .*, 23 new"):
        batches(with_settings(config, data=str(shards)))


def test_a_run_from_before_there_were_lists(small: TrainConfig, images: Path) -> None:
    run = train_here(with_settings(small, max_steps=2), "imagenet")
    (run / "images.npz").unlink()
    kept = (images / "train" / NAME).read_bytes()
    (images / "train" / NAME).unlink()
    with pytest.raises(CheckpointError, match=r"23 images now, 24 when"):
        train_here(small, "imagenet")
    assert not (run / "images.npz").exists()
    (images / "train" / NAME).write_bytes(kept)
    train_here(with_settings(small, max_steps=4), "imagenet")  # from here on it has one
    assert ImageList.load(run) == ImageList(tuple(names_of(open_store(images, "train"))))


@pytest.fixture
def photos(small: TrainConfig, images: Path) -> TrainConfig:
    """A run on one folder of 3 classes of 8 images, two of each held out."""
    return with_settings(small, data=str(images / "train"), holdout="25%", batch=6)


def test_a_run_leaves_its_holdout_out_and_watches_it(
    photos: TrainConfig, batches: Callable[..., Seen], capfd: pytest.CaptureFixture[str]
) -> None:
    seen = batches(photos)
    assert len(seen) == 12 and max(int(b.index.max()) for b in seen.values()) == 17
    lines = read_metrics(Path(photos.run.out))
    assert [(x["epoch"], x["bank"]) for x in lines if x["kind"] == "knn"] == [
        (0, 18), (2, 18), (4, 18)
    ]  # fmt: skip
    found = ImageList.load(Path(photos.run.out))
    assert found and len(found.names) == 18
    assert "holding out 6 images (25% of each class) for validation" in capfd.readouterr().err
    settings = json.loads((Path(photos.run.out) / "config.json").read_text())
    assert settings["config"]["data"]["holdout"] == "25%"


def test_another_holdout_is_another_training(photos: TrainConfig) -> None:
    train_here(with_settings(photos, max_steps=2), "imagenet")
    for other, said in (("", "none"), ("50%", "50%")):
        with pytest.raises(CheckpointError, match=rf"holdout: 25% -> {said}\)"):
            train_here(with_settings(photos, holdout=other), "imagenet")


def test_a_holdout_beside_validation_images_is_refused(small: TrainConfig) -> None:
    with pytest.raises(DataError, match="has validation images of its own"):
        train_here(with_settings(small, holdout="10%"), "imagenet")
    refused = fastsiam("train", *flags(with_settings(small, holdout="10%")), code=1).stderr
    assert refused.startswith("error: ") and refused.count("\n") == 1


def test_where_nothing_is_held_out_the_monitor_says_how(
    small: TrainConfig, images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train_here(with_settings(small, data=str(images / "train"), max_steps=1), "imagenet")
    assert "no val.beton; --holdout 10% holds out a share" in capfd.readouterr().err
    (tmp_path / "flat").mkdir()
    for path in (images / "train").rglob("*.jpg"):
        shutil.copy(path, tmp_path / "flat" / f"{path.parent.name}{path.name}")
    flat = with_settings(small, data=str(tmp_path / "flat"), out=str(tmp_path / "b"), max_steps=1)
    train_here(flat, "imagenet")
    assert "holdout" not in capfd.readouterr().err
    train_here(with_settings(flat, holdout="25%", out=str(tmp_path / "c")), "imagenet")
    said = capfd.readouterr().err
    assert "holding out 6 images (25% of all)" in said
    assert "has no labels, which this evaluation needs" in said
    assert np.load(tmp_path / "c" / "images.npz")["names"].tobytes().count(b"\0") == 17
