"""The table of pipelines: what each one needs, how to open it, and what it can do.

To add a pipeline, add a module beside this one, a row to this table and its name to
``ImagePipeline`` in ``fastsiam.config.data``. Code that treats pipelines differently asks the
table; only ``automatic``, which chooses a pipeline, refers to some by name. Importing this module
loads neither torch nor the package of a pipeline.
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
from fastsiam.files import quoted, why

from .store import Store
from .store.beton import BetonStore

if TYPE_CHECKING:
    import torch

    from fastsiam.views.batch import Loader

    from .central import MakeCrops
    from .loaders import LoaderSpec

BASELINE: Pipeline = "torchvision"
"""The pipeline that others are compared with; it also replaces pipelines that cannot run."""
ENGINE: Pipeline = "native"
"""The pipeline that needs no optional package; it makes all central crops on a CPU."""
CEILING: Pipeline = "synthetic"
"""The pipeline whose batches cost nothing: the upper limit of training speed."""
NOISE_IMAGES = 1_281_167
"""Number of images in an epoch of it: that of ImageNet's training set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One pipeline: its loader class, the settings that it takes, and its capabilities."""

    name: Pipeline
    loader: str
    """The loader class, or what opens one, as "MODULE.NAME"; the module lies beside this one."""
    about: str
    """Description for ``fastsiam info``; {device} is replaced by CPU or GPU."""
    package: str | None = None
    """Optional package that it imports; the extra with the pipeline's name installs it."""
    extra_cuda13: str = ""
    """Extra that installs the package for CUDA 13, if it differs."""
    prefetches: bool = False
    """Whether it prepares ``DataConfig.prefetch`` batches ahead, on any device."""
    needs_beton: bool = False
    """Whether it only reads .beton files, on a local disk."""
    crops: bool = True
    """Whether its loader also yields uint8 crops, as a ``loaders.CropLoader``."""
    resident: bool = False
    """Whether it decodes once and keeps all images in the memory of the device."""
    decoder: str | None = None
    """Row of ``bench decode`` for its decoder on a CPU; None if training decodes nothing."""
    decodes_on_gpu: bool = False
    """Whether it decodes on a GPU; its module then has a function ``central_crops``."""

    @property
    def installed(self) -> bool:
        """Whether its package is installed; the package may still be broken."""
        try:
            return self.package is None or find_spec(self.package) is not None
        except ModuleNotFoundError:  # the package that it is part of
            return False

    def trouble(self) -> str:
        """Import the pipeline; return why it cannot run here and what to do, or "" if it can."""
        try:
            self._module()
        except Exception as error:  # a package of an unexpected version raises anything
            also = f" or, with CUDA 13, 'fastsiam[{self.extra_cuda13}]'" * bool(self.extra_cuda13)
            return (
                f"the {self.name} pipeline cannot be loaded ({why(error)}); "
                f"install it with: pip install 'fastsiam[{self.name}]'{also}"
            )
        return ""

    def reads(self, store: Store) -> bool:
        """Return whether it can read a store."""
        whole = isinstance(store, BetonStore) and len(store.files) == 1
        return not self.needs_beton or (whole and not store.is_remote)

    def works_on(self, store: Store) -> bool:
        """Tell whether it can run here and read a store."""
        return self.reads(store) and not self.trouble()

    def check(self, store: Store | None = None) -> None:
        """Check that it can run here, and read a store.

        Raises:
            BackendError: it cannot be loaded; the message says how to install its package.
            DataError: it cannot read the store; the message says what to do.
        """
        if trouble := self.trouble():
            raise BackendError(trouble)
        if store is not None and not self.reads(store):
            ways = f"choose --pipeline {ENGINE}"
            if store.sets is None:
                ways += (
                    ", or make one with fastsiam convert folder --source "
                    f"{quoted(store.origin or store.root)} --out DIR and train with --data DIR"
                )
            raise DataError(
                f"--pipeline {self.name} reads one .beton file on a disk, not {store}: {ways}"
            )

    def open(self, spec: LoaderSpec) -> Loader:
        """Open the loader of one rank.

        Raises:
            DataError: the data cannot be read.
            ValueError: it has no crops that could be transformed.
        """
        if spec.crop_transform is not None and not self.crops:
            raise ValueError(f"the {self.name} pipeline has no crops for crop_transform")
        loader: Loader = getattr(self._module(), self.loader.partition(".")[2])(spec)
        return loader

    def central_crops(
        self, data: DataConfig, store: Store, resize: int, side: int, device: torch.device
    ) -> MakeCrops:
        """Return what makes central crops, with the arguments of ``native_backend.central_crops``.

        This pipeline makes them if it decodes on a GPU; otherwise the engine does. The engine also
        makes crops that are larger than the resized images, which get a black border.
        """
        own = device.type == "cuda" and self.decodes_on_gpu and resize >= side
        backend = self if own and not self.trouble() else BACKENDS[ENGINE]
        make: MakeCrops = partial(
            backend._module().central_crops, data, store, resize=resize, side=side, device=device
        )
        return make

    def _module(self) -> ModuleType:
        return importlib.import_module(f"{__package__}.{self.loader.partition('.')[0]}")


def readiness() -> dict[Pipeline, str]:
    """Return a line for each pipeline: whether it can run here, and what it does."""
    import torch

    device = "GPU" if torch.cuda.is_available() else "CPU"
    return {
        name: f"not ready: {trouble}"
        if (trouble := backend.trouble())
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
            about="any data, decoded and cropped by compiled code in threads of the CPU",
            decoder="fastsiam: the boxes' part",
        ),
        Backend(
            name="ffcv",
            loader="ffcv_backend.FfcvLoader",
            prefetches=True,
            about=".beton files, decoded and cropped in threads of the CPU",
            package="ffcv",
            needs_beton=True,
            decoder="fastsiam: the boxes' part",
        ),
        Backend(
            name="dali",
            loader="dali_backend.dali_loader",
            prefetches=True,
            about="decoded and cropped on the {device}",
            package="nvidia.dali",
            extra_cuda13="dali13",
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
            about="tensors on the {device}, the ceiling of training speed",
            crops=False,
        ),
    )
}
"""All pipelines by their names."""


def backend_of(data: DataConfig) -> Backend:
    """Return the pipeline that the settings name; it must not be "auto"."""
    assert data.pipeline != "auto"
    return BACKENDS[data.pipeline]
