"""Shared fixtures: generated images, real images where available, ranks and a small run."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from PIL import Image

from fastsiam.config import (
    AugmentConfig,
    DataConfig,
    MonitorConfig,
    NumericsConfig,
    OptimConfig,
    RunConfig,
    StepConfig,
    TrainConfig,
)
from tests.configs import TINY, with_settings
from tests.processes import Forked

ROOT = Path(__file__).parents[1]
REAL_DATA = Path(os.environ.get("FASTSIAM_TEST_DATA", ROOT.parent / "shared" / "data"))

if find_spec("hypothesis"):  # a machine with a GPU may lack it
    from hypothesis import HealthCheck, settings

    # A busy machine must not fail a test because it is slow.
    times = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("untimed", settings.default, **times)
    settings.load_profile("untimed")


def skip(reason: str, *, allow_module_level: bool = False) -> NoReturn:
    """Skip a test or module, or fail it if ``$FASTSIAM_NO_SKIP`` is set."""
    if os.environ.get("FASTSIAM_NO_SKIP"):
        pytest.fail(f"FASTSIAM_NO_SKIP is set, so this is a failure: {reason}")
    pytest.skip(reason, allow_module_level=allow_module_level)


def import_or_skip(package: str, extra: str = "", *, allow_module_level: bool = False) -> Any:
    """Return a package or module, or ``skip``; ``extra`` of fastsiam installs it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        name = package.partition(".")[0]
        install = f"'fastsiam[{extra}]'" if extra else name
        skip(f"needs {name}: pip install {install}", allow_module_level=allow_module_level)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")  # even with FASTSIAM_NO_SKIP: a GPU cannot be installed
    if item.get_closest_marker("dali") and not (find_spec("nvidia") and find_spec("nvidia.dali")):
        skip("needs nvidia-dali: pip install 'fastsiam[dali]'")
    if item.get_closest_marker("ffcv") and find_spec("ffcv") is None:
        skip("needs ffcv: pip install 'fastsiam[ffcv]'")


def write_images(
    folder: Path, *, classes: int = 3, each: int = 8, side: int = 24, seed: int = 0
) -> Path:
    """Write class folders of striped JPEGs. The period of the stripes depends on the class."""
    generator = np.random.default_rng(seed)
    for kind in range(classes):
        (folder / f"class{kind}").mkdir(parents=True, exist_ok=True)
        for number in range(each):
            wave = np.sin(np.arange(side) * (kind + 1) / 2 + generator.uniform(0, 6))
            stripes = np.broadcast_to(wave[:, None], (side, side))[..., None]
            pixels = (
                128
                + 60 * stripes * generator.uniform(0.3, 1, 3)
                + generator.normal(0, 12, (side, side, 3))
            )
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            image.save(folder / f"class{kind}" / f"{number:03d}.jpg", quality=95)
    return folder


def write_data(folder: Path) -> Path:
    """Write train/ (24 images of 3 classes) and val/ (12)."""
    write_images(folder / "train")
    write_images(folder / "val", each=4, seed=1)
    return folder


@pytest.fixture(autouse=True)
def _reset_sigchld_handler() -> Iterator[None]:
    """Reset SIGCHLD after each test: torch's DataLoader sets a handler that can raise later."""
    yield
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _reset_log_level() -> Iterator[None]:
    """Reset the log level after each test: a command in this process sets it."""
    yield
    logging.getLogger("fastsiam").setLevel(logging.NOTSET)


@pytest.fixture
def ample_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report plenty of free memory to a run, whatever other tests use."""
    free, total = 10 * 10**9, 64 * 10**9
    monkeypatch.setattr("fastsiam.train.gauges.host_memory", lambda: (free, total))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A data set with train/ (24 images of 3 classes) and val/ (12)."""
    return write_data(tmp_path / "data")


@pytest.fixture(scope="session")
def real_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """500 ImageNet JPEGs in class folders."""
    archive = REAL_DATA / "imagenet-sample-500.zip"
    if archive.with_suffix("").is_dir():
        return archive.with_suffix("")
    if not archive.exists():
        skip(f"needs {archive.name} in {REAL_DATA} or in $FASTSIAM_TEST_DATA")
    folder = tmp_path_factory.mktemp(archive.stem)
    shutil.unpack_archive(archive, folder)
    return folder


@pytest.fixture
def small(images: Path, tmp_path: Path) -> TrainConfig:
    """A run of a few seconds: 24 images of 16 pixels, batch 8, a 4-channel network, float32."""
    return small_config(images, tmp_path / "run")


def small_config(images: Path, out: Path) -> TrainConfig:
    """Return the config of ``small`` for a data set and a run folder."""
    return TrainConfig(
        data=DataConfig(data=str(images), pipeline="memory", workers=0),
        augment=AugmentConfig.alike(crop=16),
        model=TINY,
        optim=OptimConfig(epochs=4, batch=8, lr=0.5),
        numerics=NumericsConfig(precision="fp32"),
        step=StepConfig(compile="off"),
        monitor=MonitorConfig(knn_every=2, knn_k=5, eval_resize=16),
        run=RunConfig(device="cpu", out=str(out), log_every=1, save_every=100),
    )


@pytest.fixture(scope="session")
def stopped_config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of recipe "demo", stopped after step 6 of 12. Tests must not change it or its data."""
    from fastsiam.train.command import train_here

    folder = tmp_path_factory.mktemp("stopped")
    config = small_config(write_data(folder / "data"), folder / "run")
    config = with_settings(config, knn_every=0)
    train_here(with_settings(config, max_steps=6), "demo")
    return config


@pytest.fixture
def stopped_copy(stopped_config: TrainConfig, tmp_path: Path) -> TrainConfig:
    """A copy of ``stopped_config`` that a test may change."""
    run = shutil.copytree(stopped_config.run.out, tmp_path / "run")
    return with_settings(stopped_config, out=run)


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[..., list[object]]:
    """Run ``tests.rank_jobs.JOB(rank, world, **settings)`` on each rank; return the results."""

    def run(job: str, world: int, **settings: object) -> list[object]:
        from tests import rank_jobs

        job_of = rank_jobs.main, job, world, settings, tmp_path
        processes = [Forked(*job_of, rank) for rank in range(world)]
        results = [process.wait(300) for process in processes]
        assert not any(one.returncode for one in results), "\n".join(one.stderr for one in results)
        return [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(world)]

    return run
