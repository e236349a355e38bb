"""Execution of a case of ``fastsiam bench``, with the images, device and console for it."""

from __future__ import annotations

import contextlib
import math
import signal
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fastsiam.bench.bench_images import Images, take_images
from fastsiam.bench.cases import CASES
from fastsiam.bench.config import CONTAINERS, ORIGINAL, BenchConfig, Stored, with_form
from fastsiam.bench.finding import finding
from fastsiam.bench.libraries import Peer
from fastsiam.bench.measurements import write
from fastsiam.bench.runner import Loading
from fastsiam.bench.tables import caption, differences, table
from fastsiam.config import DataConfig, Pipeline, RunConfig, TrainConfig
from fastsiam.console import Console
from fastsiam.distributed import check_devices
from fastsiam.errors import BackendError
from fastsiam.pipelines.backends import BACKENDS, BASELINE
from fastsiam.pipelines.workers import count as count_workers
from fastsiam.run.records import check_targets
from fastsiam.signals import exit_after_signal, exit_immediately, handle_stop_signals

_REPEATS, _FEW_REPEATS = 5, 3
"""Default number of repeats; ``all`` uses the smaller one."""
_LOADED_ON_CPU = 64
_TRAINED_ON_CPU, _SMALL_TRAINED_ON_CPU = 8, 64
"""Large and small views that a CPU trains on in half a second; narrow networks take twice as many.
"""
_FOR_EACH_WORKER = 4
NOT_MEASURED = ": not measured: "
"""Text in the log lines about runners that are skipped or failed."""
_GPU_BYTES = 220e6
"""Approximate memory per image of 224 pixels when training a ResNet-50 in float32."""


