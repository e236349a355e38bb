"""What tests of detection share."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import skip
from tests.evaluate.detection.made import make_detection_set


@pytest.fixture
def coco() -> None:
    if find_spec("pycocotools") is None:
        skip("needs pycocotools: pip install 'fastsiam[detection]'")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The made set, small: folders voc and coco. Tests that change it work on a copy."""
    folder = tmp_path_factory.mktemp("detection")
    make_detection_set(folder, train=12, val=6)
    return folder
