"""PIL in loader processes: torchvision's own pixels, in parts that shared memory has room for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision.transforms import functional as TF

from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.errors import BackendError, DataError
from fastsiam.pipelines import (
    Order,
    build_loader,
    loader_processes,
    open_store,
)
from fastsiam.pipelines.loader_processes import images_of_an_item
from fastsiam.pipelines.loaders import take_over
from fastsiam.pipelines.torchvision_backend import TorchvisionLoader, apply_view, cut, put_together
from fastsiam.views.batch import Batch, crop_shapes
from fastsiam.views.draws import draw_views
from fastsiam.views.photometric import normalized
from fastsiam.views.photometric.operations import in_views_order
from tests.pipelines.cases import equal
from tests.views.cases import UNEQUAL

PAPER = crop_shapes(AugmentConfig(), 512)
MIB = 2**20


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Have so many bytes of shared memory free."""

    def set_free(amount: int | None) -> None:
        monkeypatch.setattr(loader_processes, "_free_bytes", lambda: amount)

    yield set_free


def opened(root: Path, **own: Any) -> TorchvisionLoader:
    data = DataConfig(data=str(root), pipeline="torchvision", workers=own.pop("workers", 2))
    loader = build_loader(data, UNEQUAL, batch=8, **own)
    assert isinstance(loader, TorchvisionLoader)
    return loader


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_level_is_normalised_as_torchvision_does(dtype: torch.dtype) -> None:
    """To the last bit of float32, and then rounded."""
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, 2)
    config = AugmentConfig()
    theirs = TF.normalize(TF.to_tensor(levels), list(config.mean), list(config.std)).to(dtype)
    ours = normalized(torch.from_numpy(levels)[None], config, dtype=dtype)
    assert ours.dtype == dtype and ours.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(ours[0], theirs)


@pytest.mark.parametrize("workers", [0, 2])
def test_views_are_torchvisions_to_the_last_bit(workers: int, images: Path) -> None:
    """Each as ``ToTensor`` and ``Normalize`` make it of the PIL image."""
    store = open_store(images / "train", "train")
    order = Order(images=24, batch=8, seed=0)
    loader = opened(images / "train", workers=workers)
    for step, batch in enumerate(loader.epoch(1)):
        index = order.indices(1, step)
        decoded: list[Image.Image] = [store.decode(i) for i in index.tolist()]
        size = [(image.height, image.width) for image in decoded]
        params = draw_views(UNEQUAL, seed=0, epoch=1, index=index, size=size)
        for number, views in enumerate(batch.views):
            for row, image in enumerate(decoded):
                made = TF.to_tensor(apply_view(image, params, number, row, UNEQUAL))
                made = TF.normalize(made, list(UNEQUAL.mean), list(UNEQUAL.std))
                assert torch.equal(views[row], made)
    loader.close()


