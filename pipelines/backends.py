"""The table of pipelines: what each needs, how it is opened, what it can do.

A new pipeline is a module of its own beside this one, a row of this table, and its name in
``fastsiam.config.data``. Code that treats pipelines differently asks the table; only ``automatic``,
which chooses one, names some. Importing it loads neither torch nor a pipeline's package.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fastsiam.config import AugmentConfig, DataConfig, Pipeline
from fastsiam.console import tally
from fastsiam.errors import BackendError, DataError
from fastsiam.files import quoted, why

from .order import Order
from .shared_memory import ITEMS_AHEAD, images_of_an_item
from .store import Store
from .store.beton import BetonStore

if TYPE_CHECKING:
    import torch

    from fastsiam.views.batch import Loader

    from .central import MakeCrops

BASELINE: Pipeline = "torchvision"
"""What users have today: others are compared with it, and it stands in for those that cannot."""
CEILING: Pipeline = "synthetic"
"""What costs nothing: the ceiling of training speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Arguments for opening a loader."""

    data: DataConfig
    order: Order
    augment: AugmentConfig
    device: torch.device
    dtype: torch.dtype
    store: Store | None
    """The images; None if the pipeline reads none."""

    @property
    def images(self) -> Store:
        """The images, for a pipeline that reads some."""
        assert self.store is not None
        return self.store


@dataclass(frozen=True, slots=True, kw_only=True)
class CentralOpening:
    """Arguments for opening central crops."""

    data: DataConfig
    store: Store
    resize: int
    """Shorter side of an image before the crop is taken, in pixels."""
    side: int
    """Of the crop, in pixels."""
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A pipeline: what it needs, how it is opened, what it can do."""

    name: Pipeline
    module: str
    """Of ours, beside this one."""
    about: str
    """What ``fastsiam info`` says of it where it can run; {device} stands for CPU or GPU."""
    open: Callable[[Opening], Loader]
    """Opens a loader."""
    central_crops: Callable[[CentralOpening], MakeCrops] | None = None
    """Opens its own way to central crops on a GPU; None leaves them to the engine."""
    package: str | None = None
    """Module of the optional package that it needs; None if it needs none."""
    extra: str = ""
    """Extra of fastsiam that installs the package."""
    extra_cuda13: str = ""
    """Extra that installs the package for CUDA 13, if that is another."""
    needs_beton: bool = False
    """It reads a .beton file and nothing else."""
    made_up: int | None = None
    """How many images it makes up, in an epoch; None if it reads real ones."""
    crops: bool = True
    """Its loaders yield uint8 crops too: see ``fastsiam.views.batch.CropLoader``."""
    processes: bool = False
    """Its workers are processes that stay, not threads."""
    resident: bool = False
    """It decodes once and keeps all images on the device: they must fit there."""
    decoder: str | None = None
    """What decodes the images of an epoch on a CPU, as ``bench decode`` names it; None: nothing."""
    decodes_on_gpu: bool = False
    """Where there is a GPU, that decodes."""
    made_ahead: Callable[[DataConfig, AugmentConfig, int], int] = lambda *_: 0
    """Says how many batches of so many images a rank makes ahead of the one that is trained on."""
    prefetches: bool = False
    """It makes as many ahead as ``DataConfig.prefetch`` says."""

    @property
    def real(self) -> bool:
        """Whether its batches are made of images."""
        return self.made_up is None

    @property
    def installed(self) -> bool:
        """Whether its package is there; it may still be broken."""
        try:
            return self.package is None or find_spec(self.package) is not None
        except ModuleNotFoundError:  # the package that it is part of
            return False

    def trouble(self) -> str:
        """Import it; say why it cannot work here, if so: not installed, or broken."""
        if not self.installed:
            return f"{self.name} is not installed"
        try:
            importlib.import_module(f"{__package__}.{self.module}")
        except Exception as error:  # of another version than what it was built for: anything
            return f"{self.name} cannot be loaded ({why(error)})"
        return ""

    def reads(self, store: Store) -> bool:
        """Tell whether it can read a store."""
        return not self.needs_beton or (isinstance(store, BetonStore) and not store.is_remote)

    def require_package(self) -> None:
        """Raise a ``BackendError`` if its package is not installed."""
        if not self.installed:
            raise BackendError(self._how_to_install("it is not installed"))

    def require_readable(self, store: Store, data: DataConfig) -> None:
        """Raise a ``DataError`` that says what to do if it cannot read a store."""
        if self.needs_beton and store.is_remote:
            raise DataError(
                f"--pipeline {self.name} reads a .beton file from a disk, and {store.root} is on "
                "another machine: copy it to a disk and name that, or choose --pipeline dali or "
                "torchvision"
            )
        if not self.reads(store):
            raise DataError(
                f"--pipeline {self.name} reads one .beton file, and {store} is none: make it with "
                f"{how_to_convert(data)} and train with --data DIR, or choose --pipeline dali"
            )

    @contextlib.contextmanager
    def importing(self) -> Iterator[None]:
        """Say what to do where its package is there, but broken: a library that it needs, say."""
        try:
            yield
        except ImportError as error:
            if self.package is None:
                raise
            raise BackendError(self._how_to_install(error)) from error

    def readiness(self, device: str) -> str:
        """Say whether it can run here, and what it does.

        Its imports are tried in a process of their own, for a library can be there and broken.

        Args:
            device: what it would work on, CPU or GPU.
        """
        if self.package is not None:
            imports = f"import {self.package}, {__package__}.{self.module}"
            done = subprocess.run([sys.executable, "-c", imports], capture_output=True, text=True)
            if done.returncode:
                lines = done.stderr.strip().splitlines()
                reason = (lines or [f"it ends with code {done.returncode}"])[-1]
                return f"not ready: pip install 'fastsiam[{self.extra}]' ({reason})"
        return "ready: " + self.about.format(device=device)

    def _how_to_install(self, reason: object) -> str:
        also = f" or, with CUDA 13, 'fastsiam[{self.extra_cuda13}]'" if self.extra_cuda13 else ""
        return (
            f"the {self.name} pipeline cannot be loaded ({reason}); "
            f"install it with: pip install 'fastsiam[{self.extra}]'{also}"
        )