@dataclass
class Session:
    """A run of ``fastsiam bench``; created by ``session``."""

    config: BenchConfig
    device: str
    """cuda or cpu."""
    folder: Path
    """Temporary folder, which is deleted when the session ends."""
    console: Console
    failures: dict[str, str] = field(default_factory=dict)
    """Runners that failed, and why."""
    _images: dict[int, Images] = field(default_factory=dict)

    @property
    def gpu(self) -> bool:
        """Whether measurements run on a GPU."""
        return self.device == "cuda"

    @property
    def workers(self) -> int:
        """Number of loader processes or threads."""
        return count_workers(self.config.workers)

    @property
    def loaded_batch(self) -> int:
        """Batch size where batches are only loaded."""
        return self.config.batch or (256 if self.gpu else _LOADED_ON_CPU)

    @property
    def trained_batch(self) -> int:
        """Batch size where a model trains."""
        if self.config.batch:
            return self.config.batch
        together = self.config.train.numerics.bn_images or 2
        if not self.gpu:
            model, views = self.config.train.model, len(self.config.augment.views)
            max_views = _TRAINED_ON_CPU if model.stem == "imagenet" else _SMALL_TRAINED_ON_CPU
            return max(together, max_views * (2 if model.width < 64 else 1) // views)
        capacity = torch.cuda.get_device_properties(0).total_memory / _GPU_BYTES
        pixels = (self.config.augment.crop / 224) ** 2
        fits: int = 2 ** int(math.log2(max(2.0, capacity / pixels)))
        return min(self.config.train.optim.batch, max(together, fits))

    @property
    def most_ranks(self) -> int:
        """Largest number of ranks to try: all GPUs of the machine, or two processes on a CPU."""
        return torch.cuda.device_count() if self.gpu else 2

    @property
    def small_view_factor(self) -> int:
        """Factor by which there are more images if views are smaller than 224 pixels."""
        return max(1, min(16, (224 // self.config.augment.crop) ** 2))

    def images(self, batch: int, *, at_least: int = 1) -> Images:
        """Return whole batches of images, enough to take seconds to load.

        Unless ``--images`` is given, all workers get the same number of batches.
        """
        min_images = (4096 if self.gpu else 512) * self.small_view_factor
        one_each = self.workers * batch
        shared = min(_FOR_EACH_WORKER * one_each, _FOR_EACH_WORKER * min_images)
        target = self.config.images or math.ceil(max(min_images, shared) / one_each) * one_each
        count = max(at_least, round(target / batch)) * batch
        if count not in self._images:
            self._images[count] = take_images(self.config, count, self.folder, self.console.say)
        return self._images[count]

    def data(self, images: Images, pipeline: Pipeline, form: Stored = ORIGINAL) -> DataConfig:
        """Return the settings with which a pipeline reads images in some form."""
        if form == ORIGINAL and BACKENDS[pipeline].needs_beton:
            form = "beton"
        path = images.folder if form == ORIGINAL else images.convert_to(form)
        return DataConfig(data=str(path), pipeline=pipeline, workers=self.workers)

    def loading(self, images: Images, pipeline: Pipeline, form: Stored = ORIGINAL) -> Loading:
        """Return what a case loads with a pipeline."""
        return Loading(
            data=self.data(images, pipeline, form),
            augment=self.config.augment,
            batch=self.loaded_batch,
            images=images.count,
            device=self.device,
        )

    def forms(self, pipeline: Pipeline) -> list[Stored]:
        """Return the forms in which a pipeline reads images; the baseline reads originals only.

        Containers are skipped, with a log line, for pipelines that read the original images from a
        .beton file anyway and for those that keep all images in memory, which read them once.
        """
        if pipeline == BASELINE:
            return [ORIGINAL]
        backend = BACKENDS[pipeline]
        skipped = CONTAINERS if backend.needs_beton or backend.resident else ()
        for form in self.config.stored:
            if form in skipped:
                again = "a .beton file anyway" if backend.needs_beton else "images only once"
                self.skip(with_form(pipeline, form), f"it reads {again}")
        return [form for form in self.config.stored if form not in skipped]

    def installed(self, libraries: Mapping[str, Peer]) -> list[str]:
        """Return the names of the installed libraries; log how to install the others."""
        for name, library in libraries.items():
            if library.missing:
                self.skip(name, library.missing)
        return [name for name, library in libraries.items() if not library.missing]

    def skip(self, name: str, why: object) -> None:
        """Log why something is not measured."""
        self.console.say(f"{name}{NOT_MEASURED}{why}")

    def train_config(self, batch: int, *, ranks: int = 1, **settings: Any) -> TrainConfig:
        """Return the recipe with a batch size per rank.

        The model is compiled on a GPU, like in long runs. On a CPU, where compiling takes longer
        than measuring, it is compiled only if ``settings``, which are named like flags, say so.
        """
        changes = {
            "compile": "on" if self.gpu else "off", **settings,
            "batch": batch * ranks, "warmup_epochs": 0.0, "device": self.device,
        }  # fmt: skip
        return TrainConfig.from_flags(self.config.train.to_flags() | changes)

    def settings(self, images: Images | None = None, /, **more: Any) -> dict[str, Any]:
        """Return the settings for a record: those of the recipe that matter, and ``more``.

        They include the number of workers and the description of the ``images`` that they load.
        """
        augment = self.config.augment
        settings = {
            "recipe": self.config.recipe,
            "crop": augment.crop,
            "blur": any(view.blur_p > 0 for view in augment.views),
            "device": self.device,
            **more,
        }
        return settings | ({"workers": self.workers, "data": images.about} if images else {})


@contextlib.contextmanager
def session(config: BenchConfig) -> Iterator[Session]:
    """Create a session; delete its files when the block ends.

    Raises:
        DeviceError: the device is not available.
        FastSiamError: the file for the records cannot be written.
    """
    if config.json:
        check_targets(Path(config.json))
    check_devices(RunConfig(device=config.device))
    gpu = config.device != "cpu" and torch.cuda.is_available()
    with (
        handle_stop_signals(
            exit_after_signal, again=exit_immediately, numbers=[signal.SIGTERM, signal.SIGHUP]
        ),
        tempfile.TemporaryDirectory(prefix="fastsiam-bench-") as folder,
    ):
        yield Session(config, "cuda" if gpu else "cpu", Path(folder), Console())


def run(case: str, config: BenchConfig) -> None:
    """Run a case, print its table, and write the records if ``--json`` is given.

    Raises:
        BackendError: nothing could be measured here, or a variant of ``bench step`` failed. In the
            latter case the results are printed and written first.
    """
    repeats = config.repeats or (_FEW_REPEATS if case == "all" else _REPEATS)
    with session(replace(config, repeats=repeats)) as active_session:
        records = CASES[case].measure(active_session)
    if not records:
        raise BackendError("nothing could be measured; the reasons are above")
    print(f"{table(records)}\n\n{caption(records)}\nHow it was measured: docs/benchmarks/method.md")
    for line in differences(records):
        print(line)
    if case == "all":
        print(f"\n{finding(records)}")
    if config.json:
        write(Path(config.json), records)
    if case == "step" and active_session.failures:
        reasons = (f"{name} ({reason})" for name, reason in active_session.failures.items())
        raise BackendError(f"not measured: {'; '.join(reasons)}")
