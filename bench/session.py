"""Execution of a case of ``fastsiam bench``, and what the cases share: images, device, console."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fastsiam.bench.cases import CASES
from fastsiam.bench.config import CONTAINERS, ORIGINAL, BenchConfig, Stored
from fastsiam.bench.finding import finding
from fastsiam.bench.images import Images, take_images
from fastsiam.bench.peers import Peer
from fastsiam.bench.records import UNSTEADY, Record, write
from fastsiam.bench.tables import caption, differences, table
from fastsiam.config import DataConfig, Pipeline, RunConfig, TrainConfig
from fastsiam.console import Console
from fastsiam.distributed import check_devices
from fastsiam.errors import BackendError
from fastsiam.pipelines.backends import BACKENDS, BASELINE
from fastsiam.pipelines.workers import count as count_workers
from fastsiam.run.records import check_targets
from fastsiam.signals import leave_at_once, stops_handled

_REPEATS, _FEW_REPEATS = 5, 3
"""If nobody asks for a number; the fewer are those of ``all``."""
_LOADED_ON_CPU = 64
_TRAINED_ON_CPU, _SMALL_TRAINED_ON_CPU = 8, 64
"""Views that take a CPU about half a second, large and small ones; twice as many in narrow nets."""
_FOR_EACH_WORKER = 4
_GPU_BYTES = 220e6
"""Memory that an image of 224 pixels takes in a ResNet-50's training in float32, roughly."""


