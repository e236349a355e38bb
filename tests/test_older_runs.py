"""Runs of version 0.2 can be resumed, evaluated, exported and reported; 0.1 is rejected.

Version 0.2.0 wrote ``tests/data/run-0.2`` with the images of ``write_images``, up to step 6 of 12.
``metrics-whole.jsonl`` has the metrics of that version after it had resumed the run to the end.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fastsiam.config import TrainConfig
from fastsiam.errors import CheckpointError
from fastsiam.interchange import load_pretrained
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.checkpoint import weights_hash
from fastsiam.run.log import read_metrics
from tests.configs import with_settings
from tests.processes import fastsiam
from tests.train.runs import OLD_RUN, train_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD_RUN, tmp_path / "run"))


def test_settings_of_0_2_run_are_read(small: TrainConfig, run: Path) -> None:
    recorded = TrainConfig.from_dict(json.loads((run / "config.json").read_text())["config"])
    assert recorded == checkpoints.load(run).config
    assert recorded.run.rank_timeout == 600  # the default of 0.2
    local_settings = {"data": str(small.data.root), "out": small.run.out, "max_steps": 0}
    local_settings |= {"rank_timeout": small.run.rank_timeout}
    assert with_settings(recorded, **local_settings) == small


def test_run_of_0_1_is_rejected(run: Path, small: TrainConfig) -> None:
    """It configured views and heads in ``augment`` and ``model``, and had no methods."""
    file = run / "config.json"
    record = json.loads(file.read_text())
    record["config"]["model"] = {"backbone": "resnet10", "dim": 16}
    file.write_text(json.dumps(record))
    for command in (["train", "--resume", str(run)], ["config", "--config", str(run)]):
        stderr = fastsiam(*command, code=2).stderr
        assert f"{file}: it was written by fastsiam 0.1, which is too old" in stderr
    assert "which is too old" in fastsiam("report", str(run), code=1).stderr
    state = torch.load(checkpoints.last(run))
    torch.save(state | {"format": 1}, checkpoints.last(run))
    file.unlink()
    settings: Any
    for settings in ({"out": run}, {"resume": run}, {"init": run}):
        with pytest.raises(
            CheckpointError, match=r"last.pt is .* too old: .* version 0\.2 and newer"
        ):
            train_run(small, **settings)


def test_resumed_0_2_run_reproduces_metrics(small: TrainConfig, run: Path) -> None:
    with pytest.raises(CheckpointError, match=r"crop: 16 -> 20"):
        train_run(small, out=run, crop=20, eval_resize=20)
    train_run(small, out=run)
    assert checkpoints.load(run).step == 12
    expected = [json.loads(x) for x in (OLD_RUN / "metrics-whole.jsonl").read_text().splitlines()]
    lines = read_metrics(run)
    assert [line["kind"] for line in lines] == [line["kind"] for line in expected]
    for ours, theirs in zip(lines, expected, strict=True):
        if theirs["kind"] == "train":
            for name in ("loss", "z_std", "rank", "lr"):
                rounding = 1e-3 * theirs[name] if name == "rank" else 0.0
                assert ours[name] == pytest.approx(theirs[name], abs=max(2e-3, rounding)), name
        else:
            assert ours["epoch"] == theirs["epoch"]


def test_new_run_can_branch_or_init_from_0_2_run(
    small: TrainConfig, run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    branch = train_run(small, out=tmp_path / "branch", resume=run, max_steps=7)
    assert checkpoints.load(branch).step == 7
    train_run(small, out=tmp_path / "fresh", init=run, max_steps=1)
    stderr = capfd.readouterr().err
    assert "starts from ResNet-10" in stderr and "randomly initialised:" not in stderr


def test_run_of_0_2_is_evaluated_exported_and_reported(images: Path, run: Path) -> None:
    knn = fastsiam("eval", "knn", str(run), "--data", str(images), "--device", "cpu")
    assert "after 2 epochs" in knn.stdout
    weights = run / "weights.safetensors"
    wide = fastsiam("export", str(run), "--format", "torchvision", "--out", str(weights), code=1)
    assert "width 4: torchvision's ResNets are 64 wide" in wide.stderr
    fastsiam("export", str(run), "--format", "plain", "--out", str(weights))
    assert load_pretrained(weights).network().features == 32
    fastsiam("report", str(run))
    page = (run / "report.html").read_text()
    assert "predictor-dim" in page or "predictor_dim" in page
    pretrained = load_pretrained(run)
    assert pretrained.epoch == 2 and pretrained.network().features == 32


def test_records_of_0_2_match_their_weights() -> None:
    """The hash is that of version 0.2, which its records contain."""
    expected = "sha256:78b8d6a095dc55b55c619d22f6b32cb72db7de2ff5247581e47217f26b752cf5"
    assert weights_hash(load_pretrained(OLD_RUN).network().state_dict()) == expected
