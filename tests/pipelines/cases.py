"""Helpers of the pipeline tests: pipelines to test, a store, loaders and batch comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fastsiam.config import AugmentConfig, DataConfig, ImagePipeline, Pipeline
from fastsiam.pipelines import Store, build_eval_loader, build_loader, open_split, open_store
from fastsiam.pipelines.native_backend import OnDevice, _Slot
from fastsiam.pipelines.store import BetonStore
from fastsiam.train.image_list import names_of
from fastsiam.views.batch import Batch, EvalLoader, Loader
from fastsiam.views.draws import NO_LEVEL
from tests.conversions import run

GRAPH, PAGES = "dali's graph for a GPU", "ffcv's page cache"
"""Variants of pipelines that a GPU or a setting enables."""
_REQUIRED_MARKS = {
    name: [getattr(pytest.mark, name.split("'")[0])] for name in ("ffcv", "dali", GRAPH, PAGES)
}


def marked(*names: str) -> list[Any]:
    """Return pipelines as a test's parameters, marked with the packages that they need."""
    return [pytest.param(name, marks=_REQUIRED_MARKS.get(name, [])) for name in names]


PIPELINES, WITH_IMAGES = marked(*get_args(Pipeline)), marked(*get_args(ImagePipeline))
THREADED = marked("native", "ffcv", "dali")
READERS = [*WITH_IMAGES, *marked(GRAPH, PAGES)]
SMALL = AugmentConfig.alike(crop=16)


class ListStore(Store):
    """Encoded images in a list."""

    kind = "list"

    def __init__(self, images: Sequence[bytes]) -> None:
        self.images, self.root = images, Path("list")
        self.labels, self.classes = np.full(len(images), -1), ()

    def read(self, index: int) -> bytes:
        return self.images[index]

    def name(self, index: int) -> str:
        return f"image {index}"

    def sizes(self) -> NDArray[np.int64]:
        return np.array([len(image) for image in self.images])

    def stamp(self) -> str:
        return ""


def make_readable(name: str, root: Path) -> Path:
    """Return a source that a pipeline can read: FFCV needs a converted file."""
    if name not in ("ffcv", PAGES) or not root.is_dir() or list(root.glob("*.beton")):
        return root
    out = root.with_name(root.name + "-converted")
    if not out.exists():
        run("folder", root, out)
    return out


def take_data_config(name: str, root: Path | str, settings: dict[str, Any]) -> DataConfig:
    """Return the config for a pipeline, or a variant of it, and a folder or address.

    The fields of ``DataConfig`` are removed from ``settings``.
    """
    pipeline: Any = {GRAPH: "dali", PAGES: "ffcv"}.get(name, name)
    address = str(root if isinstance(root, str) else make_readable(name, root))
    usual = {"workers": int(pipeline != "torchvision"), "os_cache": name != PAGES}
    given = {key.name: settings.pop(key.name) for key in fields(DataConfig) if key.name in settings}
    return DataConfig(data=address, pipeline=pipeline, **usual | given)


def open_loader(
    name: str,
    root: Path | str,
    *,
    batch: int = 8,
    augment: AugmentConfig = SMALL,
    **settings: Any,
) -> Loader:
    """Open a loader; ``settings`` are fields of ``DataConfig`` or arguments of ``build_loader``."""
    data = take_data_config(name, root, settings)
    with pytest.MonkeyPatch.context() as patch:
        if name == GRAPH:  # on any device
            from fastsiam.pipelines import dali_backend

            patch.setattr(dali_backend, "DecodingLoader", dali_backend.GraphLoader)
        return build_loader(data, augment, batch=batch, **settings)


def central(
    name: str,
    root: Path | str,
    *,
    resize: int = 20,
    side: int = 16,
    split: Any = "train",
    batch: int = 8,
    **settings: Any,
) -> EvalLoader:
    """Open a loader of central crops; ``settings`` as in ``open_loader``."""
    data, augment = take_data_config(name, root, settings), AugmentConfig.alike(crop=side)
    return build_eval_loader(data, split, augment, resize=resize, batch=batch, **settings)


def batches(
    name: str, root: Path | str, *epochs: int, skip: int = 0, **settings: Any
) -> list[Batch]:
    """Return the batches of some epochs, the first one after ``skip`` steps.

    For synthetic images, whose epochs are long, start three steps before the end of the first one.
    """
    with closing(open_loader(name, root, **settings)) as loader:
        skip += loader.steps - 3 if name == "synthetic" else 0
        first, *later_epochs = epochs or (0,)
        return [
            *loader.epoch(first, skip=skip),
            *(b for e in later_epochs for b in loader.epoch(e)),
        ]


def first(loader: Loader, epoch: int = 0) -> Batch:
    with closing(loader):
        return next(iter(loader.epoch(epoch)))


def change_image(name: str, root: Path, index: int, change: Callable[[bytes], bytes]) -> bytes:
    """Change an image's bytes where a pipeline reads them; return the original bytes.

    A .beton record keeps its size.
    """
    store = open_store(make_readable(name, root), "train")
    original = bytes(store.read(index))
    content = change(original)
    if not isinstance(store, BetonStore):
        (root / store.name(index)).write_bytes(content)
        return original
    size = int(store.size[index])
    with (make_readable(name, root) / "train.beton").open("r+b") as beton:
        beton.seek(int(store.start[index]))
        beton.write(content[:size].ljust(size, b"\0"))
    return original


def delay_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay the engine's copies to a GPU by tens of milliseconds, on their own streams."""
    start = _Slot.start_copy

    def start_late(slot: _Slot) -> OnDevice:
        with torch.cuda.stream(slot.stream):
            torch.cuda._sleep(50_000_000)
        return start(slot)

    monkeypatch.setattr(_Slot, "start_copy", start_late)


def split_names(root: Path, holdout: str = "10%") -> tuple[list[str], list[str]]:
    """Return the names of the training images and of the held-out images."""
    data = DataConfig(data=str(root), holdout=holdout)
    return names_of(open_split(data, "train")), names_of(open_split(data, "val"))


def tensors(batch: Batch) -> tuple[torch.Tensor, ...]:
    return (*batch.views, batch.index, batch.label)


def equal(one: Batch, other: Batch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


def same(one: Sequence[Batch], other: Sequence[Batch]) -> bool:
    return len(one) == len(other) and all(map(equal, one, other))


def join_parts(parts: Sequence[Batch]) -> Batch:
    """Concatenate the ranks' parts of a batch."""
    *views, index, label = (
        torch.cat(tensor_parts) for tensor_parts in zip(*map(tensors, parts), strict=True)
    )
    return Batch(tuple(views), index, label)


def levels(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the differences of normalised views or crops in levels of 255."""
    return (one - other).abs() * torch.tensor(SMALL.std).view(3, 1, 1) * 255


def assert_near(ours: Sequence[Batch], theirs: Sequence[Batch], within: float = 1e-3) -> None:
    """Check that batches have the same images, labels and draws, and nearly the same views.

    ``within`` is in levels of 255. The default allows for float32 rounding in the normalisation.
    With more, solarised views are left out, because solarising amplifies differences.
    """
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.index, other.index) and torch.equal(one.label, other.label)
        assert one.digest == other.digest
        for view, (a, b) in enumerate(zip(one.views, other.views, strict=True)):
            gap = levels(a, b)
            if within > 1:
                assert one.params is not None
                gap[torch.from_numpy(one.params.solarise[view] != NO_LEVEL)] = 0
            assert gap.max() <= within
