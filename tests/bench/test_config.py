"""Settings that make no sense are refused."""

from __future__ import annotations

from typing import Any

import pytest

from fastsiam.bench.config import BenchConfig


@pytest.mark.parametrize(
    "settings",
    [
        {"pipelines": "torchvision,ffvc"},
        {"pipelines": "dali,"},
        {"stored": "raw"},
        {"variants": "fast"},
        {"peers": "lightning"},
        {"recipe": "nothing"},
        {"backbone": "vit"},
        {"values": "1,x"},
        {"repeats": 0},
        {"batch": 1},
        {"crop": 2},
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        BenchConfig(**settings)
