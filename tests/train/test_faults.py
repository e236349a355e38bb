"""Workers that are killed and files that change: one line, and the run resumes bit for bit."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastsiam.config import TrainConfig
from fastsiam.errors import FastSiamError, FileLostError, WorkerError
from fastsiam.run import checkpoint as checkpoints
from fastsiam.views.batch import Batch
from tests.configs import with_settings
from tests.pipelines.cases import readable
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
    assert str(error).startswith("a worker process died (")
    assert str(error).endswith("start the same command again to resume")


def beton(images: Path) -> Path:
    return readable("ffcv", images)


def data_file(place: Path) -> Path:
    """Return the file that holds the training images."""
    if place.is_file():
        return place
    kinds = ("train.beton", "**/*.arrow", "**/train*.parquet", "train")
    return next(path for kind in kinds for path in place.glob(kind))


def test_a_file_changes_its_size(small: TrainConfig, images: Path, tmp_path: Path) -> None:
    place = beton(images)
    file = data_file(place)
    size = file.stat().st_size
    config = with_settings(small, data=str(place), pipeline="torchvision", workers=0, knn_every=0)

    def resize(step: int, batch: Batch) -> None:
        if step == 4:
            os.truncate(file, size + 1)

    error = ends_and_goes_on(config, tmp_path, resize, lambda: os.truncate(file, size))
    assert f"{file} changed while it was read: it had {size:,} bytes" in str(error)
