"""Files of data that are missing, truncated or others when a run continues."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastsiam.config import TrainConfig
from fastsiam.errors import CheckpointError, DataError, FastSiamError
from fastsiam.pipelines import open_store
from fastsiam.run import checkpoint as checkpoints
from fastsiam.train.command import train_here
from fastsiam.train.remembered import FILE, Remembered, files_of
from tests.configs import with_settings
from tests.sources import folder_members, tar
from tests.tables import dataset, on_the_hub, saved
from tests.tiers import rest_slow
from tests.train.runs import history
from tests.train.test_faults import beton, data_file


def archive(images: Path) -> Path:
    return tar(images.with_name("images.tar"), folder_members(images / "train"))


def tables(images: Path) -> Any:
    members = folder_members(images / "train")
    rows = [(content, name, int(name[5])) for name, content in members]
    return {"train": dataset(rows, ["0", "1", "2"])}


def arrow(images: Path) -> Path:
    return saved(images.with_name("saved"), tables(images))


def parquet(images: Path) -> Path:
    return on_the_hub(images.with_name("hub"), tables(images), shards=1)


CONTAINERS = rest_slow([archive, beton, arrow, parquet], fast=2)
Container = Callable[[Path], Path]


def begun(small: TrainConfig, place: Path, tmp_path: Path) -> tuple[TrainConfig, Path]:
    """Begin a run, up to its fifth step, beside a whole one; return its settings and its data."""
    config = with_settings(small, data=str(place), knn_every=0)
    train_here(with_settings(config, out=str(tmp_path / "whole")), "imagenet")
    train_here(with_settings(config, max_steps=5), "imagenet")
    return config, data_file(place)


def goes_on(config: TrainConfig, tmp_path: Path) -> None:
    """Finish the run; it has the same lines as the whole one."""
    train_here(config, "imagenet")
    assert history(tmp_path / "run") == history(tmp_path / "whole")


@pytest.mark.parametrize("how", ["missing", "truncated", "empty"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_file_that_is_not_whole_is_refused(
    how: str, container: Container, small: TrainConfig, images: Path, tmp_path: Path
) -> None:
    """In one line that names it; with the file back the run continues bit for bit."""
    config, file = begun(small, container(images), tmp_path)
    content = file.read_bytes()
    if how == "missing":
        file.unlink()
    else:
        os.truncate(file, len(content) // 2 if how == "truncated" else 0)
    with pytest.raises(FastSiamError) as refused:
        train_here(config, "imagenet")
    assert "\n" not in str(refused.value)
    assert str(file) in str(refused.value)
    assert checkpoints.load(tmp_path / "run").step == 5
    file.write_bytes(content)
    goes_on(config, tmp_path)


def longer(place: Path) -> None:
    """Put another file of the same images in a tar's place: with more at its end."""
    content = place.read_bytes()
    place.unlink()
    place.write_bytes(content + bytes(10240))


def test_a_file_of_another_size_is_refused(
    small: TrainConfig, images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Though it names the same images; what is accepted once is so from there on."""
    config, file = begun(small, archive(images), tmp_path)
    size = file.stat().st_size
    longer(file)
    with pytest.raises(CheckpointError) as refused:
        train_here(config, "imagenet")
    assert str(refused.value) == (
        f"{file} changed since the run was last started: it had {size:,} bytes and now has "
        f"{size + 10240:,}; restore it, pass --data-changed accept to continue with its present "
        "content, or choose another --out for a new run"
    )
    train_here(with_settings(config, max_steps=6, data_changed="accept"), "imagenet")
    assert f"now has {size + 10240:,} (accepted)" in capfd.readouterr().err
    goes_on(config, tmp_path)
    assert "changed since" not in capfd.readouterr().err


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_copy_of_a_file_is_taken_for_the_same(
    container: Container, small: TrainConfig, images: Path, tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Its time alone is another: one line says so, once."""
    config, file = begun(small, container(images), tmp_path)
    shutil.copy(file, tmp_path / "copy")
    (tmp_path / "copy").replace(file)
    os.utime(file, ns=(0, 10**18))
    train_here(with_settings(config, max_steps=6), "imagenet")
    assert f"warning: {file} was modified since the run was" in capfd.readouterr().err
    goes_on(config, tmp_path)
    assert "was modified since" not in capfd.readouterr().err


def test_a_file_elsewhere_is_no_other(small: TrainConfig, images: Path, tmp_path: Path) -> None:
    """By its path another: its names are compared, as of any container."""
    config, file = begun(small, archive(images), tmp_path)
    shutil.copy(file, tmp_path / "moved.tar")
    file.unlink()
    goes_on(with_settings(config, data=str(tmp_path / "moved.tar")), tmp_path)


def test_a_run_of_a_version_that_kept_no_files(
    small: TrainConfig, images: Path, tmp_path: Path
) -> None:
    config, file = begun(small, archive(images), tmp_path)
    remembered = Remembered.load(tmp_path / "run")
    assert remembered is not None and remembered.files == files_of(open_store(file, "train"))
    (tmp_path / "run" / FILE).write_bytes(Remembered(remembered.names).to_bytes())
    longer(file)
    goes_on(config, tmp_path)
    again = Remembered.load(tmp_path / "run")
    assert again is not None and again.files == files_of(open_store(file, "train"))


def test_a_folder_has_no_such_files(images: Path) -> None:
    assert files_of(open_store(images, "train")) == ()


def test_a_file_of_a_folder_that_is_truncated_is_named(
    small: TrainConfig, images: Path, tmp_path: Path
) -> None:
    """When it is read; of one that is gone the list knows."""
    config, _ = begun(with_settings(small), images, tmp_path), None
    image = images / "train" / "class1" / "001.jpg"
    os.truncate(image, 100)
    with pytest.raises(DataError, match=r"cannot decode .*class1/001\.jpg"):
        train_here(config[0], "imagenet")
