"""What the page on many GPUs says is computed, and what is counted is what a run does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastsiam.bench.scaling import (
    LLAMA,
    OPT,
    TRAININGS,
    Cluster,
    Sizes,
    Training,
    lost,
    sent,
    sizes,
    step_seconds,
    tables,
)
from fastsiam.config import ModelConfig, TrainConfig
from tests.configs import flags, model_of, with_settings
from tests.conftest import ROOT
from tests.processes import fastsiam
from tests.rank_jobs import MODEL

PAGE = ROOT / "docs" / "scaling.md"


@pytest.mark.parametrize("number", range(4))
def test_the_page_has_what_is_computed(number: int) -> None:
    """``python -m fastsiam.bench.scaling`` prints it."""
    assert tables()[number] in PAGE.read_text()


def test_ranks_exchange_what_is_counted(ranks: Callable[[str, int], list[Any]]) -> None:
    """Of a training step on two ranks: BN's exchanges, their bytes, and those of gradients."""
    counted = sizes(MODEL)
    for forward, received, gradients in ranks("what_a_step_exchanges", 2):
        assert forward == counted.exchanges // 2 * counted.views  # not compiled: view by view
        assert received == counted.gathered(2) // 2
        assert gradients == counted.gradients


def test_a_checkpoint_is_as_large_as_counted(small: TrainConfig, tmp_path: Path) -> None:
    wide = {"width": 16, "dim": 512, "predictor_dim": 128}
    config = with_settings(small, **wide, pipeline="synthetic", max_steps=1, knn_every=0)
    fastsiam("train", *flags(config))
    size = (tmp_path / "run" / "checkpoints" / "last.pt").stat().st_size
    assert size == pytest.approx(sizes(config.model).checkpoint, rel=0.02)


def test_sizes_of_the_papers_network() -> None:
    counted = sizes(ModelConfig())
    resnet50, heads = 25_557_032 - 2_049_000, 14_691_328  # torchvision's without fc
    assert counted.parameters == pytest.approx(resnet50 + heads, abs=5000)
    assert len(counted.channels) == 53 + 4
    assert sizes(model_of(backbone="resnet18")).parameters < counted.parameters


def test_more_machines_cost_more() -> None:
    model, here = Sizes(parameters=1000, buffers=0, channels=(10, 10)), Cluster()
    assert sent(100, 2) == 100 and sent(100, 1000) == pytest.approx(200, rel=0.01)
    eight = step_seconds(Training(8, 512), model, here, grouped=False)
    assert eight > 64 / here.speed
    for run in TRAININGS[1:]:
        together, apart = (step_seconds(run, model, here, grouped=x) for x in (False, True))
        assert together > apart > run.each / here.speed
    assert LLAMA.rate < OPT.rate < 0.01
    assert lost(1, 60, model, here) > lost(1, 5, model, here) > lost(0.1, 5, model, here)
