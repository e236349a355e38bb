"""The table of pipelines says what is so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from fastsiam.config import DataConfig, Pipeline
from fastsiam.config.data import ImagePipeline
from fastsiam.errors import DataError
from fastsiam.pipelines import open_store
from fastsiam.pipelines.backends import (
    BACKENDS,
    BASELINE,
    CEILING,
    Backend,
    readiness,
)
from tests.conftest import ROOT
from tests.pipelines.cases import readable


@pytest.mark.dali
@pytest.mark.ffcv
def test_every_pipeline_has_its_row_and_is_ready_here() -> None:
    assert tuple(BACKENDS) == get_args(Pipeline)
    assert all(name == backend.name for name, backend in BACKENDS.items())
    assert [name for name in BACKENDS if BACKENDS[name].real] == list(get_args(ImagePipeline))
    assert BACKENDS[BASELINE].real
    assert not BACKENDS[CEILING].real and BACKENDS[CEILING].decoder is None
    for name, backend in BACKENDS.items():
        assert DataConfig(pipeline=name).loads_images == backend.real
    found = readiness()
    assert tuple(found) == get_args(Pipeline)
    for line in found.values():
        assert line.startswith("ready: ") and "{" not in line and "\n" not in line


def test_the_table_loads_neither_torch_nor_a_package() -> None:
    script = (
        "import sys; import fastsiam.pipelines; from fastsiam.pipelines.backends import BACKENDS\n"
        "print([m for m in sys.modules if m.split('.')[0] in "
        "{'torch', 'torchvision', 'ffcv', 'nvidia', 'numba'} or m.endswith('_backend')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_only_who_needs_a_beton_refuses_other_stores(images: Path) -> None:
    folder = open_store(images / "train", "train")
    converted = open_store(readable("ffcv", images / "train"), "train")
    for backend in BACKENDS.values():
        assert backend.reads(converted)
        assert backend.reads(folder) == (not backend.needs_beton)
        if backend.needs_beton:
            with pytest.raises(DataError, match=f"--pipeline {backend.name} reads one .beton"):
                backend.require_readable(folder)
    assert [name for name, backend in BACKENDS.items() if backend.needs_beton] == ["ffcv"]


def test_what_cannot_run_here_says_what_to_install() -> None:
    broken = Backend(name="dali", loader="no_such_module.Loader", about="", package="sys")
    line = broken.readiness("CPU")
    assert line.startswith("not ready: the dali pipeline cannot be loaded (")
    assert "no_such_module" in line and "pip install 'fastsiam[dali]'" in line
    missing = Backend(name="dali", loader="order.Order", about="", package="no_such.package")
    assert broken.installed and not missing.installed
