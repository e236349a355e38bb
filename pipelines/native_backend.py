"""The native pipeline: the engine loads any store, without optional packages.

It uses only threads, so it needs neither fork nor shared memory. On a CPU, the threads complete the
views. For a GPU, they write uint8 crops to a ring of pinned buffers, which are copied on separate
streams, and the photometric stage runs on the GPU.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import DataConfig
from fastsiam.trace import span
from fastsiam.views.batch import Crops
from fastsiam.views.draws import ViewParams
from fastsiam.views.photometric.operations import split_by_view

from .backends import backend_of
from .cuts import cut_centres, cut_views
from .engine import Engine, Read, Submitted, batches_ahead
from .job import Images, stages_of
from .loaders import Augmented, CropLoader, LoaderSpec, current_gpu
from .store import Store
from .tuning import WorkerTuner

log = logging.getLogger(__name__)

OnDevice = tuple[tuple[Tensor, ...], torch.cuda.Event | None]
"""Crops or views, and the CUDA event after which they are complete; None if they already are."""


class NativeLoader(CropLoader):
    """The loader of the native pipeline."""

    def __init__(self, spec: LoaderSpec) -> None:
        super().__init__(spec)
        workers, self._prefetch = spec.data.workers, spec.data.prefetch
        self._engine = Engine(self._store, workers=workers)
        self._owned.append(self._engine)
        _ = self._engine.headers.decode  # compiles the kernels, or raises, before training
        self._read: Read | None = None
        """Reads the images of the next batch; None means ``Engine.read``."""
        self._indices = self._order.indices
        """Returns the positions of the images of an epoch's step."""
        tunes = workers == "auto" and backend_of(spec.data).tunes_workers
        self._tuner = WorkerTuner(self._engine.workers) if tunes else None
        self.tuned_workers: int | None = None
        """Number of threads that the tuner chose; None before that or without a tuner."""
        self._slots: list[_Slot] = []

    def close(self) -> None:
        """End the threads and free the buffers."""
        super().close()
        for slot in self._slots:
            slot.wait()
        self._slots.clear()

    def _views(self, epoch: int, skip: int) -> Generator[Augmented]:
        if self._device.type == "cpu" and self._crop_transform is None:
            return self._views_or_crops(epoch, skip, as_views=True)
        return super()._views(epoch, skip)

    def _crops(self, epoch: int, skip: int) -> Generator[Augmented]:
        if not self._slots:
            # One for each batch in progress. The caller's batch takes another one, except on a GPU.
            count = batches_ahead(self._prefetch) + (1 if self._device.type == "cuda" else 2)
            self._slots = [
                _Slot(self._shapes, self._device, copy_stream(self._device)) for _ in range(count)
            ]
        return self._views_or_crops(epoch, skip, as_views=False)

    def _views_or_crops(self, epoch: int, skip: int, *, as_views: bool) -> Generator[Augmented]:
        """Yield views made on the CPU if ``as_views``, or else crops on the device."""
        if self._tuner is not None:
            self._tuner.pause()
        batches = self._engine.batches(
            partial(self._indices, epoch),
            range(skip, self.steps),
            partial(self._submit, epoch, as_views),
            # With more batches ahead, too few threads would go unnoticed for longer.
            prefetch=self._prefetch if self._tuner is None else min(2, self._prefetch),
            read=self._read,
        )
        with contextlib.closing(batches):
            for index, params, (tensors, event) in batches:
                take_over(tensors, event)
                yield index, params, tensors
                self._tune()

    def _tune(self) -> None:
        """Let the tuner time the loop, and use the number of threads that it proposes."""
        if (tuner := self._tuner) is None:
            return
        tuner.note_batch()
        if tuner.workers != self._engine.workers:
            self._engine.use(tuner.workers)
        if tuner.is_done:
            log.info(tuner)
            self.tuned_workers, self._tuner = tuner.workers, None

    def _submit(
        self, epoch: int, as_views: bool, step: int, index: NDArray[np.int64], images: Images
    ) -> Submitted[tuple[NDArray[np.int64], ViewParams, OnDevice]]:
        params = self._draw(epoch, step, images.size)
        cuts = cut_views(params, self._augment)
        if as_views:
            stages = stages_of(params, self._augment, self._dtype)
            pending = self._engine.submit(index, images, cuts, stages=stages)
            views = (stage.views() for stage in stages)
            return pending, lambda: (index, params, (split_by_view([*views], self._augment), None))
        slot = self._slots[step % len(self._slots)]
        slot.wait()
        pending = self._engine.submit(index, images, cuts, crops=slot.crops)
        return pending, lambda: (index, params, slot.start_copy())


class _Slot:
    """Host buffer for the crops of a batch, and the stream that copies it to a GPU."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        device: torch.device,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._device, self.stream, pinned = device, stream, device.type == "cuda"
        with current_gpu(device):
            self.crops: Crops = tuple(
                torch.empty(shape, dtype=torch.uint8, pin_memory=pinned, device="cpu")
                for shape in shapes
            )

    def start_copy(self) -> OnDevice:
        """Start copying the crops to the device; return the copies."""
        if self.stream is None:
            return self.crops, None
        with span("copy"), current_gpu(self._device), torch.cuda.stream(self.stream):
            crops = tuple(tensor.to(self._device, non_blocking=True) for tensor in self.crops)
        return crops, self.stream.record_event()

    def wait(self) -> None:
        """Wait until no copy reads the buffer."""
        if self.stream is not None:
            self.stream.synchronize()


def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a new stream for copies to a GPU; None for the CPU."""
    if device.type != "cuda":
        return None
    with current_gpu(device):
        return torch.cuda.Stream(device)


def take_over(tensors: Iterable[Tensor], copied: torch.cuda.Event | None) -> None:
    """Make the current stream, but not the host, wait for tensors that another stream copies.

    The allocator reuses the tensors' memory only after the work that is queued on the current
    stream when they are freed.
    """
    if copied is not None:
        for tensor in tensors:
            stream = torch.cuda.current_stream(tensor.device)
            stream.wait_event(copied)
            tensor.record_stream(stream)


def central_crops(
    data: DataConfig,
    store: Store,
    batches: Sequence[NDArray[np.int64]],
    *,
    resize: int,
    side: int,
    device: torch.device,
) -> Generator[Tensor]:
    """Yield batches of central crops; see ``fastsiam.pipelines.central.MakeCrops``.

    Args:
        data: number of threads, and batches to prepare ahead.
        store: the images.
        batches: positions of each batch's images.
        resize: shorter side of an image before the crop is taken, in pixels.
        side: side of the crops, in pixels.
        device: device of the crops.
    """
    engine = Engine(store, workers=data.workers)
    stream = copy_stream(device)  # a single one, because the allocator caches memory per stream

    def submit(_: int, index: NDArray[np.int64], images: Images) -> Submitted[OnDevice]:
        slot = _Slot([(1, len(index), side, side, 3)], device, stream)
        cuts = cut_centres(images.size, resize=resize, side=side)
        return engine.submit(index, images, [cuts], crops=slot.crops), slot.start_copy

    steps = range(len(batches))
    results = engine.batches(batches.__getitem__, steps, submit, prefetch=data.prefetch)
    with contextlib.closing(engine), contextlib.closing(results):
        for crops, event in results:
            take_over(crops, event)
            yield crops[0][0]
