"""``ViewLoader``: epochs, state, pickling, ranks, and batches for other packages."""

from __future__ import annotations

import logging
import os
import pickle
import signal
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import numpy as np
import pytest
import torch

from fastsiam.config import AugmentConfig, DataConfig, Pipeline
from fastsiam.pipelines import (
    ViewLoader,
    build_eval_loader,
    build_loader,
    lightly_batch,
    solo_learn_batch,
    supervised_batch,
    transformers_batch,
    workers,
)
from fastsiam.pipelines.engine import Engine
from fastsiam.views.batch import Batch, Crops
from tests.conftest import write_images
from tests.pipelines.cases import (
    SMALL,
    WITH_IMAGES,
    batches,
    open_loader,
    same,
)
from tests.pipelines.conftest import Loaders

BATCH = 8


@pytest.fixture
def root(images: Path) -> Path:
    return images / "train"


def make_loader(root: Path, *, batch: int = BATCH, seed: int = 0) -> ViewLoader:
    return ViewLoader(root, SMALL, batch=batch, seed=seed)


def test_loaders_accept_paths(root: Path) -> None:
    with closing(build_loader(root, SMALL, batch=BATCH)) as loader:
        assert same(list(loader.epoch(0)), load_epoch(root, 0))
    for wrong in ({"dtype": torch.int64}, {"rank": 2, "world": 2}, {"batch": 0}):
        with pytest.raises(ValueError, match=r"dtype must be|rank below 2|batch must be positive"):
            build_eval_loader(root.parent, "val", SMALL, resize=16, **wrong)
    evaluation = build_eval_loader(str(root.parent), "val", SMALL, resize=16)
    assert next(iter(evaluation)).image.shape[0] == evaluation.images


def load_epoch(root: Path, number: int) -> list[Batch]:
    return batches("native", root, number)


def test_each_iteration_is_next_epoch(root: Path) -> None:
    with make_loader(root) as loader:
        assert same(list(loader), load_epoch(root, 0)) and len(loader) == len(load_epoch(root, 0))
        next(iter(loader))  # an iteration that is abandoned counts
        loader.set_epoch(2)
        assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == (2, 0)
        assert same(list(loader), load_epoch(root, 2))
        loader.set_epoch(1)
        assert same(list(loader), load_epoch(root, 1))


def test_closed_loader_ends_iteration_and_reopens(root: Path) -> None:
    with make_loader(root) as loader:
        iteration = iter(loader)
        next(iteration)
        loader.close()
        with pytest.raises(RuntimeError, match="this loader is closed"):
            next(iteration)
        assert same(list(loader), load_epoch(root, 1))


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_state_resumes_mid_epoch(root: Path, taken: int) -> None:
    """In a pickled copy, which keeps the loader's arguments."""
    with make_loader(root) as loader:
        loader.set_epoch(3)
        list(islice(loader, taken))
        state, pickled = loader.state_dict(), pickle.dumps(loader)
    assert 0 < taken < len(loader) or state["step"] == 0
    with pickle.loads(pickled) as later:
        later.load_state_dict(state)
        assert later.state_dict() == state
        later.set_epoch(state["epoch"])  # like loops that resume
        assert same([*later], load_epoch(root, 3)[taken:])
        batches = iter(later)
        taken_batches = [*islice(batches, len(later))]  # the epoch ends before the loader notices
        assert (later.state_dict()["epoch"], later.state_dict()["step"]) == (5, 0)
        assert same([*taken_batches, *batches], load_epoch(root, 4))


DTYPE_ERROR = "dtype must be a floating type of two bytes or more, such as torch.bfloat16, not "


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"device": "meta"}, "device must be cpu or cuda, not meta"),
        # A compiled kernel would write floats into bytes.
        ({"dtype": torch.uint8}, f"{DTYPE_ERROR}torch.uint8"),
        ({"dtype": torch.int64}, f"{DTYPE_ERROR}torch.int64"),
        ({"dtype": torch.float8_e4m3fn}, f"{DTYPE_ERROR}torch.float8"),
        ({"dtype": "bfloat16"}, f"{DTYPE_ERROR}'bfloat16'"),
        ({"data": [1, 2]}, r"data must be a path .* not a list: the loader reads the"),
        ({"augment": print}, "augment must be an AugmentConfig, not a builtin_function"),
        ({"crop_transform": lambda crops: None}, "must return the crops, not None"),
        ({"crop_transform": lambda crops: [crops[0].float()]}, "must return uint8 .*float32"),
        ({"crop_transform": lambda crops: [crops[0].to("meta")]}, "on cpu, but .*'meta'"),
    ],
)
def test_invalid_arguments_are_rejected(how: dict[str, Any], error: str, root: Path) -> None:
    arguments: dict[str, Any] = {"data": root, "augment": SMALL, "batch": BATCH, **how}
    raises_error = pytest.raises((TypeError, ValueError), match=error)
    with raises_error, ViewLoader(**arguments) as loader:
        next(iter(loader))