def how_to_convert(data: DataConfig) -> str:
    """Return the command that makes a .beton file of a data set."""
    names = data.columns._asdict().items()
    options = [f"--{what}-column {quoted(name)}" for what, name in names if name]
    options += [f"--exif {data.exif}"] * (data.exif != "ignore")
    options += [f"--alpha {data.alpha}"] * (data.alpha != "drop")
    return " ".join(["fastsiam convert folder --source", quoted(data.root), *options, "--out DIR"])


def readiness() -> dict[Pipeline, str]:
    """Return what can be said of each pipeline here: whether it can run, and where it works."""
    import torch

    device = "GPU" if torch.cuda.is_available() else "CPU"
    found: dict[Pipeline, str] = {}
    with tally("trying pipelines", len(BACKENDS)) as done:
        for name, backend in BACKENDS.items():
            found[name] = backend.readiness(device)
            done.add()
    return found


def _open_torchvision(opening: Opening) -> Loader:
    from .torchvision_backend import TorchvisionLoader

    return TorchvisionLoader(
        opening.images,
        opening.order,
        opening.augment,
        workers=opening.data.workers,
        device=opening.device,
        dtype=opening.dtype,
    )


def _ahead_of_workers(data: DataConfig, augment: AugmentConfig, batch: int) -> int:
    from fastsiam.views.batch import crop_shapes

    from .workers import count

    workers = count(data.workers)
    images = images_of_an_item(crop_shapes(augment, batch), workers=workers)
    return math.ceil(workers * ITEMS_AHEAD / math.ceil(batch / images))


