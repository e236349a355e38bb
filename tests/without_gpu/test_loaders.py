"""What loaders return with a fake GPU: devices and dtypes of batches.

Images are decoded for real, but kernels are not launched. DALI cannot use torch's fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock, PropertyMock, patch

import pytest
import torch
from torch.utils.data import DataLoader

from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.errors import BackendError
from fastsiam.pipelines import build_eval_loader, build_loader, engine, lightly_batch
from fastsiam.pipelines.store.base import warn_once
from tests.conftest import import_or_skip
from tests.pipelines.cases import SMALL, make_readable
from tests.views.cases import UNEQUAL

from .conftest import Launch
from .fake_gpu import Gpu, TritonDriver

# torch installs Triton where CUDA GPUs are supported.
import_or_skip("triton", allow_module_level=True)


@pytest.fixture(autouse=True)
def native_without_threads(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute each batch in the calling thread: torch's fake tensors work in a single thread."""
    monkeypatch.setattr(
        engine, "prefetch_map", lambda make, tasks, *, count: (make(task) for task in tasks)
    )


def watched(batches: Iterator[Any], gpu: Gpu) -> Iterator[Any]:
    """Yield batches and check that none makes the host wait."""
    while True:
        with gpu.watched():
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


@pytest.mark.parametrize(
    ("pipeline", "dtype"),
    [
        ("native", torch.bfloat16),
        ("memory", torch.float32),
        ("torchvision", torch.bfloat16),
        pytest.param("ffcv", torch.float32, marks=pytest.mark.ffcv),
    ],
)
def test_loaders_return_valid_gpu_batches(
    pipeline: Any, dtype: torch.dtype, images: Path, gpu: Gpu, launches: list[Launch]
) -> None:
    """Two epochs reuse buffers without a wait. The memory pipeline frees unused GPU memory."""
    augment = UNEQUAL if dtype == torch.bfloat16 else AugmentConfig.alike(crop=16)
    data = DataConfig(
        data=str(make_readable(pipeline, images / "train")), pipeline=pipeline, workers=0
    )
    with closing(build_loader(data, augment, batch=4, device="cuda", dtype=dtype)) as loader:
        seen = 0
        for epoch in range(2):
            for batch in watched(loader.epoch(epoch), gpu):
                for view, settings in zip(batch.views, augment.views, strict=True):
                    assert view.shape == (4, 3, settings.crop, settings.crop)
                    assert view.is_cuda and view.dtype == dtype
                    assert view.is_contiguous(memory_format=torch.channels_last)
                for numbers in (batch.index, batch.label):
                    assert numbers.shape == (4,) and numbers.is_cuda
                    assert numbers.dtype == torch.int64
                seen += 1
        assert seen == 2 * loader.steps == 12
        assert bool(launches) == (pipeline != "torchvision")  # here PIL computes the views
    assert gpu.empty_cache.called == (pipeline == "memory")


@pytest.mark.usefixtures("gpu")
def test_prefetch_without_effect_on_gpu_causes_warning(
    images: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    for pipeline in ("native", "memory"):
        data = DataConfig(data=str(images / "train"), pipeline=pipeline, workers=0, prefetch=3)
        build_loader(data, SMALL, batch=4, device="cuda").close()
    assert caplog.messages == ["--prefetch has no effect with --pipeline memory on a GPU"]


@pytest.mark.usefixtures("launches")
def test_looking_up_names_does_not_wait(images: Path, gpu: Gpu) -> None:
    data = DataConfig(data=str(images / "train"), pipeline="native", workers=0)
    with closing(build_loader(data, SMALL, batch=4, device="cuda")) as loader:
        batch = next(loader.epoch(0))
        with gpu.watched():
            *_, names = lightly_batch(batch)
            assert len(names) == 4 and all(names)
            parts = batch.to(batch.index.device).chunks(2)
            assert [part.names for part in parts] == [names[:2], names[2:]]


def test_dataloader_starts_with_loader_gpu_current(
    images: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DataLoader's thread uses the GPU that is current when an epoch starts."""
    begin, current = DataLoader.__iter__, []

    def begin_and_note(loader: Any) -> Any:
        current.append(gpu.is_current)
        return begin(loader)

    monkeypatch.setattr(DataLoader, "__iter__", begin_and_note)
    data = DataConfig(data=str(images / "train"), pipeline="torchvision", workers=0)
    loader = build_loader(data, AugmentConfig.alike(crop=16), batch=4, device="cuda")
    next(loader.epoch(0))
    assert current == [True] and not gpu.is_current
    loader.close()


def test_missing_compiler_raises_backend_error(images: Path, gpu: Gpu) -> None:
    """Triton compiles C code before its first kernel; a later failure would end a run."""
    data = DataConfig(data=str(images / "train"), pipeline="native", workers=0)
    failing = PropertyMock(side_effect=RuntimeError("Failed to find C compiler."))
    message = r"\(Failed to find C compiler\.\): install a C compiler .*, or pass --pipeline torch"
    refused = pytest.raises(BackendError, match=message)
    with patch.object(TritonDriver, "utils", failing), refused:
        build_loader(data, AugmentConfig.alike(crop=16), batch=4, device="cuda")


def test_eval_loader_returns_valid_gpu_batches(
    images: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second pass comes from the cache and has the same properties.

    All copies use one stream, because the allocator caches freed memory per stream.
    """
    streams = Mock(side_effect=torch.cuda.Stream)
    monkeypatch.setattr(torch.cuda, "Stream", streams)
    data = DataConfig(data=str(images / "train"), pipeline="native", workers=0)
    loader = build_eval_loader(
        data, "train", AugmentConfig.alike(crop=16), resize=20, batch=8, device="cuda",
        dtype=torch.bfloat16,
    )  # fmt: skip
    for _ in range(2):
        batches = list(watched(iter(loader), gpu))
        assert len(batches) == 3
        for batch in batches:
            assert batch.image.shape == (8, 3, 16, 16) and batch.image.dtype == torch.bfloat16
            assert batch.image.is_contiguous(memory_format=torch.channels_last)
            for tensor in (batch.image, batch.label, batch.index):
                assert tensor.is_cuda and len(tensor) == 8
    streams.assert_called_once()
