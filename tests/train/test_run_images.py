"""The images of a run: any container, changed data, holdout sets, mixtures and named columns."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fastsiam.config import ConvertConfig, TrainConfig
from fastsiam.config.evaluate import KnnConfig
from fastsiam.errors import CheckpointError, DataError, FastSiamError
from fastsiam.evaluate.command import evaluate_knn
from fastsiam.pipelines import open_store
from fastsiam.pipelines.convert.command import convert_data
from fastsiam.pipelines.store import base, folder
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from fastsiam.train.image_list import FILE, ImageList, files_of, names_of
from fastsiam.views.batch import Batch
from tests.configs import flags, with_settings
from tests.pipelines.cases import make_readable
from tests.processes import Forked, command, fastsiam
from tests.ranks import fastsiam_on_ranks
from tests.sources import folder_members, tar
from tests.tables import dataset, saved, two_image_columns, write_hub_splits
from tests.tiers import rest_slow
from tests.train.runs import CPU, assert_same_runs, history, train_run, verify_run

NAME, LOST = "class1/001.jpg", 9
"""Name and index of the image that a test removes."""


@pytest.fixture(scope="session")
def finished_run(stopped_config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stopped run, resumed on its original data and trained to the end."""
    run = shutil.copytree(stopped_config.run.out, tmp_path_factory.mktemp("finished") / "run")
    return train_run(stopped_config, out=run)


def copy_folder(images: Path) -> Path:
    return shutil.copytree(images, images.with_name("moved"))


def pack_tar(images: Path) -> Path:
    return tar(images.with_name("images.tar"), folder_members(images / "train"))


def convert_to_beton(images: Path) -> Path:
    return make_readable("ffcv", images)


def tables(images: Path) -> Any:
    members = folder_members(images / "train")
    rows = [(content, name, int(name[5])) for name, content in members]
    return {"train": dataset(rows, ["0", "1", "2"])}


def save_arrow(images: Path) -> Path:
    return saved(images.with_name("saved"), tables(images))


def write_parquet(images: Path) -> Path:
    return write_hub_splits(images.with_name("hub"), tables(images), shards=1)


def find_training_file(place: Path) -> Path:
    """Return the file that contains the training images, or one of several such files."""
    if place.is_file():
        return place
    kinds = ("train.beton", "**/*.arrow", "**/train*.parquet", f"train/{NAME}")
    return next(path for kind in kinds for path in place.glob(kind))


