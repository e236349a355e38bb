"""Sheets of images and their views, with columns named after the pipelines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fastsiam.config import DataConfig, TrainConfig
from fastsiam.contact_sheets import Captioned
from fastsiam.errors import DataError
from fastsiam.report import view_sheet
from fastsiam.report.view_sheet import show_views
from tests.processes import fastsiam

FEW: dict[str, Any] = {"images": 2, "epoch": 0, "seed": 0}


def pipeline_configs(small: TrainConfig, *pipelines: Any) -> list[DataConfig]:
    return [DataConfig(data=small.data.data, pipeline=name, workers=0) for name in pipelines]


def test_columns_are_named_after_pipelines(
    small: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def note(groups: list[list[Captioned]], *, columns: int, side: int) -> Image.Image:
        names.extend(name for _, name, _ in groups[0][1:])
        return Image.new("RGB", (1, 1))

    monkeypatch.setattr(view_sheet, "picture_grid", note)
    show_views(pipeline_configs(small, "torchvision", "memory"), small.augment, **FEW)
    assert names == ["torchvision 1", "torchvision 2", "memory 1", "memory 2"]


def test_views_cover_all_data_sets_of_mixture(small: TrainConfig) -> None:
    mixture = [replace(data, mixed_with=(data.data,)) for data in pipeline_configs(small, "native")]
    _, record, _ = show_views(mixture, small.augment, images=48, epoch=0, seed=0)
    assert sorted(row["index"] for row in record) == list(range(48))


def test_views_reject_pipeline_that_cannot_read_data(small: TrainConfig, tmp_path: Path) -> None:
    """The synthetic pipeline has no images, and FFCV does not read image folders."""
    with pytest.raises(DataError, match=r"^the synthetic pipeline has no images to show$"):
        show_views(pipeline_configs(small, "torchvision", "synthetic"), small.augment, **FEW)
    out = tmp_path / "v.png"
    flags = ["--data", small.data.data, "--recipe", "cifar10", "--out", str(out)]
    bad = fastsiam("views", "--pipeline", "torchvision,ffcv", *flags, code=1)
    assert bad.stderr.count("\n") == 1 and not out.exists()
    inside = str(Path(small.data.data) / "new" / "v.png")
    refused = fastsiam("views", *flags, "--out", inside, code=1)
    assert "is in the folder of images" in refused.stderr and not Path(inside).exists()
    result = fastsiam("views", "--pipeline", "torchvision", *flags)
    assert out.is_file() and "pipeline torchvision, epoch 0" in result.stdout
