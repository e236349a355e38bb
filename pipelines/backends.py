"""Table of the pipelines: how to open each one, what it needs, and what it supports.

To add a pipeline, add a module next to this one, a row to this table and its name to
``ImagePipeline`` in ``fastsiam.config.data``. Code that treats pipelines differently looks them up
in the table; only ``automatic``, which chooses a pipeline, refers to some by name. Importing this
module imports neither torch nor the package of a pipeline.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

from fastsiam.config import DataConfig, Pipeline
from fastsiam.errors import BackendError, DataError
from fastsiam.files import quote, why

from .store import Store
from .store.base import warn_once
from .store.beton import BetonStore

if TYPE_CHECKING:
    import torch

    from fastsiam.views.batch import Loader

    from .central import MakeCrops
    from .loaders import LoaderSpec

BASELINE: Pipeline = "torchvision"
"""The pipeline that others are compared with, and the fallback if others cannot run."""
ENGINE: Pipeline = "native"
"""The pipeline without optional packages, which also makes all central crops on a CPU."""
CEILING: Pipeline = "synthetic"
"""The pipeline without loading cost, which gives the upper limit of training speed."""
NOISE_IMAGES = 1_281_167
"""Images in an epoch of the synthetic pipeline: the size of ImageNet's training set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The loader class, requirements and capabilities of a pipeline."""

    name: Pipeline
    loader: str
    """The loader class or a factory, as "MODULE.NAME" with a module next to this one."""
    about: str
    """Description for ``fastsiam info``; {device} is replaced by CPU or GPU."""
    package: str | None = None
    """Optional package that it imports."""
    install: str = ""
    """Command that installs the package."""
    prefetches: bool = False
    """Whether it prepares ``DataConfig.prefetch`` batches ahead, on any device."""
    tunes_workers: bool = False
    """Whether ``--workers auto`` searches for the fewest threads that suffice; see ``tuning``."""
    needs_beton: bool = False
    """Whether it reads only .beton files on a local disk."""
    crops: bool = True
    """Whether its loader is a ``loaders.CropLoader``, which also yields uint8 crops."""
    resident: bool = False
    """Whether it decodes all images once and keeps them in the memory of the device."""
    decoder: str | None = None
    """Row of ``bench decode`` for its CPU decoder; None if it decodes nothing in training."""
    decodes_on_gpu: bool = False
    """Whether it decodes on a GPU; its module then needs a function ``central_crops``."""

    @property
    def installed(self) -> bool:
        """Whether its package is installed; the package may still be broken."""
        try:
            return self.package is None or find_spec(self.package) is not None
        except ModuleNotFoundError:  # its parent package is missing
            return False

    def problem(self) -> str:
        """Import the pipeline. Return why it cannot run and how to fix that, or "" if it can."""
        try:
            self._module()
        except Exception as error:  # an incompatible version may raise any exception
            hint = f"; install it with: {self.install}" * bool(self.install)
            return f"the {self.name} pipeline cannot be loaded ({why(error)}){hint}"
        return ""

    def reads(self, store: Store) -> bool:
        """Return whether the pipeline can read a store."""
        is_single_file = isinstance(store, BetonStore) and len(store.files) == 1
        return not self.needs_beton or (is_single_file and not store.is_remote)

    def works_on(self, store: Store) -> bool:
        """Return whether the pipeline can run here and read a store."""
        return self.reads(store) and not self.problem()

    def check(self, store: Store | None = None) -> None:
        """Check that the pipeline can run here and, if given, read a store.

        Raises:
            BackendError: it cannot be imported; the message says how to install its package.
            DataError: it cannot read the store; the message says what to do.
        """
        if problem := self.problem():
            raise BackendError(problem)
        if store is not None and not self.reads(store):
            advice = f"choose --pipeline {ENGINE}"
            if store.sets is None:
                advice += (
                    ", or create one with fastsiam convert folder --source "
                    f"{quote(store.origin or store.root)} --out DIR and train with --data DIR"
                )
            raise DataError(
                f"--pipeline {self.name} reads one .beton file on a local disk, not {store}: "
                f"{advice}"
            )

    def open(self, spec: LoaderSpec) -> Loader:
        """Open the loader of one rank; warn about settings that have no effect.

        Raises:
            DataError: the data cannot be read.
            ValueError: ``spec.crop_transform`` is set, but the pipeline has no crops.
        """
        if spec.crop_transform is not None and not self.crops:
            raise ValueError(f"the {self.name} pipeline has no crops for crop_transform")
        if spec.data.workers == "auto" and not self.tunes_workers:
            warn_once(f"--workers auto has no effect with --pipeline {self.name}")
        prefetches = self.prefetches or (self.resident and spec.device.type == "cpu")
        if spec.data.prefetch != DataConfig().prefetch and not prefetches:
            where = " on a GPU" * self.resident
            warn_once(f"--prefetch has no effect with --pipeline {self.name}{where}")
        if spec.data.cache and not spec.data.loads_images:
            warn_once(f"--cache has no effect with --pipeline {self.name}")
        loader: Loader = getattr(self._module(), self.loader.partition(".")[2])(spec)
        return loader

    def central_crops(
        self, data: DataConfig, store: Store, resize: int, side: int, device: torch.device
    ) -> MakeCrops:
        """Return a function that makes central crops; see ``native_backend.central_crops``.

        The pipeline makes them itself if it decodes on the GPU; otherwise the engine does. The
        engine also makes crops that are larger than the resized images: they get a black border.
        """
        makes_crops = device.type == "cuda" and self.decodes_on_gpu and resize >= side
        backend = self if makes_crops and not self.problem() else BACKENDS[ENGINE]
        make: MakeCrops = partial(
            backend._module().central_crops, data, store, resize=resize, side=side, device=device
        )
        return make

    def _module(self) -> ModuleType:
        return importlib.import_module(f"{__package__}.{self.loader.partition('.')[0]}")


