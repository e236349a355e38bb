"""``fastsiam verify`` confirms what a run was trained on and detects any change."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fastsiam.config import TrainConfig
from fastsiam.errors import RANK_LOST, CheckpointError, FastSiamError
from fastsiam.pipelines import Order
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from tests.configs import flags, with_settings
from tests.conftest import small_config, write_data
from tests.processes import fastsiam
from tests.ranks import fastsiam_on_ranks
from tests.sources import insert_junk
from tests.train.runs import OLD_RUN, train_run, verify_run

NO_MONITORING: dict[str, Any] = {"knn_every": 0, "tracker": "none"}
ALL = "log lines agree: images and augmentations of steps 1 to 12"


@pytest.fixture(scope="module")
def logged_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps in 4 epochs, with a log line every 2 steps. Tests must not change it.

    One of its images can only be decoded by Pillow.
    """
    folder = tmp_path_factory.mktemp("logged")
    config = small_config(write_data(folder / "data"), folder / "run")
    odd = folder / "data/train/class0/000.jpg"
    odd.write_bytes(insert_junk(odd.read_bytes()))
    return train_run(config, log_every=2, **NO_MONITORING)


def test_verify_confirms_run_and_changes_nothing(logged_run: Path) -> None:
    before = {path: path.read_bytes() for path in logged_run.rglob("*") if path.is_file()}
    text = verify_run(logged_run)
    assert f"6 {ALL}, recomputed from seed 0" in text
    assert "the weights after step 12 agree: sha256:" in text
    assert before == {path: path.read_bytes() for path in logged_run.rglob("*") if path.is_file()}


def test_digests_of_all_ranks_survive_stop_between_log_lines(
    small: TrainConfig, images: Path, tmp_path: Path
) -> None:
    """Rank 0's checkpoint stores what every rank was trained on since the last log line.

    One rank cannot read an image of the third step. This ends both ranks, which save together.
    """
    config = with_settings(
        small, pipeline="torchvision", log_every=5, save_every=5, max_steps=7, **NO_MONITORING
    )

    def lines(run: Path) -> list[tuple[Any, ...]]:
        train_lines = [line for line in read_metrics(run) if line["kind"] == "train"]
        return [tuple(line[name] for name in ("step", "since", "seen")) for line in train_lines]

    reference = lines(train_run(config, out=tmp_path / "whole"))
    config = with_settings(config, gpus=2)
    run = Path(config.run.out)
    i = int(Order(images=24, batch=8, seed=0).indices(0, 2)[5])
    image = images / "train" / f"class{i // 8}" / f"{i % 8:03d}.jpg"
    content = image.read_bytes()
    image.write_bytes(b"")
    results = fastsiam_on_ranks(2, "train", *flags(config), code=1)
    image.write_bytes(content)
    assert sorted(one.returncode for one in results) == [1, RANK_LOST]
    stderr = "".join(one.stderr for one in results)
    (error,) = [line for line in stderr.splitlines() if "cannot decode" in line]
    assert f"/{image.parent.name}/{image.name}: " in error and "Traceback" not in stderr
    (saved,) = re.findall(r"saved .*last\.pt at step (\d+); pass --bad-images", stderr)
    state = checkpoints.load(run)
    assert 1 <= state.step == int(saved) <= 2 and state.seen["since"] == 0 and not lines(run)
    assert int(state.seen["digest"], 16)
    fastsiam_on_ranks(2, "train", *flags(config))
    assert lines(run) == reference and [line[:2] for line in reference] == [(5, 0), (7, 5)]
    assert "2 log lines agree: images and augmentations of steps 1 to 7" in verify_run(run)


DIGEST = "of .* the log has digest [0-9a-f]{16}"
CHANGES: list[tuple[str, Callable[[Any], None], str]] = [
    ("metrics.jsonl", lambda line: line.update(seen="0" * 16), f"steps 7 to 8 {DIGEST}"),
    (
        "metrics.jsonl",
        lambda line: line.update(step=None),
        "has an invalid line: since 6, step None; restore",
    ),
    (
        "metrics.jsonl",
        lambda line: line.update(kind=None),
        r"metrics\.jsonl has an invalid line, number 5; restore",
    ),
    (
        "config.json",
        lambda record: record["config"]["augment"]["views"][1].update(scale_min=0.21),
        f"steps 1 to 2 {DIGEST}",
    ),
    (
        "config.json",
        lambda record: record["config"]["optim"].update(batch=6),
        f"steps 1 to 2 {DIGEST}",
    ),
    (
        "config.json",
        lambda record: record["config"]["optim"].update(batch=512),
        "has batches of 512 images, but",
    ),
]
"""A file of a run, an edit to it (JSON Lines: to the fifth line), and the expected message."""


