"""Ctrl-C, once and twice, as a terminal sends it: to every process of the job."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fastsiam.config import TrainConfig
from fastsiam.errors import Interrupted
from fastsiam.evaluate.features import feature_batches
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from fastsiam.signals import ECHO
from fastsiam.train import command as job
from fastsiam.train.command import train_here
from tests.configs import flags, with_settings
from tests.processes import Forked, command


def until(process: Forked, seen: Callable[[], object]) -> None:
    while not seen():
        assert process.poll() is None, process.wait().stderr
        time.sleep(0.02)


def press(process: Forked) -> None:
    os.killpg(process.pid, signal.SIGINT)


def threads(process: Forked) -> int:
    return len(os.listdir(f"/proc/{process.pid}/task"))


def enlarge(images: Path) -> None:
    """Make the images so large that an evaluation takes long."""
    first, *others = images.rglob("*.jpg")
    Image.effect_noise((8000, 6000), 60).convert("RGB").save(first)
    for path in others:
        path.unlink()
        path.hardlink_to(first)


def test_twice_in_the_first_evaluation(small: TrainConfig, images: Path, tmp_path: Path) -> None:
    """It leaves with 130 at once."""
    enlarge(images)
    config = with_settings(small, pipeline="torchvision", workers=2, knn_every=1)
    process = command("train", *flags(config), session=True)
    until(process, lambda: "global batch " in process.messages())
    before = threads(process)
    until(process, lambda: threads(process) >= before + 3)  # those that read and decode
    press(process)
    time.sleep(2 * ECHO)  # the second is not the first's echo
    assert process.poll() is None
    press(process)
    done = process.wait(60)
    assert done.returncode == 130, done.stderr
    assert (
        "SIGINT: stopping before the next step or batch; a second signal exits at once"
        in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert not read_metrics(tmp_path / "run")


def test_an_evaluation_is_left_at_its_next_batch(
    small: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And made when the run continues."""
    config = with_settings(small, max_steps=6, knn_every=1)
    run, evaluate = Path(config.run.out), feature_batches

    def signalled(*given: Any, **how: Any) -> Iterator[Any]:
        for batch in evaluate(*given, **how):
            if checkpoints.last(run).exists():  # not in the first evaluation
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    monkeypatch.setattr(job, "_KNN_BATCH", {"cpu": 4})
    with monkeypatch.context() as patch:
        patch.setattr(job, "feature_batches", signalled)
        with pytest.raises(Interrupted, match="SIGTERM: stopped after step 3, saved") as caught:
            train_here(config, "imagenet")
    assert caught.value.exit_code == 128 + signal.SIGTERM
    assert [line["epoch"] for line in read_metrics(run) if line["kind"] == "knn"] == [0]
    train_here(config, "imagenet")
    assert [line["epoch"] for line in read_metrics(run) if line["kind"] == "knn"] == [0, 1]
    assert checkpoints.load(run).step == 6


def test_an_echo_of_the_first_is_not_a_second(small: TrainConfig, tmp_path: Path) -> None:
    """As where a program that started this one passes it on: the state is saved."""
    config = with_settings(small, epochs=30000, save_every=10**6, knn_every=0)
    run = tmp_path / "run"
    process = command("train", *flags(config), session=True)
    until(process, lambda: read_metrics(run))
    press(process)
    press(process)
    done = process.wait(60)
    assert done.returncode == 130 and "SIGINT: stopped after step" in done.stderr, done.stderr
    assert done.stderr.endswith(f"last.pt; --resume {run} continues from there\n")
    assert checkpoints.load(run).step >= 1


def test_elsewhere_than_in_a_run(small: TrainConfig, images: Path) -> None:
    """An evaluation ends silently."""
    run = train_here(with_settings(small, knn_every=0, max_steps=1), "imagenet")
    enlarge(images)
    process = command("eval", "knn", str(run), "--workers", "2", session=True)
    until(process, lambda: "images from" in process.messages())
    press(process)
    done = process.wait(60)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
