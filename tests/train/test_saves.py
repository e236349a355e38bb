"""Runs whose saves fail, or that have too little time to save."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
import torch

from fastsiam.config import TrainConfig
from fastsiam.errors import CheckpointError
from fastsiam.run import checkpoint as checkpoints
from fastsiam.train.command import train_here
from tests.configs import with_settings
from tests.processes import Forked
from tests.tiers import rest_slow
from tests.train.runs import history, same_state


def damage(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(
    small: TrainConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run says so, continues bit for bit, and keeps the damaged file aside."""
    config = with_settings(small, save_every=2, knn_every=0)
    whole = train_here(with_settings(config, out=str(tmp_path / "whole")), "imagenet")
    run = train_here(with_settings(config, max_steps=7), "imagenet")
    damage(checkpoints.last(run))
    capfd.readouterr()
    train_here(config, "imagenet")
    said = capfd.readouterr().err
    assert "last.pt is corrupt: resuming from the previous one, at step 6" in said
    assert history(run) == history(whole)
    assert same_state(checkpoints.load(run).model, checkpoints.load(whole).model)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "last.pt",
        "last.pt.damaged",
        "previous.pt",
    ]


def test_two_damaged_checkpoints_are_an_error(small: TrainConfig) -> None:
    config = with_settings(small, save_every=2, knn_every=0)
    run = train_here(with_settings(config, max_steps=4), "imagenet")
    for path in (checkpoints.last(run), checkpoints.previous(run)):
        damage(path)
    with pytest.raises(CheckpointError, match=r"last\.pt: it is corrupt"):
        train_here(config, "imagenet")


def test_one_that_cannot_be_read_now_is_not_put_aside(
    small: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a file server does not answer: nothing of it is lost."""
    config = with_settings(small, save_every=2, knn_every=0)
    run = train_here(with_settings(config, max_steps=4), "imagenet")

    def lost(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", lost)
        with pytest.raises(CheckpointError, match=r"cannot read .*last\.pt: Stale file handle"):
            train_here(config, "imagenet")
    train_here(config, "imagenet")
    assert [step for step, *_ in history(run)] == [*range(1, 13)]


def killed_in_a_save(config: TrainConfig, at: int, has_links: bool) -> None:
    """Train, and be killed when half of a checkpoint is written, or before it gets its name."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not has_links:
        os.link = refuse  # type: ignore[assignment]
    write, replace_file, saves = torch.save, os.replace, iter(range(100))

    def save(state: object, path: Path) -> None:
        write(state, path)
        if at == 0 and next(saves) == 2:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    def rename(source: Path, target: Path) -> None:
        if at and str(target).endswith(("previous.pt", "last.pt")) and next(saves) == 2 + at:
            os.kill(os.getpid(), signal.SIGKILL)
        replace_file(source, target)

    torch.save, os.replace = save, rename  # type: ignore[assignment]
    train_here(config, "imagenet")


@pytest.mark.parametrize(
    ("at", "has_links"),
    rest_slow([(0, True), (2, False), (1, True), (1, False), (2, True)], fast=2),
)
def test_killed_inside_a_save_it_goes_on_bit_for_bit(
    at: int, has_links: bool, small: TrainConfig, tmp_path: Path
) -> None:
    config = with_settings(small, save_every=2, knn_every=0)
    whole = train_here(with_settings(config, out=str(tmp_path / "whole")), "imagenet")
    killed = Forked(killed_in_a_save, config, at, has_links)
    assert killed.wait(120).returncode == -signal.SIGKILL
    run = Path(config.run.out)
    assert len(history(run)) < 12
    train_here(config, "imagenet")
    assert history(run) == history(whole)
    assert same_state(checkpoints.load(run).model, checkpoints.load(whole).model)
    left = {path.name for path in (run / "checkpoints").iterdir()}
    assert left == {"last.pt", "previous.pt"}
