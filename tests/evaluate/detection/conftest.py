"""Fixtures of the detection tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluate.detection.generated_set import make_detection_set


@pytest.fixture(scope="session")
def detection_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small generated set in folders voc and coco. Tests that modify it work on a copy."""
    folder = tmp_path_factory.mktemp("detection")
    make_detection_set(folder, train=12, val=6)
    return folder
