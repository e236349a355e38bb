"""What a pipeline cannot do it says in one line: broken images, too few, packages that lack."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fastsiam.config import DataConfig
from fastsiam.errors import BackendError, DataError
from tests.conftest import write_images
from tests.pipelines.cases import (
    OPTIONAL,
    build,
    equal,
    readable,
)
from tests.pipelines.readers import GRAPH, PAGES, READERS, change_image, opened

FILES = ("torchvision", "native", "dali", GRAPH)
"""Those that read each image's file when its batch is made."""


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "header alone": lambda data: data[:200],
    "noise": lambda data: np.random.default_rng(0).bytes(len(data)),
    "truncated": lambda data: data[:-20],
    "no end marker": lambda data: data[:-2],
    "empty": lambda _: b"",
}


@pytest.mark.parametrize("name", READERS)
def test_a_broken_image_ends_the_epoch_at_its_step_and_is_named(name: str, images: Path) -> None:
    """The batches before it come; where it is repaired, all of them do again."""
    root, broken = images / "train", r"cannot decode .*class1/003\.jpg"
    damages = list(DAMAGES)
    if name in ("ffcv", PAGES):  # a record keeps its length, and zeros at its end are no damage
        damages = ["header alone", "noise", "empty"]
    if name == "memory":
        change_image(name, root, 11, DAMAGES["truncated"])
        with pytest.raises(DataError, match=broken):
            opened(name, root)
        return
    loader = opened(name, root, batch=4, workers=2)
    expected = list(loader.epoch(0))
    for damage in damages:
        whole: list[bytes] = []
        change_image(name, root, 11, lambda data, kept=whole: kept.append(data) or data)  # type: ignore[misc]
        change_image(name, root, 11, DAMAGES[damage])
        got = []
        with pytest.raises(DataError, match=broken) as caught:
            for batch in loader.epoch(0):
                got.append(batch)
        assert "\n" not in str(caught.value)
        assert 11 in expected[len(got)].index.tolist()
        assert all(equal(a, b) for a, b in zip(got, expected, strict=False))
        change_image(name, root, 11, lambda _, kept=whole: kept[0])  # type: ignore[misc]
    assert all(equal(a, b) for a, b in zip(loader.epoch(0), expected, strict=True))
    loader.close()


@pytest.mark.parametrize("name", [n for n in READERS if n.values[0] in FILES])
def test_a_file_that_went_is_named(name: str, images: Path) -> None:
    loader = opened(name, images / "train")
    (images / "train" / "class2" / "001.jpg").unlink()
    with pytest.raises(DataError, match=r"cannot read .*class2/001\.jpg"):
        list(loader.epoch(0))
    loader.close()


def test_too_few_images_and_a_pipeline_that_there_is_not(tmp_path: Path) -> None:
    write_images(tmp_path, classes=1, each=1)
    with pytest.raises(DataError, match="holds 1 image, fewer than one batch of 8"):
        build("native", tmp_path)
    with pytest.raises(ValueError, match=r"must be one of auto, torchvision, native, .* not 'fcv'"):
        DataConfig(pipeline="fcv")  # type: ignore[arg-type]


def test_memory_refuses_what_does_not_fit(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastsiam.pipelines import memory_backend

    monkeypatch.setattr(memory_backend, "free_bytes", lambda device: 20_000)
    monkeypatch.setattr(memory_backend.Pixels, "_load", None)  # before an image is decoded
    with pytest.raises(
        DataError,
        match=r"does not fit: its 24 images take 41 kB, more than 80% of the 20 kB free "
        r"on cpu; use --pipeline native",
    ):
        build("memory", images / "train")


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_package_that_cannot_be_loaded_is_said(
    name: str, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = readable(name, images / "train")
    monkeypatch.setitem(sys.modules, f"fastsiam.pipelines.{name}_backend", None)
    with pytest.raises(BackendError, match=rf"pip install 'fastsiam\[{name}\]'") as caught:
        build(name, root)
    assert "\n" not in str(caught.value)
