"""An image is decoded once, and its crops are PIL's to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastsiam.kernels import library
from fastsiam.pipelines import headers
from tests.pipelines.cases import (
    build,
    readable,
)
from tests.processes import Forked
from tests.views.cases import UNEQUAL


@pytest.mark.parametrize(
    ("name", "decodes"),
    [("native", 48), pytest.param("ffcv", 48, marks=pytest.mark.ffcv), ("memory", 24)],
)
def test_the_engine_decodes_an_image_once(name: str, decodes: int, images: Path) -> None:
    """In each epoch; for what stays in memory, once for all of them."""
    done = Forked(count_decodes, name, str(readable(name, images / "train"))).wait()
    assert (done.returncode, done.stdout) == (0, f"{decodes}\n"), done.stderr


def count_decodes(name: str, data: str) -> None:
    """Print how many JPEGs compiled code decodes in two epochs of five views."""

    decoded: list[int] = []
    decode = headers.DECODE(headers.decoder())

    def count(*own: Any) -> int:
        decoded.append(own[1])
        return int(decode(*own))

    counted = headers.DECODE(count)
    place = library.address(counted)
    headers.decoder = lambda: place  # type: ignore[assignment]
    loader = build(name, Path(data), augment=UNEQUAL, workers=2)
    for epoch in range(2):
        assert len(list(loader.epoch(epoch))) == 3
    loader.close()
    print(len(decoded))
