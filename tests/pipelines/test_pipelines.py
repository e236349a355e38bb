"""What holds for every pipeline: same images, same order, same views, resumable at any step."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from fastsiam.config import AugmentConfig, ConvertConfig, DataConfig, Pipeline
from fastsiam.errors import BackendError, DataError
from fastsiam.jobs.convert import convert_data
from fastsiam.pipelines import backends, build_eval_loader, build_loader, open_training_images
from fastsiam.pipelines.geometric import crop_views
from fastsiam.pipelines.store.beton import BetonStore
from fastsiam.pipelines.workers import count
from fastsiam.views.batch import Batch, Loader
from fastsiam.views.draws import draw_views
from tests.conftest import ROOT, write_images

NEEDS = {"ffcv": [pytest.mark.ffcv], "dali": [pytest.mark.dali]}
PIPELINES = [pytest.param(name, marks=NEEDS.get(name, [])) for name in get_args(Pipeline)]
WITH_IMAGES = [name for name in PIPELINES if name.values != ("synthetic",)]
THREADED = [name for name in WITH_IMAGES if name.values[0] in NEEDS]
SMALL = AugmentConfig.alike(crop=16)


def readable(name: str, root: Path) -> Path:
    """Return what a pipeline can read: FFCV wants a converted file."""
    if name != "ffcv" or not root.is_dir() or list(root.glob("*.beton")):
        return root
    out = root.with_name(root.name + "-converted")
    if not out.exists():
        convert_data("folder", ConvertConfig(source=str(root), out=str(out)))
    return out


def build(
    name: str,
    root: Path,
    *,
    batch: int = 8,
    augment: AugmentConfig = SMALL,
    workers: int = 0,
    **place: Any,
) -> Loader:
    root = readable(name, root)
    data = DataConfig(data=str(root), pipeline=name, workers=workers)  # type: ignore[arg-type]
    return build_loader(data, augment, batch=batch, **place)


def first(loader: Loader, epoch: int = 0) -> Batch:
    try:
        return next(iter(loader.epoch(epoch)))
    finally:
        loader.close()


def tensors(batch: Batch) -> tuple[torch.Tensor, ...]:
    return (*batch.views, batch.index, batch.label)


def equal(one: Batch, other: Batch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


def joined(parts: Sequence[Batch]) -> Batch:
    """Return the batch that the ranks' parts make together."""
    *views, index, label = (torch.cat(own) for own in zip(*map(tensors, parts), strict=True))
    return Batch(tuple(views), index, label)


def levels(one: torch.Tensor, other: torch.Tensor, config: AugmentConfig) -> torch.Tensor:
    return (one - other).abs() * torch.tensor(config.std).view(3, 1, 1) * 255


