"""What is printed, and refused, before the first run of a study."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fastsiam.errors import DataError
from fastsiam.study.preparation import check
from tests.study.tiny import tiny, tiny_runs


def test_images_that_a_scale_is_not_for(
    images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another number is a warning; other classes are refused, because chance differs."""
    runs = tiny_runs(images, tmp_path / "out", tiny(), seeds=2)
    check(runs)
    assert "warning" not in capfd.readouterr().err
    check([replace(run, scale=replace(run.scale, images=10_000)) for run in runs])
    said = capfd.readouterr().err
    assert "24 training images of 3 classes; --scale cifar is for 10,000 of 3" in said
    with pytest.raises(DataError, match="of 3 classes; --scale cifar is for 24 of 100"):
        check([replace(run, scale=replace(run.scale, classes=100)) for run in runs])
