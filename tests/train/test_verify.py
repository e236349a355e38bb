"""``fastsiam verify``: it passes on what a run was trained on, and notices what is not its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fastsiam.config import TrainConfig
from fastsiam.config.run import VerifyConfig
from fastsiam.errors import CheckpointError, FastSiamError
from fastsiam.pipelines import Order, build_loader
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from fastsiam.train import command as train_job
from fastsiam.train.command import train_here
from fastsiam.train.verify import verify
from fastsiam.views.batch import Batch
from tests.configs import flags, with_settings
from tests.pipelines.cases import PIPELINES, readable
from tests.processes import fastsiam
from tests.ranks import fastsiam_on_ranks
from tests.train.runs import Killed, Wrapped

NOTHING = {"knn_every": 0, "tracker": "none"}
ALL = "log lines agree: images and augmentations of steps 1 to 12"


@pytest.fixture
def trained(small: TrainConfig) -> Path:
    """A run of 12 steps in 4 epochs, a log line every 2 and at the end."""
    return train_here(with_settings(small, log_every=2, **NOTHING), "imagenet")


def said(run: Path, **settings: Any) -> str:
    """Verify a run; return its messages as one text."""
    return "\n".join(verify(run, VerifyConfig(**settings)))


def lines(run: Path) -> list[tuple[Any, ...]]:
    """Return what a run's log says of steps, losses and digests."""
    names = ("step", "since", "seen", "loss")
    return [tuple(x[n] for n in names) for x in read_metrics(run) if x["kind"] == "train"]


