"""DALI's errors: a bad image is left to PIL, and whatever else happens comes out as what it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.errors import DataError
from fastsiam.pipelines import build_loader
from fastsiam.pipelines.dali_backend import DaliLoader
from fastsiam.pipelines.dali_graph import build_graph, refuses_an_image
from fastsiam.views.batch import crop_shapes
from tests.pipelines.cases import equal
from tests.sources import encoded, jpeg, picture

pytestmark = pytest.mark.dali

SMALL = AugmentConfig.alike(crop=16)


@pytest.fixture
def loader(images: Path) -> Iterator[DaliLoader]:
    data = DataConfig(data=str(images / "train"), pipeline="dali", workers=2)
    loader = build_loader(data, SMALL, batch=4)
    assert isinstance(loader, DaliLoader)
    yield loader
    loader.close()


def fed(graph: Any, *images: bytes) -> None:
    """Have the graph decode images."""
    graph.feed_input("encoded", [np.frombuffer(image, np.uint8) for image in images])
    graph.schedule_run()
    graph.outputs()


def of_kind(sof: bytes) -> bytes:
    return jpeg(1).replace(b"\xff\xc0", b"\xff" + sof, 1)


@pytest.mark.parametrize(
    "image",
    [
        jpeg(1)[:-20],
        jpeg(1)[:200],
        np.random.default_rng(0).bytes(500),
        b"",
        encoded(picture(1), "GIF"),
        of_kind(b"\xc7"),
    ],
    ids=["truncated", "header alone", "noise", "empty", "GIF", "lossless"],
)
def test_what_the_decoder_refuses_is_told_from_the_rest(image: bytes) -> None:
    """By the text of DALI that is installed here, of its CPU decoder."""
    graph = build_graph(
        crop_shapes(SMALL, 2),
        threads=1,
        device=None,
        hw_decoder_load=0.9,
        resizes=False,
    )
    fed(graph, jpeg(1), jpeg(2))
    with pytest.raises(RuntimeError) as caught:
        fed(graph, jpeg(1), image)
    assert refuses_an_image(caught.value)


@pytest.mark.parametrize("call", ["outputs", "schedule_run", "feed_input"])
def test_another_error_comes_out_and_the_loader_can_be_used_again(
    call: str, loader: DaliLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, calls = list(loader.epoch(0)), iter(range(100))
    function = getattr(loader._cropper._dali, call)

    def fail(*arguments: Any, **named: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("CUDA runtime API error cudaErrorIllegalAddress (700)")
        return function(*arguments, **named)

    monkeypatch.setattr(loader._cropper._dali, call, fail)
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
        list(loader.epoch(0))
    assert all(equal(a, b) for a, b in zip(loader.epoch(0), expected, strict=True))


def test_an_image_that_pil_takes_for_a_bomb_is_named(images: Path, loader: DaliLoader) -> None:
    """DALI would ask for all the memory of its 12 GB of pixels."""
    path = images / "train" / "class1" / "003.jpg"
    data = path.read_bytes()
    size = data.index(b"\xff\xc0") + 5
    path.write_bytes(data[:size] + b"\xff\xff\xff\xff" + data[size + 4 :])
    with pytest.raises(DataError, match=r"cannot decode .*class1/003\.jpg"):
        list(loader.epoch(0))
