"""What tests of detection share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluate.detection.made import make_detection_set


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The made set, small: folders voc and coco. Tests that change it work on a copy."""
    folder = tmp_path_factory.mktemp("detection")
    make_detection_set(folder, train=12, val=6)
    return folder
