"""Workers that are killed and files that lose bytes: one line, and the run resumes bit for bit."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastsiam.config import TrainConfig
from fastsiam.errors import FastSiamError, FileLostError, WorkerError
from fastsiam.pipelines import build_eval_loader, build_loader, open_store
from fastsiam.pipelines.store import Store
from fastsiam.run import checkpoint as checkpoints
from fastsiam.views.batch import Batch
from tests.configs import with_settings
from tests.pipelines.cases import readable
from tests.processes import Forked
from tests.sources import folder_members, tar
from tests.tables import dataset, on_the_hub, saved
from tests.tiers import rest_slow
from tests.train.runs import history, run_once

Before = Callable[[int, Batch], None]


def kill_a_worker() -> None:
    """Kill one of this process's workers and wait until it is dead."""
    worker = multiprocessing.active_children()[0]
    os.kill(worker.pid or 0, signal.SIGKILL)
    worker.join(60)
    assert not worker.is_alive()


def ends_and_goes_on(
    config: TrainConfig, folder: Path, before: Before, restore: Callable[[], Any] = bool
) -> FastSiamError:
    """End a run by what ``before`` does; check that it resumes to the steps of one without it.

    Returns:
        What ended it.
    """
    run_once(config, folder / "whole")
    with pytest.raises((WorkerError, FileLostError)) as caught:
        run_once(config, folder / "ended", before=before)
    start = checkpoints.load(folder / "ended")
    assert f"saved {checkpoints.last(folder / 'ended')} at step" in caught.value.__notes__[0]
    restore()
    run_once(config, folder / "ended", start=start)
    assert history(folder / "ended") == history(folder / "whole")
    assert 0 < start.step < history(folder / "whole")[-1][0]
    return caught.value


def test_a_loader_process_is_killed(small: TrainConfig, tmp_path: Path) -> None:
    config = with_settings(small, pipeline="torchvision", workers=2, knn_every=0)

    def kill(step: int, batch: Batch) -> None:
        if step == 4:
            kill_a_worker()

    error = ends_and_goes_on(config, tmp_path, kill)
    assert "of 2 (process" in str(error)
    assert "was killed by SIGKILL, as the system does where memory runs out" in str(error)
    assert str(error).endswith("or give it more; start the same command again to resume")


def load(config: TrainConfig, after: Callable[[], object] = bool) -> None:
    """Load an epoch of the training images; ``after`` the first batch do something."""
    with contextlib.closing(build_loader(config.data, config.augment, batch=4)) as loader:
        for number, _ in enumerate(loader.epoch(0)):
            if number == 0:
                after()


def test_a_process_without_memory(
    small: TrainConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_memory(store: Store, index: int) -> Any:
        raise MemoryError

    monkeypatch.setattr(Store, "decode", no_memory)
    config = with_settings(small, pipeline="torchvision", workers=2)
    with pytest.raises(WorkerError, match="one of 2 loader processes ran out of memory: lower --w"):
        load(config)


def beton(images: Path) -> Path:
    return readable("ffcv", images)


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


def data_file(place: Path) -> Path:
    """Return the file that holds the training images."""
    if place.is_file():
        return place
    kinds = ("train.beton", "**/*.arrow", "**/train*.parquet", "train")
    return next(path for kind in kinds for path in place.glob(kind))


CASES = [
    pytest.param(beton, "torchvision", 2),
    pytest.param(archive, "torchvision", 0),
    pytest.param(arrow, "torchvision", 0),
    pytest.param(parquet, "torchvision", 0),
    pytest.param(beton, "ffcv", 2, marks=pytest.mark.ffcv),
    pytest.param(archive, "dali", 2, marks=pytest.mark.dali),
]


@pytest.mark.parametrize(("container", "pipeline", "workers"), rest_slow(CASES, fast=2))
def test_a_file_is_truncated_while_it_is_mapped(
    container: Callable[[Path], Path],
    pipeline: str,
    workers: int,
    small: TrainConfig,
    images: Path,
    tmp_path: Path,
) -> None:
    place = container(images)
    file, content = data_file(place), data_file(place).read_bytes()
    config = with_settings(
        small, data=str(place), pipeline=pipeline, workers=workers, knn_every=0, epochs=8
    )

    def truncate(step: int, batch: Batch) -> None:
        if step == 4:
            os.truncate(file, 10)

    error = ends_and_goes_on(config, tmp_path, truncate, lambda: file.write_bytes(content))
    assert str(error) == (
        f"{file} was truncated while it was read: 10 of {len(content):,} bytes are left; "
        "restore it and run the same command to continue"
    )


def test_a_file_has_another_size_and_all_its_pages(
    small: TrainConfig, images: Path, tmp_path: Path
) -> None:
    """No signal tells of it."""
    place = beton(images)
    file = data_file(place)
    size = file.stat().st_size
    config = with_settings(small, data=str(place), pipeline="torchvision", workers=0, knn_every=0)

    def resize(step: int, batch: Batch) -> None:
        if step == 4:
            os.truncate(file, size + 1)

    error = ends_and_goes_on(config, tmp_path, resize, lambda: os.truncate(file, size))
    assert f"{file} was overwritten while it was read: " in str(error)


def test_a_file_is_truncated_under_an_evaluation(small: TrainConfig, images: Path) -> None:
    place = beton(images)
    file = data_file(place)
    config = with_settings(small, data=str(place), pipeline="torchvision", workers=1)
    loader = build_eval_loader(config.data, "train", config.augment, resize=16, batch=4)
    os.truncate(file, 4096)
    with pytest.raises(FileLostError, match=r"train\.beton was truncated"):
        list(loader)


def send_itself(place: str) -> None:
    """Send SIGBUS to a process that has a file mapped, which may be read on."""
    store = open_store(Path(place), "train")
    os.kill(os.getpid(), signal.SIGBUS)
    store.read(0)


def test_a_signal_that_is_none_of_a_mapping_ends_the_process(images: Path) -> None:
    """As ever, where our handler stands before it."""
    assert Forked(send_itself, str(beton(images))).wait(60).returncode == -signal.SIGBUS


def read_truncated(place: str) -> None:
    """Truncate a data set's file under its store and read it, as one's own program may."""
    store = open_store(Path(place), "train")
    os.truncate(data_file(Path(place)), 10)
    store.decode(0)


def test_a_programs_own_reading(images: Path) -> None:
    """Without a loop, too, it is an exception and no signal."""
    done = Forked(read_truncated, str(beton(images))).wait(60)
    assert done.returncode == 1 and "FileLostError" in done.stderr, done.stderr
