"""The methods' variants by their commands: trained, resumed, evaluated, exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastsiam.config import TrainConfig
from fastsiam.interchange import load_pretrained
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import read_metrics
from tests.configs import flags, with_settings
from tests.methods.variants import EVERY, RELATED
from tests.processes import fastsiam
from tests.ranks import fastsiam_on_ranks
from tests.tiers import rest_slow

NAMES = [
    "fastsiam 4",
    "2 steps",
    "average",
    "no predictor",
    "fixed predictor",
    "no BN",
    "affine, BN on all",
    "asymmetric 2x",
    "momentum encoder",
    *RELATED,
]


@pytest.mark.parametrize("name", rest_slow(NAMES))
def test_it_is_trained_resumed_evaluated_and_exported(
    name: str, small: TrainConfig, tmp_path: Path
) -> None:
    variant, run, out = EVERY[name], tmp_path / "run", tmp_path / "plain.pt"
    config = variant.applied(small, epochs=2, lr=0.1, knn_every=1)
    fastsiam("train", *flags(with_settings(config, max_steps=4)))
    assert checkpoints.load(run).step == 4
    done = fastsiam("train", *flags(config))
    assert "step 6 of 6" in done.stderr
    kinds = [line["kind"] for line in read_metrics(run)]
    assert kinds.count("train") == 6 and kinds.count("knn") == 3
    assert "after 2 epochs" in fastsiam("eval", "knn", str(run), "--k", "5").stdout
    fastsiam("export", str(run), "--format", "plain", "--out", str(out))
    card = out.with_name("plain.pt.md").read_text()
    assert variant.method.title in card
    trained, exported = load_pretrained(run).network(), load_pretrained(out).network()
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(exported(images), trained(images), atol=0, rtol=0)


KEEPING = ["average, 2 steps, asymmetric 2x", "mocov2", "swav, queue", "byol"]


@pytest.mark.parametrize(
    ("name", "first", "second"),
    rest_slow([(name, *order) for order in ((1, 2), (2, 1)) for name in KEEPING], fast=2),
)
def test_it_goes_on_over_another_number_of_ranks(
    name: str, first: int, second: int, small: TrainConfig, tmp_path: Path
) -> None:
    """An epoch on some ranks and the next on others: rows, queues and encoders of one process."""
    config = EVERY[name].applied(small, epochs=2, lr=0.1, knn_every=0)
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    fastsiam("train", *flags(config), "--out", str(whole))
    for world, steps in ((first, 3), (second, 0)):
        part = with_settings(config, max_steps=steps, gpus=world, out=str(moved))
        fastsiam_on_ranks(world, "train", *flags(part))
        if "averages" in (state := checkpoints.load(moved).model):
            assert state["averages"].abs().sum(1).min() > 0
    expected, found = checkpoints.load(whole), checkpoints.load(moved)
    assert expected.step == found.step == 6
    torch.testing.assert_close(found.model, expected.model, atol=1e-3, rtol=1e-3)
