"""A user-defined method needs one file and one line of registration; everything else works."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fastsiam import cli
from fastsiam.config import METHOD_CONFIGS, ModelConfig, TrainConfig
from fastsiam.config.settings_files import RunSettings
from fastsiam.config.train import differences
from fastsiam.errors import CheckpointError, DataError
from fastsiam.interchange import load_pretrained
from fastsiam.methods import Output
from fastsiam.run import checkpoint as checkpoints
from tests.configs import with_settings
from tests.conftest import ROOT
from tests.methods.barlow_twins import BarlowTwins, BarlowTwinsConfig
from tests.methods.linear import batch_of, build
from tests.train.runs import assert_same_runs, train_run, train_until_kill


def test_loss_equals_paper_formula() -> None:
    method = build(BarlowTwinsConfig(dim=6))
    batch = batch_of()
    loss = method(batch.views, batch.index).loss.item()
    with torch.no_grad():
        z = [method.projector(method.backbone(view)).numpy() for view in batch.views]
    first, second = ((x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) for x in z)
    correlation = first.T @ second / len(first)
    weights = np.where(np.eye(6) == 1, 1.0, 5e-3)
    assert loss == pytest.approx((weights * (correlation - np.eye(6)) ** 2).sum(), rel=1e-5)


def test_user_method_resumes_after_kill_and_exports(
    small: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each forward pass adds noise from torch's generator, whose state must be restored."""
    forward = BarlowTwins.forward

    def noisy(self: BarlowTwins, views: tuple[Tensor, ...], index: Tensor) -> Output:
        return forward(self, tuple(view + torch.randn_like(view) for view in views), index)

    monkeypatch.setattr(BarlowTwins, "forward", noisy)
    monkeypatch.setitem(METHOD_CONFIGS, BarlowTwinsConfig.name, BarlowTwinsConfig)
    method = BarlowTwinsConfig(dim=16)
    model = ModelConfig(backbone="resnet10", stem="cifar", width=4, method=method)
    config = replace(with_settings(small, knn_every=0, save_every=1), model=model)
    assert TrainConfig.from_dict(config.to_dict()) == config
    changed = differences(config, with_settings(config, redundancy=0.1))
    assert changed == {"redundancy": (5e-3, 0.1)}
    reference = train_run(config, out=tmp_path / "whole")
    assert_same_runs(train_run(config, out=train_until_kill(config, 5)), reference)
    file = tmp_path / "plain.pt"
    cli.app(
        ["export", str(reference), "--format", "plain", "--out", str(file)], standalone_mode=False
    )
    with pytest.raises(CheckpointError, match="contains no predictor"):
        load_pretrained(reference).part("predictor")
    train_run(small, knn_every=0, max_steps=1, init=reference, width=4, out=tmp_path / "simsiam")
    assert "randomly initialised: projector, predictor" in capsys.readouterr().err
    pretrained = load_pretrained(file).part("backbone")
    expected = checkpoints.load(reference).model
    assert pretrained and all(
        torch.equal(value, expected[key]) for key, value in pretrained.items()
    )
    monkeypatch.delitem(METHOD_CONFIGS, BarlowTwinsConfig.name)
    message = r"^cannot read .*: unknown method 'barlow-twins'; start the program that registers it"
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(reference)
    with pytest.raises(DataError, match=message):
        RunSettings.read(reference)


METHOD = """
from fastsiam.config import METHOD_CONFIGS
from tests.methods.barlow_twins import BarlowTwinsConfig

METHOD_CONFIGS["barlow-twins"] = BarlowTwinsConfig
"""
SCRIPT = """
import own_method
from fastsiam.cli import main

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_user_script_trains_and_resumes_on_two_ranks(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks run the script, which imports the method that is beside it, or the module.

    Two ranks resume as one whole run.
    """
    monkeypatch.setitem(METHOD_CONFIGS, BarlowTwinsConfig.name, BarlowTwinsConfig)
    (tmp_path / "own_method.py").write_text(METHOD)
    script, package = tmp_path / "run.py", tmp_path / "package"
    package.mkdir()
    for path in (script, package / "run.py"):
        path.write_text(SCRIPT)

    def run(*arguments: object, program: Sequence[object] = (script,)) -> str:
        words = [sys.executable, *map(str, (*program, *arguments))]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        result = subprocess.run(
            words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600
        )
        assert result.returncode == 0, result.stderr
        return result.stdout + result.stderr

    settings = ["--recipe", "barlow-twins", "--data", images, "--batch", 8, "--stem", "cifar"]
    settings += ["--backbone", "resnet10", "--width", 4, "--crop", 16, "--epochs", 2, "--dim", 16]
    settings += ["--device", "cpu", "--gpus", 2, "--workers", 1, "--tracker", "none"]
    settings += ["--knn-every", 0, "--log-every", 1, "--compile", "off"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run("train", *settings, "--out", whole)
    run("train", *settings, "--out", resumed, "--max-steps", 2)
    module = ["-m", "package.run"]
    output = run("train", "--resume", resumed, "--max-steps", 0, program=module)
    config = load_pretrained(whole).config
    assert config is not None and config.optim.lr == 0.2  # the recipe's
    assert "Barlow Twins" in output and "resuming after step 2" in output
    assert_same_runs(resumed, whole)
    weights = tmp_path / "plain.pt"
    run("export", resumed, "--format", "plain", "--out", weights)
    assert load_pretrained(weights).part("backbone")
