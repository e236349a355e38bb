"""The pipeline table is correct, and a pipeline that cannot run or read data fails in one line."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from fastsiam.config import DataConfig, Pipeline
from fastsiam.config.data import ImagePipeline
from fastsiam.errors import BackendError, DataError
from fastsiam.pipelines import memory_backend, open_store
from fastsiam.pipelines.backends import BACKENDS, BASELINE, CEILING, readiness
from fastsiam.pipelines.headers import Headers
from fastsiam.pipelines.store import MixedStore
from fastsiam.pipelines.store.base import warn_once
from tests.pipelines.cases import make_readable, marked, open_loader
from tests.pipelines.conftest import Loaders
from tests.processes import python


@pytest.mark.dali
@pytest.mark.ffcv
def test_every_pipeline_is_listed_and_ready() -> None:
    assert tuple(BACKENDS) == get_args(Pipeline)
    assert all(name == backend.name for name, backend in BACKENDS.items())
    assert BACKENDS[CEILING].decoder is None
    loaded = [name for name in BACKENDS if DataConfig(pipeline=name).loads_images]
    assert loaded == list(get_args(ImagePipeline)) and BASELINE in loaded
    lines = readiness()
    assert tuple(lines) == get_args(Pipeline)
    for line in lines.values():
        assert line.startswith("ready: ") and "{" not in line and "\n" not in line
    for package, installed in (("sys", True), ("no_such.package", False)):
        assert replace(BACKENDS["dali"], package=package).installed == installed


def test_backend_table_imports_neither_torch_nor_backends() -> None:
    script = (
        "import sys; import fastsiam.pipelines; from fastsiam.pipelines.backends import BACKENDS\n"
        "print([m for m in sys.modules if m.split('.')[0] in "
        "{'torch', 'torchvision', 'ffcv', 'nvidia', 'numba'} or m.endswith('_backend')])"
    )
    result = python(script)
    assert (result.stdout, result.stderr) == ("[]\n", "")


@pytest.mark.ffcv
def test_only_ffcv_requires_beton(images: Path) -> None:
    """It suggests a conversion, except for mixtures."""
    folder = open_store(images / "train", "train")
    converted = open_store(make_readable("ffcv", images / "train"), "train")
    mixed = MixedStore([folder, converted])
    for backend in BACKENDS.values():
        assert backend.reads(converted)
        assert backend.reads(folder) == (not backend.needs_beton)
        if backend.needs_beton:
            message = rf"--pipeline {backend.name} reads one \.beton .* choose --pipeline native"
            with pytest.raises(DataError, match=f"{message}, or create one with"):
                backend.check(folder)
            with pytest.raises(DataError, match=f"{message}$"):
                backend.check(mixed)
    assert [name for name, backend in BACKENDS.items() if backend.needs_beton] == ["ffcv"]


def test_memory_rejects_wrong_sizes_and_too_many_images(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image whose size differs from its header; too many images, before any is decoded."""
    with monkeypatch.context() as patch:
        decode = Headers.decode_image
        patch.setattr(Headers, "decode_image", lambda self, index: decode(self, index)[:9, :9])
        with pytest.raises(DataError, match=r"class0/000\.jpg: it is not as large as its header"):
            open_loader("memory", images / "train")
    monkeypatch.setattr(memory_backend, "free_bytes", lambda device: 20_000)
    monkeypatch.setattr(memory_backend.Pixels, "_load", None)
    with pytest.raises(
        DataError,
        match=r"does not fit: its 24 images take 41 kB, more than 80% of the 20 kB free "
        r"on cpu; use --pipeline native",
    ):
        open_loader("memory", images / "train")


def test_settings_without_effect_cause_warning(
    images: Path, tmp_path: Path, loaders: Loaders, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    for name in ("torchvision", "native"):
        loaders(name, images / "train", workers="auto", prefetch=3)
    loaders("memory", images / "train", prefetch=3)
    loaders("synthetic", images / "train", cache="folder")
    loaders("native", images / "train", cache=str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()
    assert caplog.messages == [
        "--workers auto has no effect with --pipeline torchvision",
        "--prefetch has no effect with --pipeline torchvision",
        "--cache has no effect with --pipeline synthetic",
        f"--cache has no effect on {images / 'train'}, which is on this machine",
    ]


@pytest.mark.parametrize("name", marked("ffcv", "dali"))
def test_backend_import_error_suggests_pip_install(
    name: str, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_readable(name, images / "train")
    monkeypatch.setitem(sys.modules, f"fastsiam.pipelines.{name}_backend", None)
    message = rf"the {name} pipeline cannot be loaded \(.*{name}_backend.*\); install it with: pip "
    with pytest.raises(BackendError, match=message) as caught:
        open_loader(name, root)
    assert f"pip install 'fastsiam[{name}]'" in str(caught.value) and "\n" not in str(caught.value)
