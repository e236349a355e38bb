"""The examples of docs/examples work, from a user's folder, with the pipelines that they name."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, write_images
from tests.pipelines.cases import NEEDS, readable

PIPELINES = [pytest.param(n, marks=NEEDS.get(n, [])) for n in ("torchvision", "ffcv", "dali")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("examples") / "train", classes=3, each=16, side=40)


def example(name: str) -> Any:
    return runpy.run_path(str(ROOT / "docs" / "examples" / name))["main"]


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_plain_loop(pipeline: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("plain_loop.py")(str(readable(pipeline, data)), pipeline, epochs=8, crop=32)
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()[-8:]]
    assert min(losses[1:]) < losses[0] - 0.05  # it learns


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_lightning(pipeline: str, data: Path) -> None:
    pytest.importorskip("lightning")
    loss = example("lightning_module.py")(
        str(readable(pipeline, data)), pipeline, epochs=3, crop=32
    )
    assert -1 <= loss < -0.05  # it learns: 0 is where it begins