@pytest.mark.parametrize("name", PIPELINES)
def test_batches_have_the_promised_form(name: str, images: Path) -> None:
    loader = build(name, images / "train")
    batch = first(loader)
    assert loader.steps == loader.images // 8
    for view in (batch.view1, batch.view2):
        assert view.shape == (8, 3, 16, 16) and view.dtype == torch.float32
        assert view.is_contiguous(memory_format=torch.channels_last)
    assert batch.index.dtype == batch.label.dtype == torch.int64
    assert batch.index.shape == batch.label.shape == (8,)
    assert not torch.equal(batch.view1, batch.view2)


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_labels_belong_to_the_images(name: str, images: Path) -> None:
    loader = build(name, images / "train")
    for batch in loader.epoch(0):
        assert torch.equal(batch.label, batch.index // 8)
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", PIPELINES)
def test_skipping_gives_the_tail_of_the_epoch(name: str, workers: int, images: Path) -> None:
    loader = build(name, images / "train", workers=workers)
    if name == "synthetic":
        start = loader.steps - 3
        whole = list(loader.epoch(1, skip=start))
    else:
        start, whole = 0, list(loader.epoch(1))
        assert len(whole) == 3
    for skip in range(4):
        tail = list(loader.epoch(1, skip=start + skip))
        assert len(tail) == 3 - skip
        assert all(equal(a, b) for a, b in zip(tail, whole[skip:], strict=True))
    loader.close()


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_an_abandoned_epoch_leaves_the_loader_usable(name: str, images: Path) -> None:
    loader = build(name, images / "train", workers=2)
    expected = list(loader.epoch(0))
    for _ in range(2):
        next(iter(loader.epoch(5)))
    assert all(equal(a, b) for a, b in zip(loader.epoch(0), expected, strict=True))
    loader.close()


@pytest.mark.parametrize("name", WITH_IMAGES)
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_same_global_batches(name: str, world: int, images: Path) -> None:
    alone = build(name, images / "train")
    shares = [build(name, images / "train", rank=rank, world=world) for rank in range(world)]
    for whole, *parts in zip(alone.epoch(2), *(share.epoch(2) for share in shares), strict=True):
        assert equal(joined(parts), whole)
    for loader in (alone, *shares):
        loader.close()


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_epochs_and_seeds_differ(name: str, images: Path) -> None:
    keys = [(0, 0), (0, 1), (1, 0)]
    batches = [first(build(name, images / "train", seed=seed), epoch) for seed, epoch in keys]
    for i, one in enumerate(batches):
        for other in batches[:i]:
            assert not torch.equal(one.index, other.index)
            assert not torch.equal(one.view1, other.view1)


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_three_ranks_of_a_set_that_does_not_divide(name: str, images: Path) -> None:
    """24 images in batches of 9: two whole batches, three ranks, six images left out."""
    alone = build(name, images / "train", batch=9)
    shares = [build(name, images / "train", batch=9, rank=r, world=3) for r in range(3)]
    assert [loader.steps for loader in (alone, *shares)] == [2] * 4
    for whole, *parts in zip(alone.epoch(1), *(share.epoch(1) for share in shares), strict=True):
        for view in ("view1", "view2"):
            joined = torch.cat([getattr(part, view) for part in parts])
            assert torch.equal(joined, getattr(whole, view))
        seen = [hash(view.numpy().tobytes()) for part in parts for view in (part.view1, part.view2)]
        assert len(set(seen)) == 6  # neither views nor ranks repeat each other
    for loader in (alone, *shares):
        loader.close()


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_two_loaders_and_an_evaluation_at_once(name: str, images: Path) -> None:
    one, other = (build(name, images / "train", workers=2) for _ in range(2))
    data = DataConfig(data=str(images), workers=2)
    central = build_eval_loader(data, "val", SMALL, resize=16, batch=4)
    for a, b, c in zip(one.epoch(0), other.epoch(0), central, strict=True):
        assert equal(a, b) and c.image.shape == (4, 3, 16, 16)
    one.close()
    other.close()


@pytest.mark.parametrize("name", THREADED)
def test_closing_in_mid_epoch_ends_the_threads(name: str, images: Path) -> None:
    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    def standing() -> int:  # a thread that is joined is still listed for a moment
        counts = [0]
        while len(set(counts[-10:])) > 1 or len(counts) < 10:
            time.sleep(0.02)
            counts.append(threads())
        return counts[-1]

    first(build(name, images / "train", workers=3))  # what the library keeps for ever
    before = standing()
    loader = build(name, images / "train", workers=3)
    batches = loader.epoch(0)
    next(batches)
    assert threads() >= before + 3
    loader.close()
    assert standing() <= before
    assert next(batches, None) is None


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_cifar_equals_torchvision_to_the_last_bit(name: str, cifar10: Path) -> None:
    """Decode, crop, antialiased resize, jitter, gray, blur, flip, normalise."""
    augment = AugmentConfig.alike(crop=32, blur_p=0.5)
    ours, theirs = (
        first(build(n, cifar10 / "test", batch=512, augment=augment), 3)
        for n in (name, "torchvision")
    )
    assert torch.equal(ours.index, theirs.index) and torch.equal(ours.label, theirs.label)
    for view in ("view1", "view2"):
        assert levels(getattr(ours, view), getattr(theirs, view), augment).max() < 1e-3


def test_crops_follow_the_filter_to_the_last_bit() -> None:
    """Against the definition, written out with whole numbers, for boxes that shrink and enlarge."""
    generator = np.random.default_rng(0)
    for height, width in ((40, 90), (90, 40), (7, 5), (300, 300)):
        image = generator.integers(0, 256, (height, width), dtype=np.uint8)
        box = [3, 1, height - 4, width - 2]
        params = draw_views(SMALL, seed=0, epoch=0, index=[0], size=[(height, width)])
        params = replace(
            params,
            box=np.broadcast_to(np.array(box, np.int32), (2, 1, 4)).copy(),
            flip=np.array([[False], [True]]),
        )
        pixels = torch.from_numpy(image.repeat(3))
        size = np.array([(height, width)])
        crops = crop_views(pixels, np.zeros(1, np.int64), size, params, SMALL)[0].numpy()
        part = image[3 : height - 1, 1 : width - 1].astype(np.int64)
        rows_first = height - 4 - 16 <= max(0, 2 * (width - 2 - 16))  # Pillow 13's rule
        if rows_first:
            expected = resized_rows(resized_rows(part, 16).T, 16).T
        else:
            expected = resized_rows(resized_rows(part.T, 16).T, 16)
        for channel in range(3):
            np.testing.assert_array_equal(crops[0, 0, ..., channel], expected)
            np.testing.assert_array_equal(crops[1, 0, ..., channel], expected[:, ::-1])


def resized_rows(rows: np.ndarray, side: int) -> np.ndarray:
    length = rows.shape[1]
    scale = length / side
    support = max(scale, 1.0)
    out = np.empty((len(rows), side), np.int64)
    for x in range(side):
        centre = (x + 0.5) * scale
        weights = [max(0.0, 1 - abs(i + 0.5 - centre) / support) for i in range(length)]
        whole = [int(weight / sum(weights) * 2**22 + 0.5) for weight in weights]
        out[:, x] = (rows @ np.array(whole) + 2**21) >> 22
    return out.clip(0, 255)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", WITH_IMAGES)
def test_a_broken_image_ends_the_epoch_with_its_name(name: str, workers: int, images: Path) -> None:
    if name == "ffcv":
        file = readable(name, images / "train") / "train.beton"
        store = BetonStore(file)
        with file.open("r+b") as beton:
            beton.seek(int(store.start[8 + 3]) + 200)
            beton.write(bytes(int(store.bytes[8 + 3]) - 200))
    else:
        path = images / "train" / "class1" / "003.jpg"
        path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match=r"cannot decode .*class1/003\.jpg") as caught:
        loader = build(name, images / "train", workers=workers)
        try:
            list(loader.epoch(0))
        finally:
            loader.close()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_a_loader_that_nobody_closed_does_not_keep_the_program(name: str, images: Path) -> None:
    """Exceptions skip close(): the interpreter still has to end, workers and all."""
    script = (
        "import sys; from fastsiam.config import *; from fastsiam.pipelines import build_loader\n"
        "data = DataConfig(data=sys.argv[1], pipeline=sys.argv[2], workers=2)\n"
        "batches = build_loader(data, AugmentConfig.alike(crop=16), batch=8).epoch(0)\n"
        "next(batches); sys.exit(7)"
    )
    data = readable(name, images / "train")
    command = [sys.executable, "-c", script, str(data), name]
    done = subprocess.run(command, timeout=60, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 7 and not done.stderr


@pytest.mark.parametrize("name", [n for n in WITH_IMAGES if n.values != ("memory",)])
def test_an_epoch_that_another_displaced_says_so(name: str, images: Path) -> None:
    loader = build(name, images / "train", workers=2)
    one = loader.epoch(0)
    next(one)
    other = loader.epoch(1)
    next(other)
    with pytest.raises(RuntimeError, match="another epoch of this loader was begun"):
        list(one)
    loader.close()


@pytest.mark.parametrize("name", [n for n in WITH_IMAGES if n.values != ("torchvision",)])
def test_a_closed_loader_says_so_and_can_be_closed_again(name: str, images: Path) -> None:
    loader = build(name, images / "train")
    loader.close()
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(loader.epoch(0))


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_a_subset_shows_the_chosen_images_as_the_whole_would(name: str, images: Path) -> None:
    """Every pipeline the same ones, in one order; each as PIL shows it, by its own position."""
    chosen = np.array([0, 3, 4, 9, 11, 12, 17, 20, 22, 23])
    loader = build(name, images / "train", batch=4, chosen=chosen, workers=2)
    theirs = build("torchvision", images / "train", batch=4, chosen=chosen)
    assert (loader.images, loader.steps) == (10, 2)
    for epoch in range(2):
        seen = []
        for ours, other in zip(loader.epoch(epoch), theirs.epoch(epoch), strict=True):
            assert torch.equal(ours.index, other.index) and torch.equal(ours.label, other.label)
            assert torch.equal(ours.label, ours.index // 8)
            assert levels(ours.view1, other.view1, SMALL).max() < 1e-3
            assert levels(ours.view2, other.view2, SMALL).max() < 1e-3
            seen += ours.index.tolist()
        assert len(set(seen)) == 8 and set(seen) <= set(chosen.tolist())
    loader.close()
    theirs.close()


@pytest.mark.parametrize("name", PIPELINES)
def test_all_images_chosen_are_the_whole(name: str, images: Path) -> None:
    count = build(name, images / "train").images
    whole = build(name, images / "train")
    chosen = build(name, images / "train", chosen=np.arange(count))
    for _, one, other in zip(range(3), whole.epoch(1), chosen.epoch(1), strict=False):
        assert equal(one, other)
    whole.close()
    chosen.close()


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_too_few_chosen_images(name: str, images: Path) -> None:
    with pytest.raises(DataError, match=r"chosen part of .* holds 5 images, fewer than one batch"):
        build(name, images / "train", chosen=np.arange(5))
    with pytest.raises(ValueError, match="ascending positions among 24 images"):
        build(name, images / "train", chosen=np.arange(20, 40))


def test_memory_holds_the_chosen_images_alone(images: Path) -> None:
    for number in range(8):
        (images / "train" / "class1" / f"{number:03d}.jpg").write_bytes(b"broken")
    chosen = np.array([0, 1, 2, 3, 16, 17, 18, 23])
    loader = build("memory", images / "train", chosen=chosen)
    assert len(loader._pixels.flat) == 8 * 24 * 24 * 3  # type: ignore[attr-defined]
    assert sorted(first(loader).index.tolist()) == chosen.tolist()


def test_a_pipeline_that_there_is_not() -> None:
    with pytest.raises(ValueError, match=r"one of torchvision, ffcv, .* not 'fcv'"):
        DataConfig(pipeline="fcv")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_too_few_images(name: str, tmp_path: Path) -> None:
    write_images(tmp_path, classes=1, each=1)
    with pytest.raises(DataError, match="holds 1 image, fewer than one batch of 8"):
        build(name, tmp_path)


@pytest.mark.parametrize("name", PIPELINES)
def test_batch_that_ranks_cannot_share(name: str, images: Path) -> None:
    with pytest.raises(ValueError, match="cannot be shared equally by 3 ranks"):
        build(name, images / "train", world=3)


def test_memory_refuses_what_does_not_fit(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastsiam.pipelines import memory_backend

    monkeypatch.setattr(memory_backend, "_free_bytes", lambda device: 20_000)
    with pytest.raises(
        DataError, match=r"does not fit: 0 of 24 images .* use --pipeline torchvision"
    ):
        build("memory", images / "train")


@pytest.mark.parametrize("world", [1, 3])
def test_evaluation_sees_every_image_once(world: int, images: Path) -> None:
    """The ranks' shares join to the whole set in order, centrally cropped, on every pass."""
    loaders = [
        build_eval_loader(
            DataConfig(data=str(images), workers=0),
            "val",
            SMALL,
            resize=20,
            batch=3,
            rank=r,
            world=world,
        )
        for r in range(world)
    ]
    for _ in range(2):
        batches = [batch for loader in loaders for batch in loader]
        assert torch.cat([batch.label for batch in batches]).tolist() == [0] * 4 + [1] * 4 + [2] * 4
        pictures = torch.cat([batch.image for batch in batches])
        assert pictures.shape == (12, 3, 16, 16)
        assert len(np.unique(pictures.flatten(1).numpy(), axis=0)) == 12
    assert loaders[0].images == 12 and loaders[0].classes == ("class0", "class1", "class2")


def test_worker_count(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert [count(workers) for workers in (-1, 0, 5)] == [3, 0, 5]


@pytest.mark.parametrize("name", ["ffcv", "dali"])
def test_a_missing_package_is_said_before_anything_starts(
    name: str, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DataConfig(data=str(images / "train"), pipeline=name)  # type: ignore[arg-type]
    monkeypatch.setattr(backends, "find_spec", lambda module: None)
    with pytest.raises(BackendError, match=rf"pip install 'fastsiam\[{name}\]'") as caught:
        open_training_images(data, batch=8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", THREADED)
def test_a_package_that_cannot_be_loaded_is_said(
    name: str, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = readable(name, images / "train")
    module = {"ffcv": "fastsiam.pipelines.ffcv_backend", "dali": "nvidia.dali"}[name]
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(backends, "find_spec", lambda module: "found")
    with pytest.raises(BackendError, match=rf"pip install 'fastsiam\[{name}\]'") as caught:
        build(name, root)
    assert "\n" not in str(caught.value)
