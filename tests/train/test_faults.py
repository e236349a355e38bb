"""Workers that are killed and files that change: one line, and the run resumes bit for bit."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastsiam.config import TrainConfig
from fastsiam.errors import FastSiamError, FileLostError, WorkerError
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from fastsiam.views.batch import Batch
from tests.configs import flags, with_settings
from tests.pipelines.cases import readable
from tests.processes import Forked, command
from tests.train.runs import history, run_once
from tests.train.test_interrupted import until

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


def workers(process: Forked) -> list[str]:
    """Return the loader processes: they are deaf to Ctrl-C."""
    mask = 1 << (signal.SIGINT - 1)
    found = []
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        status = Path(f"/proc/{child}/status").read_text()
        ignored = re.search(r"SigIgn:\s*(\w+)", status)
        if ignored and int(ignored[1], 16) & mask:
            found.append(child)
    return found


def test_a_loader_process_is_killed(small: TrainConfig, tmp_path: Path) -> None:
    config = with_settings(small, pipeline="torchvision", workers=2, knn_every=0)

    def kill(step: int, batch: Batch) -> None:
        if step == 4:
            kill_a_worker()

    error = ends_and_goes_on(config, tmp_path, kill)
    assert str(error).startswith("a worker process died (")
    assert str(error).endswith("start the same command again to resume")


@pytest.mark.slow
def test_a_loader_process_of_a_command_is_killed(small: TrainConfig) -> None:
    """One line, exit code 1, and a state that is saved."""
    config = with_settings(small, pipeline="torchvision", workers=2, knn_every=0, epochs=10**5)
    process = command("train", *flags(config))
    until(process, lambda: read_metrics(Path(config.run.out)) and workers(process))
    os.kill(int(workers(process)[0]), signal.SIGKILL)
    done = process.wait(60)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert last.startswith("error: a worker process died (")
    assert f"(saved {checkpoints.last(Path(config.run.out))} at step " in last


def beton(images: Path) -> Path:
    return readable("ffcv", images)


def data_file(place: Path) -> Path:
    """Return the file that holds the training images."""
    if place.is_file():
        return place
    kinds = ("train.beton", "**/*.arrow", "**/train*.parquet", "train")
    return next(path for kind in kinds for path in place.glob(kind))


def test_images_in_memory_need_no_file(small: TrainConfig, images: Path, tmp_path: Path) -> None:
    place = beton(images)
    config = with_settings(small, data=str(place), knn_every=0)

    def truncate(step: int, batch: Batch) -> None:
        os.truncate(data_file(place), 10)

    run_once(config, tmp_path / "run", before=truncate)
    assert history(tmp_path / "run")[-1][0] == 12


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_changes_its_size(
    change: int, small: TrainConfig, images: Path, tmp_path: Path
) -> None:
    place = beton(images)
    file = data_file(place)
    size = file.stat().st_size
    config = with_settings(small, data=str(place), pipeline="torchvision", workers=0, knn_every=0)

    def resize(step: int, batch: Batch) -> None:
        if step == 4:
            os.truncate(file, size + change)

    error = ends_and_goes_on(config, tmp_path, resize, lambda: os.truncate(file, size))
    assert f"{file} changed while it was read: it had {size:,} bytes" in str(error)