def killed_before(kill_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process's training end before a step, as a kill ends it."""

    def kill(step: int, batch: Batch) -> None:
        if step == kill_at:
            raise Killed

    loader = build_loader
    monkeypatch.setattr(train_job, "build_loader", lambda *a, **k: Wrapped(loader(*a, **k), kill))


def change(path: Path, edit: Callable[[Any], None], *, line: int | None = None) -> None:
    """Change a JSON file, or one line of it."""
    rows = path.read_text().splitlines() if line is not None else [path.read_text()]
    values = json.loads(rows[line or 0])
    edit(values)
    rows[line or 0] = json.dumps(values)
    path.write_text("\n".join(rows) + "\n")


def test_a_run_agrees_and_is_left_as_it_was(trained: Path) -> None:
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    found = said(trained)
    assert f"6 {ALL}, recomputed from seed 0" in found
    assert "the weights after step 12 agree: SHA-256 " in found
    assert before == {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", PIPELINES)
def test_runs_by_every_pipeline(name: str, small: TrainConfig) -> None:
    data = str(readable(name, Path(small.data.data)))
    run = train_here(with_settings(small, pipeline=name, data=data, max_steps=4, **NOTHING), "demo")
    assert "4 log lines agree" in said(run)


@pytest.mark.parametrize("kill_at", [4, 8])
def test_a_resumed_run_digests_the_stretch_that_was_under_way(
    kill_at: int, small: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line every 5 steps, a checkpoint every 3: the checkpoint knows a part of the next line."""
    config = with_settings(small, log_every=5, save_every=3, **NOTHING)
    whole = train_here(with_settings(config, out=str(tmp_path / "whole")), "imagenet")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_before(kill_at, patch)
        train_here(config, "imagenet")
    run = Path(config.run.out)
    kept = checkpoints.load(run)
    assert kept.step == kill_at // 3 * 3 and kept.seen["since"] == kill_at // 5 * 5
    assert int(kept.seen["digest"], 16)
    train_here(config, "imagenet")
    assert lines(run) == lines(whole) and len(lines(run)) == 3


def test_ranks_that_ended_between_log_lines_go_on_with_all_their_parts(
    small: TrainConfig, images: Path, tmp_path: Path
) -> None:
    """Rank 0's checkpoint holds what each rank was trained on since the last line.

    An image that cannot be read, in the third step, ends two ranks with nothing more saved.
    """
    config = with_settings(
        small, pipeline="torchvision", log_every=5, save_every=1, max_steps=7, **NOTHING
    )
    whole = train_here(with_settings(config, out=str(tmp_path / "whole")), "imagenet")
    run = tmp_path / "ranks"
    config = with_settings(config, out=str(run), gpus=2)
    i = int(Order(images=24, batch=8, seed=0).indices(0, 2)[5])
    image = images / "train" / f"class{i // 8}" / f"{i % 8:03d}.jpg"
    kept = image.read_bytes()
    image.write_bytes(b"")
    fastsiam_on_ranks(2, "train", *flags(config), code=1)
    image.write_bytes(kept)
    state = checkpoints.load(run)
    assert 1 <= state.step <= 2 and state.seen["since"] == 0 and not lines(run)
    assert int(state.seen["digest"], 16)
    fastsiam_on_ranks(2, "train", *flags(config))
    assert [line[:3] for line in lines(run)] == [line[:3] for line in lines(whole)]
    assert [line[:2] for line in lines(run)] == [(5, 0), (7, 5)]
    assert "2 log lines agree: images and augmentations of steps 1 to 7" in said(run)


def test_changed_lines_and_settings_are_noticed(trained: Path, tmp_path: Path) -> None:
    def seen(values: Any) -> None:
        values["seen"] = f"{int(values['seen'], 16) ^ 1:016x}"

    def seed(values: Any) -> None:
        values["config"]["numerics"]["seed"] = 1

    def scale(values: Any) -> None:
        values["config"]["augment"]["views"][1]["scale_min"] = 0.21

    def batch(values: Any) -> None:
        values["config"]["optim"]["batch"] = 6

    changes = [("metrics.jsonl", seen, 4, "steps 7 to 8"), ("config.json", seed, None, "1 to 2")]
    changes += [("config.json", scale, None, "1 to 2"), ("config.json", batch, None, "1 to 2")]
    for number, (name, edit, line, where) in enumerate(changes):
        run = Path(shutil.copytree(trained, tmp_path / str(number)))
        change(run / name, edit, line=line)
        with pytest.raises(
            FastSiamError, match=rf"{where} of .* the log has digest [0-9a-f]{{16}}"
        ):
            said(run)


def test_changed_weights_are_noticed(trained: Path) -> None:
    file = checkpoints.last(trained)
    state = torch.load(file, weights_only=True)
    next(iter(state["model"].values()))[0] += 1e-3
    torch.save(state, file)
    with pytest.raises(CheckpointError, match=r"was changed|corrupt"):
        said(trained)


def test_a_run_that_was_shown_other_images_is_noticed(
    small: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted bug: in one step of 12 the loader gives two images each other's place."""
    right = Order.indices

    def wrong(order: Order, epoch: int, step: int) -> NDArray[np.int64]:
        index = right(order, epoch, step).copy()
        if (epoch, step) == (2, 1):
            index[[0, 5]] = index[[5, 0]]
        return index

    with monkeypatch.context() as patch:
        patch.setattr(Order, "indices", wrong)
        run = train_here(with_settings(small, log_every=4, **NOTHING), "imagenet")
    with pytest.raises(FastSiamError, match="steps 5 to 8 of "):
        said(run)
    assert "1 log line agrees: images and augmentations of steps 9 to 12" in said(run, step=9)


def test_a_step_is_listed_by_its_images(trained: Path) -> None:
    """Its eight images, as the order has them: the eighth step is the second of the third epoch."""
    head, title, *rows = said(trained, step=8).splitlines()
    assert head.startswith(
        "1 log line agrees: images and augmentations of steps 7 to 8, recomputed"
    )
    assert title.startswith("step 8, in epoch 2:")
    index = Order(images=24, batch=8, seed=0).indices(2, 1).tolist()
    assert rows == [f"{8 + row} {i} class{i // 8}/{i % 8:03d}.jpg" for row, i in enumerate(index)]
    with pytest.raises(FastSiamError, match=r"does not cover step 13, only steps 1 to 12"):
        said(trained, step=13)


def test_a_run_without_digests_says_so(trained: Path, tmp_path: Path) -> None:
    old = Path(__file__).parents[1] / "data" / "run-0.1"
    with pytest.raises(FastSiamError, match="has no digests"):
        said(old)
    with pytest.raises(FastSiamError, match=r"cannot read .*config.json"):
        said(tmp_path)


def test_an_old_run_that_went_on_is_verified_from_there(small: TrainConfig, tmp_path: Path) -> None:
    old = Path(__file__).parents[1] / "data" / "run-0.1"
    run = Path(shutil.copytree(old, tmp_path / "old"))
    train_here(with_settings(small, out=str(run), **NOTHING), "imagenet")
    found = said(run)
    assert "6 log lines agree: images and augmentations of steps 7 to 12" in found
    assert "no digest for steps 1 to 6" in found


def test_the_command(trained: Path) -> None:
    done = fastsiam("verify", str(trained))
    assert ALL in done.stdout
    change(trained / "metrics.jsonl", lambda x: x.update(seen="0" * 16), line=1)
    wrong = fastsiam("verify", str(trained), code=1)
    assert len(wrong.stderr.splitlines()) == 1 and wrong.stderr.startswith("error: steps 1 to 2 of")