@pytest.mark.parametrize("workers", [1, 2, 3, 16, 200])
@pytest.mark.parametrize("amount", [64 * MIB, 2**30, 2**34, None])
def test_what_can_wait_is_bounded(workers: int, amount: int | None, free: Any) -> None:
    free(amount)
    least = 2 * workers * 2 * 224 * 224 * 3
    if amount is not None and least > amount:
        with pytest.raises(BackendError, match=r"has 64\.0 MiB free, and 200 loader"):
            images_of_an_item(PAPER, workers=workers)
        return
    images = images_of_an_item(PAPER, workers=workers)
    assert 1 <= images <= 512
    assert images * least <= max(least, min(2**30, (amount or 2**40) // 2))
    assert images == 512 or (images + 1) * least > min(2**30, (amount or 2**40) // 2)


def test_ranks_share_the_memory(free: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    free(512 * MIB)
    alone = images_of_an_item(PAPER, workers=16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert images_of_an_item(PAPER, workers=16) == alone // 8
    free(64 * MIB)
    with pytest.raises(BackendError) as caught:
        images_of_an_item(PAPER, workers=16)
    assert str(caught.value) == (
        "/dev/shm has 64.0 MiB free, and 16 loader processes of each of 8 ranks need at least "
        "73.5 MiB: give a container more of it (docker run --shm-size=8g), choose --workers 13, "
        "or --pipeline native, which works in threads"
    )


def test_without_processes_nothing_is_shared(free: Any) -> None:
    free(0)
    assert images_of_an_item(PAPER, workers=0) == 512


def test_too_little_memory_is_said_before_a_process_starts(images: Path, free: Any) -> None:
    free(1000)
    with pytest.raises(BackendError, match=r"/dev/shm has 0\.0 MiB free, and 2 loader processes"):
        opened(images / "train")


@pytest.mark.parametrize("images_each", [1, 3, 5, 7, 8])
def test_a_batch_is_cut_into_like_parts_in_order(images_each: int) -> None:
    parts = cut(np.arange(7), images_each)
    assert np.concatenate(parts).tolist() == list(range(7))
    assert len(parts) == math.ceil(7 / images_each)
    assert max(map(len, parts)) <= images_each and len({len(part) // 2 for part in parts}) <= 2


def in_parts(free: Any, images: int, *, workers: int = 2) -> None:
    """Leave room for items of so many images."""
    each = sum(map(math.prod, crop_shapes(UNEQUAL, 1)))
    free(2 * workers * 2 * images * each)


@pytest.mark.parametrize("images_each", [1, 3, 5])
def test_parts_make_the_same_batches(images_each: int, images: Path, free: Any) -> None:
    """From any step on, and after an epoch that was left in the middle of a batch."""
    expected: list[Batch] = list(opened(images / "train", workers=0).epoch(1))
    in_parts(free, images_each)
    loader = opened(images / "train")
    assert sum(1 for _ in loader._tasks) == 3 * math.ceil(8 / images_each)
    next(loader.epoch(5))
    for skip in range(4):
        found = list(loader.epoch(1, skip=skip))
        assert all(equal(a, b) for a, b in zip(found, expected[skip:], strict=True))
    loader.close()


def test_an_error_in_a_part_comes_at_its_batch(images: Path, free: Any) -> None:
    in_parts(free, 3)
    loader = opened(images / "train")
    order = Order(images=24, batch=8, seed=0)
    (images / "train" / "class1" / "003.jpg").write_bytes(b"broken")
    steps = next(step for step in range(3) if 11 in order.indices(4, step))
    got = []
    with pytest.raises(DataError, match=r"cannot decode .*class1/003\.jpg"):
        for batch in loader.epoch(4):
            got.append(batch)
    assert len(got) == steps
    loader.close()


def test_who_reads_a_copy_waits_for_it_and_holds_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[object] = []

    class Stream:
        def wait_event(self, event: object) -> None:
            calls.append(event)

    class Copied:
        device = torch.device("cuda", 0)

        def record_stream(self, stream: object) -> None:
            calls.append(stream)

    stream, tensor, event = Stream(), Copied(), object()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    take_over([tensor], event)  # type: ignore[list-item, arg-type]
    assert calls == [event, stream]
    take_over([tensor], None)  # type: ignore[list-item]
    assert len(calls) == 2


def test_what_a_gpu_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a batch onto a GPU, with fake tensors: places, types and layouts."""
    calls: list[str] = []

    class Stream:
        def record_event(self) -> str:
            calls.append("copied")
            return "event"

        def wait_event(self, event: str) -> None:
            calls.append("waits")

    stream: Any = Stream()
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda own, stream: calls.append("held"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda own: own)
    with FakeTensorMode(allow_non_fake_inputs=True):
        parts = [
            (
                np.arange(n),
                draw_views(UNEQUAL, seed=0, epoch=0, index=np.arange(n), size=[(32, 32)] * n),
                tuple(torch.empty(shape, dtype=torch.uint8) for shape in crop_shapes(UNEQUAL, n)),
            )
            for n in (3, 3, 2)
        ]
        index, params, crops = put_together(
            iter(parts), crop_shapes(UNEQUAL, 8), torch.device("cuda", 0), stream
        )
        views = in_views_order([own.flatten(0, 1) for own in crops], UNEQUAL)
        made = [normalized(view, UNEQUAL, dtype=torch.bfloat16) for view in views]
    assert calls == ["copied", "waits", "held", "waits", "held"] and index.tolist() == [
        0,
        1,
        2,
        0,
        1,
        2,
        0,
        1,
    ]
    assert params.box.shape == (len(UNEQUAL.views), 8, 4)
    assert [tuple(own.shape) for own in crops] == crop_shapes(UNEQUAL, 8)
    assert [view.shape[2] for view in made] == [24, 12, 24, 12, 12]
    for view in made:
        assert view.device == torch.device("cuda", 0) and view.dtype == torch.bfloat16
        assert view.is_contiguous(memory_format=torch.channels_last)
