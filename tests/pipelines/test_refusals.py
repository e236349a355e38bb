"""What a pipeline cannot do it says in one line: broken images, too few, packages that lack."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fastsiam.config import DataConfig
from fastsiam.errors import BackendError, DataError
from fastsiam.pipelines import (
    backends,
    open_training_images,
)
from fastsiam.pipelines.store.beton import BetonStore
from tests.conftest import write_images
from tests.pipelines.cases import (
    OPTIONAL,
    PIPELINES,
    WITH_IMAGES,
    build,
    readable,
)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", WITH_IMAGES)
def test_a_broken_image_ends_the_epoch_with_its_name(name: str, workers: int, images: Path) -> None:
    if name == "ffcv":
        file = readable(name, images / "train") / "train.beton"
        store = BetonStore(file)
        with file.open("r+b") as beton:
            beton.seek(int(store.start[8 + 3]) + 200)
            beton.write(bytes(int(store.size[8 + 3]) - 200))
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


def test_a_pipeline_that_there_is_not() -> None:
    with pytest.raises(ValueError, match=r"must be auto, torchvision, native, .* not 'fcv'"):
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

    monkeypatch.setattr(memory_backend, "free_bytes", lambda device: 20_000)
    monkeypatch.setattr(memory_backend.Pixels, "_put", None)  # before an image is decoded
    with pytest.raises(
        DataError,
        match=r"does not fit: loading its 24 images takes 46 kB, more than 80% of the 20 kB free "
        r"on cpu; use --pipeline native",
    ):
        build("memory", images / "train")


@pytest.mark.parametrize("name", ["ffcv", "dali"])
def test_a_missing_package_is_said_before_anything_starts(
    name: str, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DataConfig(data=str(images / "train"), pipeline=name)  # type: ignore[arg-type]
    monkeypatch.setattr(backends, "find_spec", lambda module: None)
    with pytest.raises(BackendError, match=rf"pip install 'fastsiam\[{name}\]'") as caught:
        open_training_images(data, batch=8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", OPTIONAL)
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
