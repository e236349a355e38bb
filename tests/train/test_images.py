"""Runs whose data lost or gained files, or hold some out: which images they train on."""

from __future__ import annotations

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
from fastsiam.pipelines.store.beton import FIELD, HEADER
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from fastsiam.train import command as job
from fastsiam.train.command import train_here
from fastsiam.train.remembered import Remembered, names_of
from fastsiam.views.batch import Batch
from tests.configs import flags, with_settings
from tests.pipelines.cases import WITH_IMAGES, readable
from tests.processes import fastsiam
from tests.ranks import fastsiam_on_ranks
from tests.sources import folder_members, tar
from tests.train.runs import Wrapped

Seen = dict[int, Batch]
"""The batches that a run was trained on, by step."""
LOST = 9
"""Place of the image that is lost in most tests, and its name."""
NAME = "class1/001.jpg"


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


def again(config: TrainConfig, name: str) -> TrainConfig:
    """Return the settings for data that changed: FFCV's are converted again."""
    folder = Path(config.data.data)
    if name == "ffcv":
        folder = folder.with_name(folder.name.removesuffix("-converted"))
        shutil.rmtree(config.data.data)
    return with_settings(config, data=str(readable(name, folder)))


def check_others(whole: Seen, seen: Seen, lost: set[int]) -> None:
    """Hold batches against those of a run whose data never changed."""
    assert seen
    shown = 0
    for step, batch in seen.items():
        assert torch.equal(batch.index, whole[step].index)
        own = torch.isin(batch.index, torch.tensor(sorted(lost)))
        shown += int(own.sum())
        for view, expected in zip(batch.views, whole[step].views, strict=True):
            assert torch.equal(view[~own], expected[~own])
            assert all(not torch.equal(a, b) for a, b in zip(view[own], expected[own], strict=True))
    assert shown, "no lost image is in the batches that are compared"


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_a_run_that_lost_an_image_goes_on_with_the_others(
    name: str, small: TrainConfig, images: Path, tmp_path: Path, batches: Callable[..., Seen]
) -> None:
    """From the midst of an epoch; every other image is what it would have been."""
    data = str(readable(name, images))
    config = with_settings(small, pipeline=name, data=data, knn_every=0)
    whole = batches(with_settings(config, out=str(tmp_path / "whole")))
    first = batches(with_settings(config, max_steps=5))
    (images / "train" / NAME).unlink()
    config = again(config, name)
    before = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.*")}
    with pytest.raises(CheckpointError) as refused:
        batches(config)
    assert str(refused.value) == (
        f"the data changed since the run started: 1 of 24 images missing ({NAME}); restore "
        "the data, pass --data-changed accept to continue with the present images, or choose "
        "another --out for a new run"
    )
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").glob("*.*")}
    rest = batches(with_settings(config, data_changed="accept"))
    assert sorted(first | rest) == list(range(12)) and not set(first) & set(rest)
    check_others(whole, rest, {LOST})
    state = checkpoints.load(tmp_path / "run")
    assert (state.step, state.images, state.config.run.data_changed) == (12, 24, "refuse")


