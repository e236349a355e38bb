"""DALI's errors: a bad image is left to PIL, and whatever else happens comes out as what it is."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.errors import BackendError, DataError
from fastsiam.pipelines import build_loader, dali_cropper, dali_graph
from fastsiam.pipelines.dali_backend import DaliLoader
from fastsiam.pipelines.dali_graph import (
    build_graph,
    decoded,
    no_memory,
    reason,
    refuses_an_image,
    say_what_decodes,
    without_engine,
)
from fastsiam.views.batch import crop_shapes
from tests.pipelines.cases import equal
from tests.sources import encoded, jpeg, picture

pytestmark = pytest.mark.dali

SMALL = AugmentConfig.alike(crop=16)


def text(what: str, operator: str = "MIXED operator `nvidia.dali.fn.decoders.image`") -> str:
    """Return an error's text as DALI 2.4 puts it."""
    return (
        f"Critical error in pipeline:\nError in {operator},\nwhich was used in the pipeline "
        'definition with the following traceback:\n\n  File "/x/dali_graph.py", line 10, in x\n'
        f"    fn.decoders.image(\n\nencountered:\n\n{what}\n"
        "Current pipeline object is no longer valid."
    )


RESIZE = "GPU operator `nvidia.dali.fn.resize`"
NO_MEMORY = [
    (text("Can't allocate 1073741824 bytes on device 0."), "GPU memory"),
    (text("Can't allocate 1073741824 bytes on device 0.", RESIZE), "GPU memory"),
    (text("CUDA allocation failed"), "GPU memory"),
    (text("nvImageCodec failure: '#5'"), "GPU memory"),
    ("Critical error when building pipeline:\nCUDA driver API error: out of memory", "GPU memory"),
    (text("Can't allocate 1073741824 bytes on host."), "memory"),
    (text("std::bad_alloc"), "memory"),
]
OTHERS = [
    text("CUDA runtime API error cudaErrorIllegalAddress (700):\nan illegal memory access"),
    text("CUDA driver API error CUDA_ERROR_LAUNCH_FAILED (719)", RESIZE),
    text("nvImageCodec failure: '#6'"),
    text("Failed to decode sample #1 :", RESIZE),
    "Critical error in pipeline: something new",
]


@pytest.fixture
def loader(images: Path) -> Iterator[DaliLoader]:
    data = DataConfig(data=str(images / "train"), pipeline="dali", workers=2)
    loader = build_loader(data, SMALL, batch=4)
    assert isinstance(loader, DaliLoader)
    yield loader
    loader.close()