def readiness() -> dict[Pipeline, str]:
    """Return the status of each pipeline: whether it can run here, and what it does."""
    import torch

    device = "GPU" if torch.cuda.is_available() else "CPU"
    return {
        name: f"not ready: {problem}"
        if (problem := backend.problem())
        else f"ready: {backend.about.format(device=device)}"
        for name, backend in BACKENDS.items()
    }


BACKENDS: dict[Pipeline, Backend] = {
    backend.name: backend
    for backend in (
        Backend(
            name="torchvision",
            loader="torchvision_backend.TorchvisionLoader",
            about="PIL in worker processes, training on the {device}",
            crops=False,
            decoder="PIL",
        ),
        Backend(
            name="native",
            loader="native_backend.NativeLoader",
            prefetches=True,
            tunes_workers=True,
            about="any data, decoded and cropped by compiled code in CPU threads",
            decoder="fastsiam: the boxes' part",
        ),
        Backend(
            name="ffcv",
            loader="ffcv_backend.FfcvLoader",
            prefetches=True,
            tunes_workers=True,
            about=".beton files, decoded and cropped in CPU threads",
            package="ffcv",
            install="pip install 'fastsiam[ffcv]'",
            needs_beton=True,
            decoder="fastsiam: the boxes' part",
        ),
        Backend(
            name="dali",
            loader="dali_backend.dali_loader",
            prefetches=True,
            about="decoded and cropped on the {device}",
            package="nvidia.dali",
            install="pip install 'fastsiam[dali]' or, with CUDA 13, 'fastsiam[dali13]'",
            decoder="DALI",
            decodes_on_gpu=True,
        ),
        Backend(
            name="memory",
            loader="memory_backend.MemoryLoader",
            about="a small data set decoded once, augmented on the {device}",
            resident=True,
        ),
        Backend(
            name="synthetic",
            loader="synthetic_backend.SyntheticLoader",
            about="random tensors on the {device}, the upper limit of training speed",
            crops=False,
        ),
    )
}
"""All pipelines by name."""


def backend_of(data: DataConfig) -> Backend:
    """Return the pipeline of the settings, which must not be "auto"."""
    assert data.pipeline != "auto"
    return BACKENDS[data.pipeline]
