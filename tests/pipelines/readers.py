"""Pipelines and ways of theirs that a setting or a GPU chooses, and loaders of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.pipelines import build_loader
from fastsiam.pipelines.store import BetonStore, Store
from fastsiam.views.batch import Loader
from tests.pipelines.cases import NEEDS, SMALL, WITH_IMAGES, readable
from tests.pipelines.dali_cases import load

GRAPH, PAGES = "dali's graph for a GPU", "ffcv's page cache"
READERS = [
    *WITH_IMAGES,
    pytest.param(GRAPH, marks=NEEDS["dali"]),
    pytest.param(PAGES, marks=NEEDS["ffcv"]),
]
"""Pipelines, and two ways of theirs that a setting or a GPU chooses."""
NEAR = {GRAPH: 40}
"""How many levels of 255 the views may differ from torchvision's; otherwise by rounding."""


def opened(
    name: str, root: Path, *, batch: int = 8, augment: AugmentConfig = SMALL,
    workers: int | None = None,
    store: Store | None = None, **place: Any,
) -> Loader:  # fmt: skip
    """Open a loader of a pipeline, or of one of its ways; torchvision's without processes."""
    if workers is None:
        workers = int(name != "torchvision")
    if name == GRAPH:
        return load(store or root, batch=batch, augment=augment, workers=workers, **place)
    own = "ffcv" if name == PAGES else name
    data = DataConfig(
        data=str(readable(own, root)), pipeline=own, workers=workers, os_cache=name != PAGES  # type: ignore[arg-type]
    )  # fmt: skip
    return build_loader(data, augment, batch=batch, store=store, **place)


def change_image(name: str, root: Path, index: int, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of one of 24 images where a pipeline reads it; a record keeps its size."""
    if name not in ("ffcv", PAGES):
        path = root / f"class{index // 8}" / f"{index % 8:03}.jpg"
        path.write_bytes(change(path.read_bytes()))
        return
    file = readable("ffcv", root) / "train.beton"
    store = BetonStore(file)
    start, size = int(store.start[index]), int(store.size[index])
    with file.open("r+b") as beton:
        beton.seek(start)
        beton.write(change(bytes(store.read(index))).ljust(size, b"\0"))
