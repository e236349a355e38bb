"""``--pipeline auto``: the choice for each data set and device, and its message."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from fastsiam import environment, kernels
from fastsiam.errors import BackendError
from fastsiam.kernels import library
from fastsiam.pipelines import automatic as module
from fastsiam.pipelines import open_store, survey
from fastsiam.pipelines.automatic import choose_pipeline
from fastsiam.pipelines.backends import BACKENDS
from fastsiam.pipelines.store import FolderStore
from fastsiam.pipelines.survey import decoded_bytes, sample_of
from tests.pipelines.cases import make_readable
from tests.sources import put

CPU, GPU = torch.device("cpu"), torch.device("cuda")
IMAGE_BYTES = 3 * 24 * 24
"""Bytes of a decoded test image."""


def explain_choice(
    root: Path, device: torch.device = CPU, *, free: float = 0.0, model: float = 0.0
) -> str:
    store = open_store(root, "train")
    return str(choose_pipeline(store, device=device, free=free, model=model))


def test_memory_is_chosen_if_images_and_model_fit(images: Path) -> None:
    message = "pipeline memory: 24 images take 41 kB of 87 kB on the CPU"
    assert explain_choice(images, free=130_000) == message
    size = 24 * IMAGE_BYTES
    least = size * 1.2 / 0.8  # loading may take four fifths of free memory
    largest = 0.9 * 130_000 - size
    for free, model, name in (
        (least + 1, 0, "memory"),
        (least - 1, 0, "native"),
        (130_000, largest, "memory"),
        (130_000, largest + 1, "native"),
    ):
        assert explain_choice(images, free=free, model=model).startswith(f"pipeline {name}: ")


TOO_LARGE = (
    "24 images take 41 kB decoded, more than the 0 kB that the CPU can hold besides the model"
)


@pytest.mark.dali
@pytest.mark.ffcv
def test_pipeline_choice_if_images_do_not_fit(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DALI if the GPU has few cores and DALI can be loaded; torchvision if kernels are missing."""
    for source in (images, make_readable("ffcv", images / "train")):
        assert explain_choice(source) == f"pipeline native: {TOO_LARGE}"
    reason = TOO_LARGE.replace("CPU", "GPU")
    for cores, line in {
        5: f"pipeline dali: {reason}; 5 cores for this GPU",
        6: f"pipeline native: {reason}",
    }.items():
        monkeypatch.setattr(module, "own_cores", lambda cores=cores: cores)
        assert explain_choice(images, GPU) == line
    monkeypatch.setattr(module, "own_cores", lambda: 1)
    broken = replace(BACKENDS["dali"], package="sys", loader="no_such_module.Loader")
    monkeypatch.setattr(module, "BACKENDS", BACKENDS | {"dali": broken})
    assert "dali pipeline cannot be loaded (No module" in explain_choice(images, GPU)
    assert explain_choice(images, GPU).startswith("pipeline native: ")

    missing = BackendError("no C++ compiler found")
    monkeypatch.setattr(library, "kernels", Mock(side_effect=missing))
    assert explain_choice(images) == f"pipeline torchvision: {TOO_LARGE}; no C++ compiler found"


def test_decoded_size_is_estimated_from_headers(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is read in groups is sampled from a few of them."""
    store = FolderStore(images / "train")
    read_mock = Mock(wraps=store.read)
    monkeypatch.setattr(store, "read", read_mock)
    assert decoded_bytes(store) == (24 * IMAGE_BYTES, True) and read_mock.call_count == 24
    assert decoded_bytes(store, np.arange(5)) == (5 * IMAGE_BYTES, True)
    (images / "train" / "class0" / "000.jpg").write_bytes(b"no image")
    assert decoded_bytes(store) == (23 * IMAGE_BYTES, True)
    monkeypatch.setattr(survey, "_SAMPLE", 6)
    read_mock.reset_mock()
    assert (
        decoded_bytes(store) == (int(24 * IMAGE_BYTES * 1.25), False) and read_mock.call_count == 6
    )
    monkeypatch.setattr(survey, "_SAMPLE", 4)
    monkeypatch.setattr(survey, "_SAMPLE_GROUPS", 2)
    store.groups = np.arange(24) // 4
    assert sample_of(store, np.arange(24)).tolist() == [0, 1, 20, 21]
    bad = put(images / "bad" / "bad.jpg", "no image").parent
    assert explain_choice(bad, free=1e8) == (
        "pipeline native: image sizes are unknown: no header can be read"
    )


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 4096_000),
        (
            {
                "sys/fs/cgroup/memory.max": "3000000\n",
                "sys/fs/cgroup/memory.current": "2000000\n",
                "sys/fs/cgroup/memory.stat": "anon 7\ninactive_file 500000\n",
            },
            1_500_000,
        ),
        (
            {
                "proc/self/cgroup": "9:memory:/docker\n",
                "sys/fs/cgroup/memory/docker/memory.limit_in_bytes": "700000\n",
                "sys/fs/cgroup/memory/docker/memory.usage_in_bytes": "800000\n",
                "sys/fs/cgroup/memory/docker/memory.stat": "total_inactive_file 300000\n",
            },
            200_000,
        ),
    ],
)
def test_free_memory_respects_cgroup_limits(
    files: dict[str, str], free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        put(tmp_path / name, text)
    machine = SimpleNamespace(available=4096_000, total=8192_000)
    monkeypatch.setattr("psutil.virtual_memory", lambda: machine)
    monkeypatch.setattr(kernels.cores, "_ROOT", tmp_path)
    assert environment.free_bytes(CPU) == free


def test_ranks_share_memory_of_machine(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(images, "train")
    monkeypatch.setattr(environment, "host_memory", lambda: (int(24 * IMAGE_BYTES / 0.4 * 1.5), 0))
    for ranks, fits in (("1", True), ("2", False)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert (choose_pipeline(store, device=CPU).name == "memory") == fits