def test_consent_is_remembered_for_the_change_it_was_given_to(
    small: TrainConfig, images: Path, tmp_path: Path, batches: Callable[..., Seen],
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Several changes, one after the other; the last of them brings an image back."""
    train = images / "train"
    config = with_settings(small, knn_every=0)
    whole = batches(with_settings(config, out=str(tmp_path / "whole")))
    batches(with_settings(config, max_steps=2))
    kept = (train / NAME).read_bytes()
    (train / NAME).unlink()
    batches(with_settings(config, max_steps=3, data_changed="accept"))
    capfd.readouterr()
    check_others(whole, batches(with_settings(config, max_steps=5)), {LOST})  # without the flag
    assert (
        f"the data changed since the run started (accepted): 1 of 24 images missing ({NAME}); "
        "each missing image is replaced by the next one in the list" in capfd.readouterr().err
    )
    (train / "class1" / "002.jpg").unlink()
    shutil.copy(train / "class0" / "000.jpg", train / "class0" / "new.jpg")
    message = r"2 of 24 images missing \(class1/001.jpg, class1/002.jpg\), 1 new \(class0/new.jpg"
    with pytest.raises(CheckpointError, match=message):
        batches(config)
    rest = batches(with_settings(config, max_steps=9, data_changed="accept"))
    check_others(whole, rest, {LOST, LOST + 1})
    assert "new images are ignored until a new run" in capfd.readouterr().err
    (train / NAME).write_bytes(kept)
    with pytest.raises(CheckpointError, match="1 of 24 images missing"):
        batches(config)
    check_others(whole, batches(with_settings(config, data_changed="accept")), {LOST + 1})


def test_an_image_in_anothers_stead_is_noticed(small: TrainConfig, images: Path) -> None:
    """As many as before: a count alone says nothing."""
    train_here(with_settings(small, max_steps=2), "imagenet")
    (images / "train" / NAME).rename(images / "train" / "class1" / "other.jpg")
    with pytest.raises(CheckpointError, match=r"1 of 24 images missing .*, 1 new "):
        train_here(small, "imagenet")


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
    changed = with_settings(config, data=str(shards), data_changed="accept")
    with pytest.raises(CheckpointError, match=r"all 24 images .* other names now, and .* 23"):
        batches(changed)


def test_a_holdout_does_not_move_to_images_of_other_names(
    photos: TrainConfig, images: Path, tmp_path: Path
) -> None:
    """By other names others would be held out, which the run has trained on."""
    train_here(with_settings(photos, max_steps=2), "imagenet")
    members = [(f"{name.rpartition('/')[0]}/x{i:05d}.jpg", data) for i, (name, data) in enumerate(
        folder_members(images / "train"))]  # fmt: skip
    shards = tar(tmp_path / "shards.tar", members)
    with pytest.raises(CheckpointError, match=r"so --holdout 25%, which chooses images by name"):
        train_here(with_settings(photos, data=str(shards)), "imagenet")


@pytest.mark.parametrize("place", ["run/checkpoints/kept.pt", "run/kept.pt"])
def test_a_kept_checkpoint_goes_by_its_runs_list(
    place: str, small: TrainConfig, images: Path, tmp_path: Path
) -> None:
    run = train_here(with_settings(small, max_steps=2), "imagenet")
    kept = shutil.copy(checkpoints.last(run), tmp_path / place)
    (images / "train" / NAME).rename(images / "train" / "class0" / "other.jpg")
    with pytest.raises(CheckpointError, match="1 of 24 images missing"):
        train_here(with_settings(small, resume=str(kept), out=str(tmp_path / "b")), "imagenet")


def nameless(images: Path) -> Path:
    """Convert, and leave out what FFCV's own writer does not write: the place of the names."""
    out = images.parent / "plain"
    shutil.rmtree(out, ignore_errors=True)
    convert_data("folder", ConvertConfig(source=str(images), out=str(out)))
    content = bytearray((out / "train.beton").read_bytes())
    arguments = HEADER.itemsize + FIELD.itemsize - 1024  # they come last
    content[arguments : arguments + 1024] = bytes(1024)
    (out / "train.beton").write_bytes(content)
    return out / "train.beton"


def test_a_file_that_names_no_image_cannot_be_told_apart(small: TrainConfig, images: Path) -> None:
    config = with_settings(small, data=str(nameless(images)), knn_every=0)
    train_here(with_settings(config, max_steps=2), "imagenet")
    train_here(with_settings(config, max_steps=3), "imagenet")
    (images / "train" / NAME).unlink()
    nameless(images)
    with pytest.raises(CheckpointError, match="files that FFCV wrote have no image names"):
        train_here(with_settings(config, data_changed="accept"), "imagenet")


def test_a_run_from_before_there_were_lists(small: TrainConfig, images: Path) -> None:
    run = train_here(with_settings(small, max_steps=2), "imagenet")
    (run / "images.npz").unlink()
    kept = (images / "train" / NAME).read_bytes()
    (images / "train" / NAME).unlink()
    with pytest.raises(CheckpointError, match=r"23 images now, 24 when .* has no list of"):
        train_here(with_settings(small, data_changed="accept"), "imagenet")
    assert not (run / "images.npz").exists()
    (images / "train" / NAME).write_bytes(kept)
    train_here(with_settings(small, max_steps=4), "imagenet")  # from here on it has one
    assert Remembered.load(run) == Remembered(tuple(names_of(open_store(images, "train"))))


def test_a_branch_takes_its_runs_list_along(
    small: TrainConfig, images: Path, tmp_path: Path
) -> None:
    first = train_here(with_settings(small, max_steps=4), "imagenet")
    (images / "train" / NAME).unlink()
    for path in (first, checkpoints.last(first)):
        branch = with_settings(small, resume=str(path), out=str(tmp_path / f"to-{path.name}"))
        with pytest.raises(CheckpointError, match="1 of 24 images missing"):
            train_here(branch, "imagenet")
        run = train_here(with_settings(branch, data_changed="accept"), "imagenet")
        found, own = Remembered.load(run), Remembered.load(first)
        assert found and own and found.names == own.names and found.accepted and not own.accepted


def test_a_whole_class_can_go(
    small: TrainConfig, images: Path, tmp_path: Path, batches: Callable[..., Seen]
) -> None:
    config = with_settings(small, knn_every=0)
    whole = batches(with_settings(config, out=str(tmp_path / "whole")))
    batches(with_settings(config, max_steps=1))
    shutil.rmtree(images / "train" / "class1")
    rest = batches(with_settings(config, data_changed="accept"))
    check_others(whole, rest, set(range(8, 16)))


def test_a_new_run_in_an_old_folder_has_a_list_of_its_own(small: TrainConfig, images: Path) -> None:
    run = train_here(with_settings(small, max_steps=1), "imagenet")
    checkpoints.last(run).unlink()
    (images / "train" / NAME).unlink()
    train_here(with_settings(small, max_steps=1), "imagenet")
    found = Remembered.load(run)
    assert found and len(found.names) == 23


def test_two_ranks_go_on_by_the_command_line(small: TrainConfig, images: Path) -> None:
    config = with_settings(small, gpus=2, knn_every=0, max_steps=2)
    fastsiam_on_ranks(2, "train", *flags(config))
    for number in range(17):  # fewer than a batch is left
        (images / "train" / f"class{number // 8}" / f"{number % 8:03d}.jpg").unlink()
    config = with_settings(config, max_steps=0)
    refused = fastsiam_on_ranks(2, "train", *flags(config), code=1)
    assert any("17 of 24 images missing" in one.stderr for one in refused)
    done = fastsiam_on_ranks(2, "train", *flags(with_settings(config, data_changed="accept")))
    assert "17 of 24 images missing (class0/000.jpg, class0/001.jpg" in done[0].stderr
    assert checkpoints.load(Path(config.run.out)).step == 12


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
    found = Remembered.load(Path(photos.run.out))
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


def test_a_holdout_goes_with_data_that_change(
    photos: TrainConfig, tmp_path: Path, batches: Callable[..., Seen],
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """What is held out may go, and what is trained on; neither moves the other."""
    whole = batches(with_settings(photos, out=str(tmp_path / "whole")))
    batches(with_settings(photos, max_steps=2))
    remembered = Remembered.load(Path(photos.run.out))
    assert remembered
    held = set(names_of(open_store(photos.data.root, "train"))) - set(remembered.names)
    (Path(photos.data.data) / min(held)).unlink()
    capfd.readouterr()
    for step, batch in batches(with_settings(photos, max_steps=4)).items():
        assert torch.equal(batch.view1, whole[step].view1)
    assert "the run already trained on 1 of them and continues" in capfd.readouterr().err
    (Path(photos.data.data) / remembered.names[4]).unlink()
    with pytest.raises(CheckpointError, match="1 of 18 images missing"):
        batches(photos)
    check_others(whole, batches(with_settings(photos, data_changed="accept")), {4})


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