@dataclass
class Session:
    """A run of bench: made by ``session``."""

    config: BenchConfig
    device: str
    """cuda or cpu."""
    folder: Path
    """For files; they go when the session ends."""
    console: Console
    failed: dict[str, str] = field(default_factory=dict)
    """Runners that could not be measured, and why."""
    _images: dict[int, Images] = field(default_factory=dict)

    @property
    def gpu(self) -> bool:
        """Whether a GPU is what is measured."""
        return self.device == "cuda"

    @property
    def workers(self) -> int:
        """Processes or threads that load."""
        return max(1, count_workers(self.config.workers))

    @property
    def loaded_batch(self) -> int:
        """Images of a batch, where batches are only loaded."""
        return self.config.batch or (256 if self.gpu else _LOADED_ON_CPU)

    @property
    def trained_batch(self) -> int:
        """Images of a batch, where a model is trained with it."""
        if self.config.batch:
            return self.config.batch
        together = self.config.train.numerics.bn_images or 2
        if not self.gpu:
            model, views = self.config.train.model, len(self.config.augment.views)
            most = _TRAINED_ON_CPU if model.stem == "imagenet" else _SMALL_TRAINED_ON_CPU
            return max(together, most * (2 if model.width < 64 else 1) // views)
        room = torch.cuda.get_device_properties(0).total_memory / _GPU_BYTES
        pixels = (self.config.augment.crop / 224) ** 2
        fits: int = 2 ** int(math.log2(max(2.0, room / pixels)))
        return min(self.config.train.optim.batch, max(together, fits))

    @property
    def most_ranks(self) -> int:
        """How many ranks are tried: all GPUs of the machine, or two processes on a CPU."""
        return torch.cuda.device_count() if self.gpu else 2

    @property
    def more_of_small_views(self) -> int:
        """How many times as many images are measured with if views are smaller than 224 pixels."""
        return max(1, min(16, (224 // self.config.augment.crop) ** 2))

    def images(self, batch: int, *, at_least: int = 1) -> Images:
        """Return whole batches of images, as many as take seconds to load.

        Unless a number is asked for, each worker gets as many batches as the others.
        """
        few = (4096 if self.gpu else 512) * self.more_of_small_views
        one_each = self.workers * batch
        shared = min(_FOR_EACH_WORKER * one_each, _FOR_EACH_WORKER * few)
        wanted = self.config.images or math.ceil(max(few, shared) / one_each) * one_each
        count = max(at_least, round(wanted / batch)) * batch
        if count not in self._images:
            self._images[count] = take_images(self.config, count, self.folder, self.console.say)
        return self._images[count]

    def data(self, images: Images, pipeline: Pipeline, form: Stored = "original") -> DataConfig:
        """Return where a pipeline finds images in some form."""
        converted = form != "original" or BACKENDS[pipeline].needs_beton
        path = images.stored(form) if converted else images.folder
        return DataConfig(data=str(path), pipeline=pipeline, workers=self.workers)

    def loading(
        self, images: Images, pipeline: Pipeline, form: Stored = ORIGINAL
    ) -> dict[str, Any]:
        """Return the settings of a loader of views."""
        return {
            "data": self.data(images, pipeline, form),
            "augment": self.config.augment,
            "batch": self.loaded_batch,
            "images": images.count,
            "device": self.device,
        }

    def forms(self, pipeline: Pipeline) -> list[Stored]:
        """Return in which forms a pipeline reads images; the baseline reads originals, as users do.

        What needs a .beton file reads the original images from one anyway, and what keeps them all
        in memory reads them once.
        """
        if pipeline == BASELINE:
            return [ORIGINAL]
        backend = BACKENDS[pipeline]
        skipped = CONTAINERS if backend.needs_beton or backend.resident else ()
        return [form for form in self.config.stored if form not in skipped]

    def installed(self, libraries: Mapping[str, Peer]) -> list[str]:
        """Return the names of the libraries that are installed; tell how to install the others."""
        for name, library in libraries.items():
            if library.missing:
                self.console.say(f"{name}: not measured: {library.missing}")
        return [name for name, library in libraries.items() if not library.missing]

    def train_config(self, batch: int, *, ranks: int = 1, **settings: Any) -> TrainConfig:
        """Return the recipe with a batch for each rank.

        It is compiled on a GPU, as long runs are; on a CPU, where that takes longer than measuring,
        if ``settings`` say so.

        Args:
            batch: images of each rank.
            ranks: how many there are.
            settings: others, by their flags' names.
        """
        changes = {
            "compile": "on" if self.gpu else "off", **settings,
            "batch": batch * ranks, "warmup_epochs": 0.0, "device": self.device,
        }  # fmt: skip
        return TrainConfig.from_flags(self.config.train.to_flags() | changes)

    def settings(self, **more: Any) -> dict[str, Any]:
        """Return what a record's figures depend on: of the recipe, and ``more``."""
        augment = self.config.augment
        return {
            "recipe": self.config.recipe,
            "crop": augment.crop,
            "blur": any(view.blur_p > 0 for view in augment.views),
            "device": self.device,
            **more,
        }


@contextlib.contextmanager
def session(config: BenchConfig) -> Iterator[Session]:
    """Make a session, and leave nothing of it behind.

    Raises:
        DeviceError: the device is not there.
    """
    check_devices(RunConfig(device=config.device))
    gpu = config.device != "cpu" and torch.cuda.is_available()
    with (
        stops_handled(
            lambda number: sys.exit(128 + number),
            again=leave_at_once,
            numbers=[signal.SIGTERM, signal.SIGHUP],
        ),
        tempfile.TemporaryDirectory(prefix="fastsiam-bench-") as folder,
    ):
        yield Session(config, "cuda" if gpu else "cpu", Path(folder), Console())


def run(case: str, config: BenchConfig) -> list[Record]:
    """Run a case; print its table; write the records if that is asked for.

    Raises:
        BackendError: nothing of it could be measured here, or a variant of the step that was
            asked for failed; what was measured is printed and written first.
    """
    if config.json:
        check_targets(Path(config.json))
    repeats = config.repeats or (_FEW_REPEATS if case == "all" else _REPEATS)
    with session(replace(config, repeats=repeats)) as own:
        records = CASES[case].measure(own)
    if not records:
        raise BackendError("nothing could be measured; the reasons are above")
    print(f"{table(records)}\n\n{caption(records)}\n{_how(records)}")
    for line in differences(records):
        print(line)
    if case == "all":
        print(f"\n{finding(records)}")
    if config.json:
        write(Path(config.json), records)
    if case == "step" and own.failed:
        reasons = (f"{name} ({why})" for name, why in own.failed.items())
        raise BackendError(f"not measured: {'; '.join(reasons)}")
    return records


def _how(records: Sequence[Record]) -> str:
    """Return how a case measures; printed below its table."""
    turns, files = "After a warm-up, runners are interleaved (A B C A B C ...).", ""
    if any("apart" in one.facts for one in records):
        turns = "After a warm-up, a runner ends before the next one starts (A A B B C C ...)."
    if records[0].case == "startup":
        turns, files = "Each repeat starts a new process.", ", except in rows of a cold cache"
    return (
        f"Each runner is a process of its own. {turns} A figure is the median over the repeats. "
        "The spread is half the distance between the fastest and the slowest repeat, divided by "
        f"the median; above {UNSTEADY:.0%} it is marked as unsteady. One image means all of its "
        "views. CPU time counts all processes of a runner. Files are in the system's "
        f"cache{files}."
    )