def test_verify_detects_edited_run_files(logged_run: Path, tmp_path: Path) -> None:
    for number, (name, edit, message) in enumerate(CHANGES):
        run = shutil.copytree(logged_run, tmp_path / str(number))
        text = (run / name).read_text()
        rows, line = (text.splitlines(), 4) if name == "metrics.jsonl" else ([text], 0)
        values = json.loads(rows[line])
        edit(values)
        rows[line] = json.dumps(values)
        (run / name).write_text("\n".join(rows) + "\n")
        with pytest.raises(FastSiamError, match=message):
            verify_run(run)
    stderr = fastsiam("verify", str(run), code=1).stderr
    assert stderr.startswith("error: ") and len(stderr.splitlines()) == 1
    run = shutil.copytree(logged_run, tmp_path / "weights")
    state = torch.load(checkpoints.last(run), weights_only=True)
    next(iter(state["model"].values()))[0] += 1e-3
    torch.save(state, checkpoints.last(run))
    with pytest.raises(CheckpointError, match=r"the weights in \S+last\.pt were changed"):
        verify_run(run)
    checkpoints.last(run).unlink()
    assert "the weights are not verified: " in verify_run(run)


def test_verify_detects_swapped_images(small: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader has a planted bug: in one of 12 steps it swaps two images."""
    right = Order.indices

    def wrong(order: Order, epoch: int, step: int) -> NDArray[np.int64]:
        index = right(order, epoch, step).copy()
        if (epoch, step) == (2, 1):
            index[[0, 5]] = index[[5, 0]]
        return index

    with monkeypatch.context() as patch:
        patch.setattr(Order, "indices", wrong)
        run = train_run(small, log_every=4, **NO_MONITORING)
    with pytest.raises(FastSiamError, match="steps 5 to 8 of "):
        verify_run(run)
    assert "1 log line agrees: images and augmentations of steps 9 to 12" in verify_run(run, step=9)


def test_mixture_is_not_verified_with_other_data(logged_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(logged_run, tmp_path / "run")
    record = json.loads((run / "config.json").read_text())
    record["config"]["data"]["mixed_with"] = ["b"]
    (run / "config.json").write_text(json.dumps(record))
    with pytest.raises(FastSiamError, match="--data cannot replace the data sets of a mixture"):
        verify_run(run, data=record["config"]["data"]["data"])


def test_verify_step_lists_its_images(logged_run: Path) -> None:
    """Step 8, the second of the third epoch, has eight images in the order that was drawn."""
    stdout = fastsiam("verify", str(logged_run), "--step", "8").stdout
    head, title, *rows = stdout.splitlines()[-10:]
    assert head.startswith(
        "1 log line agrees: images and augmentations of steps 7 to 8, recomputed"
    )
    assert title.startswith("step 8, in epoch 2:")
    index = Order(images=24, batch=8, seed=0).indices(2, 1).tolist()
    assert rows == [f"{8 + row} {i} class{i // 8}/{i % 8:03d}.jpg" for row, i in enumerate(index)]
    with pytest.raises(FastSiamError, match=r"does not cover step 13, only steps 1 to 12"):
        verify_run(logged_run, step=13)


def test_run_of_0_2_is_verified_from_resumed_step(small: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(FastSiamError, match=r"cannot read .*config.json"):
        verify_run(tmp_path)
    run = shutil.copytree(OLD_RUN, tmp_path / "old")
    with pytest.raises(FastSiamError, match="has no digests"):
        verify_run(run)
    text = verify_run(train_run(small, out=run, **NO_MONITORING))
    assert "6 log lines agree: images and augmentations of steps 7 to 12" in text
    assert "no digest for steps 1 to 6" in text
