"""The tables of docs/scaling.md are computed by the script, whose counts match a real run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastsiam.config import TrainConfig
from tests.configs import TINY, flags, with_settings
from tests.conftest import ROOT
from tests.processes import fastsiam


@pytest.fixture(scope="module")
def scaling() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "docs/scripts/scaling.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "scaling", module)  # dataclasses look the module up there
        spec.loader.exec_module(module)
        yield module


def test_scaling_page_contains_computed_tables(scaling: Any) -> None:
    page = (ROOT / "docs" / "scaling.md").read_text()
    for table in scaling.tables():
        assert table in page


def test_predicted_communication_matches_training_step(
    scaling: Any, ranks: Callable[[str, int], list[Any]]
) -> None:
    """In a training step on two ranks: BN's exchanges, their bytes, and bytes of gradients."""
    counted = scaling.sizes(TINY)
    for forward, received, gradients in ranks("count_step_exchanges", 2):
        assert forward == counted.exchanges // 2 * counted.views  # uncompiled: view by view
        assert received == counted.statistics // 2
        assert gradients == counted.gradients


def test_predicted_checkpoint_size_matches_run(
    scaling: Any, small: TrainConfig, tmp_path: Path
) -> None:
    wide = {"width": 16, "dim": 512, "predictor_dim": 128}
    config = with_settings(small, **wide, pipeline="synthetic", max_steps=1, knn_every=0)
    fastsiam("train", *flags(config))
    size = (tmp_path / "run" / "checkpoints" / "last.pt").stat().st_size
    assert size == pytest.approx(scaling.sizes(config.model).checkpoint, rel=0.02)