def test_process_group_created_after_first_use_is_respected(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, after an early ``len``, each rank would train on all images of every batch."""
    with make_loader(root) as loader:
        assert len(loader) == 3 and next(iter(loader)).index.shape == (BATCH,)
        for name, value in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 2)):
            monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
        loader.set_epoch(0)
        assert len(loader) == 3 and next(iter(loader)).index.shape == (BATCH // 2,)


def test_state_of_different_loader_is_rejected(root: Path, images: Path) -> None:
    window = ViewLoader(DataConfig(data=str(root), shuffle="window:16"), SMALL, batch=BATCH)
    with make_loader(root) as loader:
        state = loader.state_dict()
    for other, name in (
        (make_loader(root, batch=4), "batch 8, but this one has batch 4"),
        (make_loader(root, seed=1), "seed 0, but this one has seed 1"),
        (make_loader(images / "val"), "images"),
        (window, "shuffle full, but this one has shuffle window:16"),
    ):
        with other, pytest.raises(ValueError, match=f"loader with {name}"):
            other.load_state_dict(state)
    with make_loader(root) as loader, pytest.raises(ValueError, match="it has model, loader"):
        loader.load_state_dict({"model": {}, "loader": state})


@pytest.fixture(scope="module")
def large_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve images that are slow to decode."""
    return write_images(tmp_path_factory.mktemp("large"), classes=1, each=12, side=1000)


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("native", 0),
        ("native", 1),
        ("memory", 1),
        pytest.param("dali", 1, marks=pytest.mark.dali),
    ],
)
def test_loader_works_in_forked_process(name: Pipeline, taken: int, large_images: Path) -> None:
    """The threads of the parent's loader do not exist in the child."""
    data = DataConfig(data=str(large_images), pipeline=name, workers=2)
    with ViewLoader(data, SMALL, batch=2) as loader:
        steps, passes = len(loader), [iter(loader)]
        assert len([*islice(passes[0], taken)]) == taken
        if not (child := os.fork()):
            signal.alarm(60)  # ends the child if it waits for a thread
            passes.clear()
            batch_count = len([*loader])
            loader.close()
            os._exit(batch_count)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == steps == 6
        assert len([*passes[0]]) == steps - taken


def test_state_includes_bad_images(images: Path) -> None:
    """Otherwise a resumed loader would find them again, and could replace images differently."""
    (images / "train" / "class0" / "000.jpg").write_bytes(b"no image")
    data = DataConfig(data=str(images), bad_images="replace", pipeline="native", workers=1)
    with ViewLoader(data, SMALL, batch=BATCH) as first, ViewLoader(data, SMALL, batch=BATCH) as new:
        seen_batches = [batch for _ in range(3) for batch in first]
        state = first.state_dict()
        assert "class0/000.jpg" in state["bad"]
        later = [*first]
        new.load_state_dict(state)
        assert same([*new], later) and new.state_dict()["bad"] == state["bad"]
        assert pickle.loads(pickle.dumps(new)).state_dict()["bad"] == state["bad"]
        if not (child := os.fork()):
            os._exit(first.state_dict()["bad"] == state["bad"])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        new.close()
        assert new.state_dict()["bad"] == state["bad"]
    assert 0 not in [index for batch in [*seen_batches, *later] for index in batch.index.tolist()]


def invert_crops(crops: Crops) -> Any:
    """A transform may return any iterable."""
    return (255 - crop for crop in crops)


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_crop_transform_precedes_colour_operations(name: str, root: Path, loaders: Loaders) -> None:
    """Without colour operations, inverted crops become negative views.

    Solarisation inverts the brighter half of the levels, so a crop and its negative become equal.
    """
    plain: Any = {"jitter_p": 0.0, "gray_p": 0.0, "blur_p": 0.0, "mean": (0.5, 0.5, 0.5)}
    if name == "torchvision":
        with pytest.raises(ValueError, match="the torchvision pipeline has no crops"):
            open_loader(name, root, crop_transform=invert_crops)
        return
    for solarise_p, sign in ((0.0, -1), (1.0, 1)):
        augment = AugmentConfig.alike(crop=16, solarise_p=solarise_p, **plain)
        inverted, usual = (
            next(loaders(name, root, augment=augment, crop_transform=transform).epoch(1))
            for transform in (invert_crops, None)
        )
        for view, other in zip(inverted.views, usual.views, strict=True):
            torch.testing.assert_close(view, sign * other, atol=2e-5, rtol=0)