@pytest.mark.parametrize(
    "container",
    rest_slow([copy_folder, pack_tar, convert_to_beton, save_arrow, write_parquet], fast=2),
)
def test_run_resumes_from_any_container(
    container: Callable[[Path], Path], stopped_copy: TrainConfig, images: Path, finished_run: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Data may be moved, converted or packed. A missing or truncated file is a one-line error."""
    place = container(images)
    config, file = with_settings(stopped_copy, data=place), find_training_file(place)
    run = train_run(config, max_steps=7)
    content = file.read_bytes()
    for damage in (Path.unlink, lambda file: os.truncate(file, len(content) // 2)):
        damage(file)
        with pytest.raises(FastSiamError) as caught:
            train_run(config)
        named = NAME if container is copy_folder else str(file)
        assert "\n" not in str(caught.value) and named in str(caught.value)
        assert checkpoints.load(run).step in (7, 8)  # files of a folder are opened lazily
        file.write_bytes(content)
    os.utime(file, ns=(0, 10**18))
    capfd.readouterr()
    message = f"warning: {file} was modified since the run was"
    for stop, warns in ((10, container is not copy_folder), (0, False)):
        train_run(config, max_steps=stop)
        assert (message in capfd.readouterr().err) == warns  # only once
    assert_same_runs(run, finished_run)


def pad_tar(place: Path) -> None:
    """Replace a tar by a new file with the same images and padding at its end."""
    content = place.read_bytes()
    place.unlink()
    place.write_bytes(content + bytes(10240))


def test_changed_file_size_is_rejected(
    stopped_copy: TrainConfig, images: Path, finished_run: Path
) -> None:
    """It fails even with the same names, unless the path is new or the run has no file list."""
    file = pack_tar(images)
    config = with_settings(stopped_copy, data=file)
    run = train_run(config, max_steps=7)
    size = file.stat().st_size
    listed = ImageList.load(run)
    assert listed is not None and listed.files == files_of(open_store(file, "train"))
    shutil.copy(file, file.with_name("moved.tar"))
    pad_tar(file)
    with pytest.raises(CheckpointError) as caught:
        train_run(config)
    assert str(caught.value) == (
        f"{file} changed since the run was last started: it had {size:,} bytes and now has "
        f"{size + 10240:,}; restore the data, continue training on the current images with "
        "--data-changed accept, or train a new run with another --out"
    )
    train_run(config, data=file.with_name("moved.tar"), max_steps=8)
    (run / FILE).write_bytes(ImageList(listed.names).to_bytes())  # an older list, without files
    train_run(config, max_steps=9)
    again = ImageList.load(run)
    assert again is not None and again.files == files_of(open_store(file, "train"))
    pad_tar(file)
    train_run(config, data_changed="accept")
    assert_same_runs(run, finished_run)


def test_all_new_image_names_are_accepted_if_count_matches(
    stopped_copy: TrainConfig, images: Path, finished_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Shards number their images and folders name them, so only the count can be compared."""
    members = [
        (f"{i:05d}.jpg", data) for i, (_, data) in enumerate(folder_members(images / "train"))
    ]
    shards = tar(images.with_name("shards.tar"), members)
    run = train_run(stopped_copy, data=shards, max_steps=9)
    assert "all image names changed since" in capfd.readouterr().err
    assert history(run) == history(finished_run)[:9]
    tar(shards, members[:-1])
    with pytest.raises(CheckpointError, match=r"24 of 24 images missing .*, 23 new"):
        train_run(stopped_copy, data=shards)


def test_renamed_image_is_rejected_on_resume_and_branch(
    stopped_copy: TrainConfig, images: Path, tmp_path: Path
) -> None:
    """It fails for resumed runs, their branches, and branches from a copied checkpoint."""
    run, config = tmp_path / "run", with_settings(stopped_copy, data=images)
    copied_checkpoint = shutil.copy(checkpoints.last(run), run / "kept.pt")
    before = {path: path.read_bytes() for path in run.glob("*.*")}
    (images / "train" / NAME).rename(images / "train" / "class1" / "other.jpg")
    for path in ("auto", run, copied_checkpoint):
        out = run if path == "auto" else tmp_path / "branch"
        with pytest.raises(CheckpointError) as caught:
            train_run(config, resume=path, out=out)
        assert str(caught.value) == (
            f"the data changed since the run started: 1 of 24 images missing ({NAME}), 1 new "
            "(class1/other.jpg); restore the data, continue training on the current images with "
            "--data-changed accept, or train a new run with another --out"
        )
    assert before == {path: path.read_bytes() for path in run.glob("*.*")}


def record_batches(config: TrainConfig, **settings: Any) -> dict[int, Batch]:
    seen: dict[int, Batch] = {}
    train_run(config, seen.__setitem__, **settings)
    return seen


def test_accepted_data_change_keeps_order_of_other_images(
    small: TrainConfig, images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """All other images keep their steps. ``accept`` covers only one change of the data."""
    config = with_settings(small, knn_every=0)
    reference = record_batches(config, out=tmp_path / "whole")
    run = train_run(config, max_steps=2)
    (images / "train" / NAME).unlink()
    new = images / "train" / "class1" / "new.jpg"
    new.write_bytes((images / "train" / "class0" / "000.jpg").read_bytes())
    seen = record_batches(config, max_steps=4, data_changed="accept")
    assert "(accepted); each missing image is replaced by the next" in capfd.readouterr().err
    assert checkpoints.load(run).config.run.data_changed == "refuse"
    # The fingerprint as version 0.2 wrote it, computed from the current names.
    names = sorted(names_of(open_store(images, "train")))
    text = hashlib.blake2b("\0".join(names).encode(), digest_size=16).hexdigest()
    listed = ImageList.load(run)
    assert listed and listed.accepted == text and NAME in listed.names
    seen |= record_batches(config)
    assert sorted(seen) == list(range(2, 12))
    for step, batch in seen.items():
        assert torch.equal(batch.index, reference[step].index)
        rest = batch.index != LOST
        assert torch.equal(batch.view1[rest], reference[step].view1[rest])
        assert not (batch.view1[~rest] == reference[step].view1[~rest]).flatten(1).all(1).any()
    assert any(LOST in batch.index for batch in seen.values())
    shutil.rmtree(images / "train" / "class2")
    with pytest.raises(CheckpointError, match="9 of 24 images missing"):
        train_run(config)


def test_run_without_image_list_compares_image_count(
    stopped_copy: TrainConfig, images: Path
) -> None:
    run, image = Path(stopped_copy.run.out), images / "train" / NAME
    (run / FILE).unlink()
    content = image.read_bytes()
    image.unlink()
    with pytest.raises(CheckpointError, match=r"23 images now, 24 when"):
        train_run(stopped_copy, data=images)
    assert not (run / FILE).exists()
    image.write_bytes(content)
    train_run(stopped_copy, data=images, max_steps=7)  # this start writes a list
    assert ImageList.load(run) == ImageList(tuple(names_of(open_store(images, "train"))))


def test_holdout_is_excluded_from_training_and_monitored(
    small: TrainConfig, images: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two of eight images of each class. A run cannot be resumed with another holdout."""
    config = with_settings(small, data=images / "train", holdout="25%", batch=6)
    seen = record_batches(config)
    assert len(seen) == 12 and max(int(b.index.max()) for b in seen.values()) == 17
    run = Path(config.run.out)
    assert [(x["epoch"], x["bank"]) for x in read_metrics(run) if x["kind"] == "knn"] == [
        (0, 18), (2, 18), (4, 18)
    ]  # fmt: skip
    image_list = ImageList.load(run)
    assert image_list and len(image_list.names) == 18
    assert "holding out 6 images (25% of each class) for validation" in capfd.readouterr().err
    settings = json.loads((run / "config.json").read_text())
    assert settings["config"]["data"]["holdout"] == "25%"
    for other, new_value in (("", "none"), ("50%", "50%")):
        with pytest.raises(CheckpointError, match=rf"holdout: 25% -> {new_value}\)"):
            train_run(config, holdout=other)


@pytest.mark.parametrize("holdout", ["", "25%"])
def test_training_images_are_listed_once(
    holdout: str, small: TrainConfig, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing a large folder again for the kNN monitor takes long."""
    walk = Mock(wraps=vars(folder)["_walk"])
    monkeypatch.setattr(folder, "_walk", walk)
    data = images / "train" if holdout else images
    run = train_run(small, data=data, holdout=holdout, batch=6, max_steps=1)
    assert [x["bank"] for x in read_metrics(run) if x["kind"] == "knn"] == [18 if holdout else 24]
    expected = [images / "train"] if holdout else [images / "train", images / "val"]
    assert [call.args[0] for call in walk.call_args_list] == expected


def test_unlabelled_holdout_is_share_of_all_images(
    small: TrainConfig, images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flat").mkdir()
    for path in (images / "train").rglob("*.jpg"):
        shutil.copy(path, tmp_path / "flat" / f"{path.parent.name}{path.name}")
    run = train_run(small, data=tmp_path / "flat", max_steps=1, holdout="25%")
    stderr = capfd.readouterr().err
    assert "holding out 6 images (25% of all)" in stderr
    assert (
        "kNN monitor disabled: " in stderr
        and "has no labels, which this evaluation needs" in stderr
    )
    image_list = ImageList.load(run)
    assert image_list and len(image_list.names) == 18


def test_window_shuffle_is_kept_across_containers(
    small: TrainConfig, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers store the images in different orders, so new runs would shuffle differently.

    The run has 12 steps on 24 images in 6 blocks, shuffled within windows of 7 images.
    """
    monkeypatch.setattr(base, "BLOCK_IMAGES", 4)
    config = with_settings(small, shuffle="window:7", knn_every=0, tracker="none")
    reference = train_run(config, out=tmp_path / "whole")
    convert_data("folder", ConvertConfig(source=str(images), out=str(tmp_path / "converted")))
    other = tar(tmp_path / "other.tar", folder_members(images / "train")[::-1])
    for number, place in enumerate((images, tmp_path / "converted", other, images), 1):
        run = train_run(config, data=place, max_steps=3 * number - 1)
    assert_same_runs(train_run(config), reference)
    for data in ("", str(other)):
        assert "12 log lines agree" in verify_run(run, data=data)
    turned = train_run(config, data=other, out=tmp_path / "turned")
    assert history(turned) != history(reference)


def test_run_on_mixture_resumes_bit_for_bit(
    small: TrainConfig, images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Half of a folder with three classes, half of one with a single class. It resumes exactly."""
    alone = tmp_path / "alone"
    shutil.copytree(images / "train" / "class1", alone / "train" / "class1")
    mixed = with_settings(small, mixed_with=(str(alone),), weights=(1, 1), knn_every=0)
    reference = train_run(mixed, out=tmp_path / "whole")
    assert "mixture of 50.0% " in capfd.readouterr().err
    assert flags(mixed).count("--data") == 2
    fastsiam("train", *flags(mixed), "--max-steps", "5")
    run = train_run(mixed)
    assert_same_runs(run, reference)
    assert "16 log lines agree" in verify_run(run)
    settings = json.loads((run / "config.json").read_text())["config"]
    assert settings["data"]["mixed_with"] == [str(alone)]
    with pytest.raises(CheckpointError, match=r"weights: 1\.0,1\.0 -> 1\.0,2\.0"):
        train_run(mixed, weights=(1, 2))
    next(alone.glob("train/*/*.jpg")).unlink()
    with pytest.raises(CheckpointError, match=r"1 of \d+ images missing \(1/class1"):
        train_run(mixed)


def test_run_and_evaluations_use_named_columns(small: TrainConfig, tmp_path: Path) -> None:
    """The table has two columns of images. A third of its rows is held out."""
    columns = {"image_column": "photo", "label_column": "species", "holdout": "34%"}
    root = saved(tmp_path / "two", {"train": two_image_columns(rows=12)})
    photos = with_settings(small, data=root, batch=4, max_steps=2, **columns)
    run, knn = train_run(photos), KnnConfig(k=(1,), workers=0, device="cpu")
    run_record = evaluate_knn(run, knn, CPU)
    assert (run_record.data.classes, run_record.data.image_column) == (3, "photo")
    other = evaluate_knn(run, replace(knn, image_column="mask", label_column="genus"), CPU)
    assert other.data.classes == 2 and other.identity != run_record.identity
    assert "log lines agree" in verify_run(run)
    moved = str(shutil.copytree(root, tmp_path / "moved"))
    named = {"image_column": "photo", "label_column": "species"}
    assert "log lines agree" in verify_run(run, data=moved, **named)
    elsewhere = str(saved(tmp_path / "elsewhere", {"train": two_image_columns()}))
    which = r"2 columns .* --image-column photo"
    with pytest.raises(DataError, match=which):
        evaluate_knn(run, replace(knn, data=elsewhere), CPU)
    with pytest.raises(DataError, match=which):
        verify_run(run, data=elsewhere)
    with pytest.raises(CheckpointError, match="image-column: photo -> mask"):
        train_run(photos, image_column="mask")
    with pytest.raises(DataError, match=which):
        train_run(photos, image_column="", out=tmp_path / "new")


def test_image_names_are_freed_before_first_step(small: TrainConfig) -> None:
    """The names of millions of images would take gigabytes on every rank."""

    def lists() -> int:
        gc.collect()
        return sum(type(item) is ImageList for item in gc.get_objects())

    before, during = lists(), list[int]()
    run = train_run(small, lambda *_: during.append(lists()), max_steps=1)
    assert during == [before] and ImageList.load(run) is not None


def test_resumed_ranks_with_different_images_end_run(
    stopped_copy: TrainConfig, tmp_path: Path
) -> None:
    """With ``--data-changed accept``, each rank would replace the images that it has lost."""
    data, lacking = stopped_copy.data.data, shutil.copytree(stopped_copy.data.data, tmp_path / "b")
    (lacking / "train" / NAME).unlink()

    def begin(*arguments: str, environment: Mapping[str, str]) -> Forked:
        own_data = str(lacking) if environment["RANK"] == "1" else data
        words = [own_data if word == data else word for word in arguments]
        return command(*words, environment=environment)

    arguments = flags(with_settings(stopped_copy, data_changed="accept"))
    _, second = fastsiam_on_ranks(2, "train", *arguments, code=1, begin=begin)
    assert "this rank finds different images than rank 0" in second.stderr
    assert checkpoints.load(Path(stopped_copy.run.out)).step == 6