def failing(loader: DaliLoader, call: str, message: str) -> None:
    """Have DALI fail in the second call of one of the functions of its graph."""
    dali, calls = loader._cropper._dali, iter(range(100))
    function = getattr(dali, call)

    def fail(*arguments: Any, **named: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError(message)
        return function(*arguments, **named)

    setattr(dali, call, fail)


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
    assert refuses_an_image(caught.value) and no_memory(caught.value, "", gpu=False) is None
    assert "sample #1" in reason(caught.value) or "nvImageCodec" in reason(caught.value)


def test_another_operators_error_is_none_of_an_image(loader: DaliLoader) -> None:
    """By the text of DALI that is installed here."""
    from nvidia.dali import Pipeline, fn, types

    graph = Pipeline(2, 1, None, exec_dynamic=True, prefetch_queue_depth=1)
    with graph:
        size = fn.external_source(name="size", dtype=types.FLOAT, ndim=1)
        image = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
        graph.set_outputs(fn.resize(decoded(image, gpu=False, hw_decoder_load=0), size=size))
    graph.build()
    graph.feed_input("size", [np.ones(5, np.float32)] * 2)
    with pytest.raises(RuntimeError, match=r"fn\.resize") as caught:
        fed(graph, jpeg(1), jpeg(2))
    assert not refuses_an_image(caught.value) and no_memory(caught.value, "", gpu=True) is None


@pytest.mark.parametrize(("message", "kind"), NO_MEMORY)
def test_too_little_memory_is_said_in_a_line(message: str, kind: str) -> None:
    error = RuntimeError(message)
    line = no_memory(error, "step 3 of epoch 0", gpu=True)
    assert line is not None and not refuses_an_image(error) and "\n" not in line
    assert line.startswith(f"DALI ran out of {kind} at step 3 of epoch 0 (")
    assert "lower --batch, --prefetch" in line
    assert "GPU memory" not in str(no_memory(error, "", gpu=False))


@pytest.mark.parametrize("message", OTHERS)
def test_what_is_neither_is_not_taken_for_it(message: str) -> None:
    error = RuntimeError(message)
    assert not refuses_an_image(error) and no_memory(error, "", gpu=True) is None


@pytest.mark.parametrize("call", ["outputs", "schedule_run", "feed_input"])
def test_a_loader_says_so_and_can_be_used_again(call: str, loader: DaliLoader) -> None:
    expected = list(loader.epoch(0))
    failing(loader, call, NO_MEMORY[0][0])
    with pytest.raises(
        BackendError, match=r"DALI ran out of memory at step \d of epoch 0"
    ) as found:
        list(loader.epoch(0))
    assert isinstance(found.value.__cause__, RuntimeError)
    assert all(equal(a, b) for a, b in zip(loader.epoch(0), expected, strict=True))
    failing(loader, call, OTHERS[0])
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
        list(loader.epoch(0))
    assert all(equal(a, b) for a, b in zip(loader.epoch(0), expected, strict=True))


def test_too_little_memory_for_the_graph_is_said(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Critical error when building pipeline:\nCUDA allocation failed")

    monkeypatch.setattr(dali_cropper, "build_graph", fail)
    data = DataConfig(data=str(images / "train"), pipeline="dali", workers=2)
    with pytest.raises(BackendError, match="DALI ran out of memory at the start"):
        build_loader(data, SMALL, batch=4)


def test_an_image_that_pil_takes_for_a_bomb_is_named(images: Path, loader: DaliLoader) -> None:
    """DALI would ask for all the memory of its 12 GB of pixels."""
    path = images / "train" / "class1" / "003.jpg"
    data = path.read_bytes()
    size = data.index(b"\xff\xc0") + 5
    path.write_bytes(data[:size] + b"\xff\xff\xff\xff" + data[size + 4 :])
    with pytest.raises(DataError, match=r"cannot decode .*class1/003\.jpg"):
        list(loader.epoch(0))


@pytest.mark.parametrize("gpu", [True, False])
def test_a_gpus_decoder_takes_the_load_of_the_jpeg_engine(gpu: bool) -> None:
    """DALI that is installed here knows it; without a GPU it can describe a graph for one."""
    from nvidia.dali import Pipeline, fn, types

    def described(load: float) -> bytes:
        graph = Pipeline(64, 1, None, exec_dynamic=True, prefetch_queue_depth=1)
        with graph:
            image = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
            graph.set_outputs(decoded(image, gpu=gpu, hw_decoder_load=load))
        return bytes(graph.serialize())

    plain = described(0.9)
    assert (b"mixed" in plain) == gpu and b"jpeg_fancy_upsampling" in plain
    assert (described(0.3) != plain) == gpu


@pytest.mark.parametrize("engine", [True, False])
def test_the_jpeg_engine_is_told_of_once(
    engine: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By what nvImageCodec says of it, here a stand-in."""

    class Decoder:
        def __init__(self, **_: object) -> None:
            pass

        def decode(self, stream: bytes) -> object:
            return object() if engine else None

    stand_in = SimpleNamespace(
        Decoder=Decoder, Backend=lambda kind: kind, HW_GPU_ONLY=3, CodeStream=lambda data: data
    )
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", stand_in)
    monkeypatch.setattr(sys.modules["nvidia"], "nvimgcodec", stand_in, raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    say_what_decodes.cache_clear()
    with caplog.at_level(logging.INFO, dali_graph.__name__):
        for _ in range(2):
            say_what_decodes(0, 0.9)
        say_what_decodes(0, 0.0)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "DALI decodes 90% of the JPEGs on the GPU's JPEG engine"
        if engine
        else "DALI decodes without a JPEG engine of the GPU, on its cores: nvImageCodec finds none",
        "DALI leaves the GPU's JPEG engine idle: --set dali_hw_decoder_load=0",
    ]
    say_what_decodes.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nvimagecodec_says_no() -> None:
    assert without_engine(0).startswith("nvImageCodec")