def _open_native(opening: Opening) -> Loader:
    from .native_backend import NativeLoader

    return NativeLoader(
        opening.images,
        opening.order,
        opening.augment,
        workers=opening.data.workers,
        prefetch=opening.data.prefetch,
        device=opening.device,
        dtype=opening.dtype,
    )


def _open_ffcv(opening: Opening) -> Loader:
    from .ffcv_backend import FfcvLoader

    return FfcvLoader(
        opening.images,
        opening.order,
        opening.augment,
        workers=opening.data.workers,
        prefetch=opening.data.prefetch,
        os_cache=opening.data.os_cache,
        device=opening.device,
        dtype=opening.dtype,
    )


def _open_dali(opening: Opening) -> Loader:
    from .dali_backend import DaliLoader

    return DaliLoader(
        opening.images,
        opening.order,
        opening.augment,
        workers=opening.data.workers,
        prefetch=opening.data.prefetch,
        hw_decoder_load=opening.data.dali_hw_decoder_load,
        device=opening.device,
        dtype=opening.dtype,
    )


def _dalis_central_crops(opening: CentralOpening) -> MakeCrops:
    from .dali_backend import central_crops

    return partial(
        central_crops,
        opening.store,
        resize=opening.resize,
        side=opening.side,
        workers=opening.data.workers,
        prefetch=opening.data.prefetch,
        hw_decoder_load=opening.data.dali_hw_decoder_load,
        device=opening.device,
    )


def _ahead_of_training(data: DataConfig, augment: AugmentConfig, batch: int) -> int:
    return data.prefetch + 1


def _open_memory(opening: Opening) -> Loader:
    from .memory_backend import MemoryLoader

    return MemoryLoader(
        opening.images,
        opening.order,
        opening.augment,
        workers=opening.data.workers,
        device=opening.device,
        dtype=opening.dtype,
    )


def _open_synthetic(opening: Opening) -> Loader:
    from .synthetic_backend import SyntheticLoader

    return SyntheticLoader(
        opening.order, opening.augment, device=opening.device, dtype=opening.dtype
    )


_ROWS = (
    Backend(
        name="torchvision",
        module="torchvision_backend",
        about="PIL in worker processes, training on the {device}",
        open=_open_torchvision,
        crops=False,
        processes=True,
        decoder="PIL",
        made_ahead=_ahead_of_workers,
    ),
    Backend(
        name="native",
        module="native_backend",
        about="any data, decoded and cropped by compiled code in threads of the CPU",
        open=_open_native,
        decoder="fastsiam: the boxes' part",
        made_ahead=_ahead_of_training,
        prefetches=True,
    ),
    Backend(
        name="ffcv",
        module="ffcv_backend",
        about=".beton files, decoded and cropped in threads of the CPU",
        open=_open_ffcv,
        package="ffcv",
        extra="ffcv",
        needs_beton=True,
        decoder="fastsiam: the boxes' part",
        made_ahead=_ahead_of_training,
        prefetches=True,
    ),
    Backend(
        name="dali",
        module="dali_backend",
        about="decoded and cropped on the {device}",
        open=_open_dali,
        central_crops=_dalis_central_crops,
        package="nvidia.dali",
        extra="dali",
        extra_cuda13="dali13",
        decoder="DALI",
        decodes_on_gpu=True,
        made_ahead=_ahead_of_training,
        prefetches=True,
    ),
    Backend(
        name="memory",
        module="memory_backend",
        about="a small data set decoded once, augmented on the {device}",
        open=_open_memory,
        resident=True,
    ),
    Backend(
        name="synthetic",
        module="synthetic_backend",
        about="tensors on the {device}, the ceiling of training speed",
        open=_open_synthetic,
        made_up=1_281_167,  # as many as ImageNet's training set has
        crops=False,
    ),
)

BACKENDS: dict[Pipeline, Backend] = {backend.name: backend for backend in _ROWS}
"""All pipelines by their names."""


def backend_of(data: DataConfig) -> Backend:
    """Return the pipeline of settings in which it is settled."""
    assert data.pipeline != "auto"
    return BACKENDS[data.pipeline]