def test_workers_auto_tunes_while_loading(
    root: Path,
    loaders: Loaders,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Views do not depend on the number of threads. Fewer batches are prefetched while tuning."""
    monkeypatch.setattr(workers, "own_cores", lambda: 4)
    caplog.set_level(logging.INFO)
    one = loaders("native", root, batch=4, workers=1, prefetch=1)
    engine_batches = create_autospec(Engine.batches, side_effect=Engine.batches)
    monkeypatch.setattr(Engine, "batches", engine_batches)
    tuned = loaders("native", root, batch=4, workers="auto", prefetch=5)
    assert tuned.tuned_workers is None
    for epoch in range(14):
        assert same(list(tuned.epoch(epoch)), list(one.epoch(epoch)))
    assert tuned.tuned_workers in range(1, 5)
    message = f"loader threads: {tuned.tuned_workers}; step time with each number: 4: "
    assert message in caplog.text
    prefetches = [call.kwargs["prefetch"] for call in engine_batches.call_args_list]
    while_tuning, later = prefetches.count(2), prefetches.count(5)
    assert while_tuning and later and prefetches == [2, 1] * while_tuning + [5, 1] * later


def test_loader_reports_its_pipeline(root: Path) -> None:
    """It also accepts positions as a list."""
    chosen: Any = [*range(1, 23, 2)]
    with ViewLoader(root, SMALL, batch=BATCH, chosen=chosen) as loader:
        assert repr(loader) == f"ViewLoader('{root}', batch=8, pipeline=auto)"
        assert loader.pipeline == "memory" and repr(loader).endswith("pipeline=memory)")
        assert {*next(iter(loader)).index.tolist()} < {*chosen}


def test_batches_convert_to_formats_of_other_libraries(root: Path) -> None:
    batch = load_epoch(root, 0)[0]
    views, targets, names = lightly_batch(batch)
    assert views[1] is batch.view2 and targets is batch.label and len(names) == BATCH
    index, views, targets = solo_learn_batch(batch)
    assert index is batch.index and views[0] is batch.view1 and targets is batch.label
    assert transformers_batch(batch) == {"pixel_values": batch.view1, "labels": batch.label}
    assert supervised_batch(batch) == (batch.view1, batch.label)
    data = DataConfig(data=str(root), pipeline="native")
    with ViewLoader(data, SMALL, batch=BATCH, transform=lightly_batch) as loader:
        views, _, names = next(iter(loader))
    assert torch.equal(views[0], batch.view1) and names[0].endswith(".jpg")


def test_state_is_plain_values(root: Path, tmp_path: Path) -> None:
    """Otherwise torch refuses to load it when the run is resumed."""
    size: Any = np.int64(BATCH)
    with ViewLoader(root, SMALL, batch=size, seed=np.int64(1)) as loader:  # type: ignore[arg-type]
        loader.set_epoch(np.int64(2))  # type: ignore[arg-type]
        torch.save(loader.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True)["epoch"] == 2
    for chosen in (np.arange(9, dtype=np.uint64), [*range(9)]):
        with closing(build_loader(root, SMALL, batch=BATCH, chosen=chosen)) as few:  # type: ignore[arg-type]
            assert next(few.epoch(0)).index.max() < 9
    for wrong in (np.arange(9.0), np.arange(9)[:, None]):
        with pytest.raises(ValueError, match="chosen must be ascending positions"):
            build_loader(root, SMALL, batch=BATCH, chosen=wrong)  # type: ignore[arg-type]


def test_default_dtype_and_device_of_torch_do_not_matter(root: Path) -> None:
    def load(name: str) -> list[Batch]:
        return batches(name, root, 0)

    evaluation = build_eval_loader(root.parent, "val", SMALL, resize=16)
    expected, images = {name: load(name) for name in ("torchvision", "native")}, list(evaluation)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert same(load("torchvision"), expected["torchvision"])
        with torch.device("meta"):
            assert same(load("native"), expected["native"])
            for one, other in zip(evaluation, images, strict=True):
                assert torch.equal(one.image, other.image)
    finally:
        torch.set_default_dtype(torch.float32)


def test_batch_with_failed_transform_is_not_counted(root: Path) -> None:
    transform = Mock(side_effect=[None, RuntimeError("in the second batch"), None])
    with ViewLoader(root, SMALL, batch=BATCH, transform=transform) as loader:
        with pytest.raises(RuntimeError, match="in the second batch"):
            list(loader)
        loader.load_state_dict(loader.state_dict())
        next(iter(loader))
    _, failed, repeated = (call.args[0] for call in transform.call_args_list)
    assert torch.equal(repeated.index, failed.index)
