"""The native pipeline: batches of any store by the engine, without optional packages.

It uses threads only, so it needs no fork and no shared memory. On a CPU the threads finish the
views. For a GPU they write uint8 crops to a ring of pinned buffers, which are copied on separate
streams, and the photometric stage runs on the GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.trace import span
from fastsiam.views.batch import Batch, Crops
from fastsiam.views.draws import ViewParams
from fastsiam.views.photometric.cpu import Stage
from fastsiam.views.photometric.operations import in_views_order

from .cuts import cut_centres, cut_views
from .engine import EncodedBatch, Engine, Lookahead, PendingBatch
from .job import stages_of
from .loaders import StoreLoader, copy_stream, take_over
from .order import Order
from .store import Store
from .workers import closes_at_exit, made_ahead

Result = TypeVar("Result")


class NativeLoader(StoreLoader):
    """The loader of the native pipeline; see ``fastsiam.views.batch.CropLoader``.

    Args:
        store: the images.
        order: as for ``StoreLoader``, as are ``augment``, ``device`` and ``dtype``.
        workers: threads that decode and crop; -1 means one per core of this rank.
        prefetch: batches that are made ahead of the training step, at least two.
    """

    def __init__(
        self,
        store: Store,
        order: Order,
        augment: AugmentConfig,
        *,
        workers: int,
        prefetch: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(store, order, augment, device=device, dtype=dtype)
        self._submitted_ahead = _submitted_ahead(prefetch)
        self._engine = Engine(store, workers=workers)
        self._slots: list[_Slot] = []
        self._epoch: Generator[_LoadedBatch] | None = None
        self._submitted: PendingBatch | None = None
        self._closed = False
        closes_at_exit(self)

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from step ``skip`` on; one epoch at a time."""
        on_cpu = self._device.type == "cpu"
        for step, made in enumerate(self._batches(number, skip, finished=on_cpu), skip):
            if on_cpu:
                views = in_views_order([stage.views() for stage in made.stages], self._augment)
                yield self._with_views(made.index, made.params, views, number, step)
            else:
                yield self._finish(made.index, made.params, made.crops, number, step)

    def crops(
        self, number: int, *, skip: int = 0
    ) -> Iterator[tuple[NDArray[np.int64], ViewParams, Crops]]:
        """Yield the uint8 crops of each batch; see ``fastsiam.views.batch.CropLoader``."""
        for made in self._batches(number, skip, finished=False):
            yield made.index, made.params, made.crops

    def close(self) -> None:
        """End the threads and free the buffers."""
        if not self._closed:
            self._closed = True
            self._stop()
            self._engine.close()
            for slot in self._slots:
                slot.wait()
            self._slots.clear()

    def _batches(self, number: int, skip: int, *, finished: bool) -> Generator[_LoadedBatch]:
        if self._closed:
            raise RuntimeError("this loader is closed")
        self._stop()
        if not (finished or self._slots):
            self._slots = self._make_slots()
        self._open_epoch(number, skip)
        steps = range(skip, self.steps)
        lookahead = Lookahead(self._store, partial(self._order.indices, number), steps)
        submit = partial(self._submit, number, finished, lookahead)
        epoch = self._epoch = closes_at_exit(
            _completed(submit, steps, submitted_ahead=self._submitted_ahead)
        )
        with contextlib.closing(epoch):
            for made in epoch:
                take_over(made.crops, made.copied)
                yield made
                if epoch is not self._epoch:
                    break
        if epoch is not self._epoch and not self._closed:
            raise RuntimeError("another epoch of this loader was begun; it makes one at a time")

    def _stop(self) -> None:
        self._close_epoch()
        if self._epoch is not None:
            self._epoch.close()
            self._epoch = self._submitted = None

    def _open_epoch(self, number: int, skip: int) -> None:
        """Prepare to read the batches of an epoch from step ``skip`` on; a hook for subclasses."""

    def _read(self, index: NDArray[np.int64]) -> EncodedBatch:
        """Read the next batch of the epoch."""
        return self._engine.read(index)

    def _close_epoch(self) -> None:
        """Stop reading; a read that is waiting raises an error. A hook for subclasses."""

    def _submit(
        self, epoch: int, finished: bool, lookahead: Lookahead, step: int
    ) -> tuple[PendingBatch, Callable[[], _LoadedBatch]]:
        """Read a batch, draw its boxes and submit it; see ``_completed``."""
        lookahead.advance()
        index = self._order.indices(epoch, step)
        encoded = self._read(index)
        params = self._draw(epoch, step, encoded.size)
        cuts, sides = cut_views(params, self._augment), list(self._augment.by_side)
        if finished:
            stages = stages_of(params, self._augment, self._dtype)
            self._submitted = self._engine.submit(encoded, cuts, sides, stages=stages)
            return self._submitted, lambda: _LoadedBatch(index, params, stages)
        slot = self._slots[step % len(self._slots)]
        slot.wait()
        self._submitted = self._engine.submit(encoded, cuts, sides, crops=slot.crops)
        return self._submitted, lambda: _LoadedBatch(index, params, (), *slot.copied())

    def _make_slots(self) -> list[_Slot]:
        """Allocate a buffer for each batch that is in progress, and one for the caller's on a CPU.

        On a GPU the caller's batch lies on the device.
        """
        count = self._submitted_ahead + (1 if self._device.type == "cuda" else 2)
        return [_Slot(self._shapes, self._device) for _ in range(count)]


class _Slot:
    """Host memory for the crops of a batch, and the stream that copies them to a GPU."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.crops: Crops = tuple(
            torch.empty(shape, dtype=torch.uint8, pin_memory=pinned) for shape in shapes
        )
        self.stream, self._device = copy_stream(device), device

    def copied(self) -> tuple[Crops, torch.cuda.Event | None]:
        """Start copying the crops to the device; return them and the event that ends the copy."""
        if self.stream is None:
            return self.crops, None
        with span("copy"), torch.cuda.stream(self.stream):
            crops = tuple(own.to(self._device, non_blocking=True) for own in self.crops)
        return crops, self.stream.record_event()

    def wait(self) -> None:
        """Wait until no copy reads the memory."""
        if self.stream is not None:
            self.stream.synchronize()


@dataclass(frozen=True, slots=True)
class _LoadedBatch:
    """A batch whose crops or views are complete."""

    index: NDArray[np.int64]
    """(N,) positions of its images."""
    params: ViewParams
    """Their augmentation parameters."""
    stages: Sequence[Stage]
    """Stages that hold the views of each side; empty if crops were made."""
    crops: Crops = ()
    """Crops on the device; empty if views were made."""
    copied: torch.cuda.Event | None = None
    """Event after which the crops are complete there; None if they are complete."""


def _submitted_ahead(prefetch: int) -> int:
    """Return how many batches to submit beyond the one that is completed ahead."""
    return max(1, prefetch - 1)


def _completed(
    submit: Callable[[int], tuple[PendingBatch, Callable[[], Result]]],
    steps: Sequence[int],
    *,
    submitted_ahead: int,
) -> Generator[Result]:
    """Yield the results of batches in order; one thread submits them, another one waits for them.

    Batch ``k`` is submitted after batch ``k - submitted_ahead - 1`` is complete and the caller has
    asked for it. When the generator is closed, no thread writes to the batches' memory.

    Args:
        submit: submits the batch of a step; returns it, and a function that returns the result once
            the batch is complete.
        steps: steps of the epoch, in order.
        submitted_ahead: batches to submit beyond the one that is completed ahead.
    """
    running: set[PendingBatch] = set()

    def start(step: int) -> tuple[PendingBatch, Callable[[], Result]] | Exception:
        try:
            pending, finish = submit(step)
        except Exception as error:  # raised in its turn, after the batches before it
            return error
        running.add(pending)
        return pending, finish

    def complete(started: tuple[PendingBatch, Callable[[], Result]] | Exception) -> Result:
        if isinstance(started, Exception):
            raise started
        pending, finish = started
        with span("decode"):
            pending.result()
        running.discard(pending)  # frees the encoded images
        return finish()

    def cancel() -> None:
        for pending in tuple(running):
            pending.cancel()

    submitted = made_ahead(start, steps, count=submitted_ahead)
    completed = made_ahead(complete, submitted, count=1)
    try:
        # "yield from" would close it first and wait for work that is to be cancelled.
        for batch in completed:  # noqa: UP028
            yield batch
    finally:
        cancel()
        completed.close()
        submitted.close()
        cancel()  # batches that were submitted meanwhile


def central_crops(
    store: Store,
    batches: Sequence[NDArray[np.int64]],
    *,
    resize: int,
    side: int,
    workers: int,
    prefetch: int,
    device: torch.device,
) -> Generator[Tensor]:
    """Yield batches of central crops; see ``fastsiam.pipelines.central.MakeCrops``.

    Args:
        store: the images.
        batches: positions of each batch's images.
        resize: shorter side of an image before the crop is taken, in pixels.
        side: side of the crops, in pixels.
        workers: as for ``NativeLoader``, as is ``prefetch``.
        prefetch: batches that are made ahead.
        device: device of the crops.
    """
    engine = Engine(store, workers=workers)
    lookahead = Lookahead(store, batches.__getitem__, range(len(batches)))

    def submit(
        number: int,
    ) -> tuple[PendingBatch, Callable[[], tuple[Crops, torch.cuda.Event | None]]]:
        lookahead.advance()
        index = batches[number]
        encoded = engine.read(index)
        slot = _Slot([(1, len(index), side, side, 3)], device)
        cuts = cut_centres(encoded.size, resize=resize, side=side)
        return engine.submit(encoded, [cuts], [side], crops=slot.crops), slot.copied

    ahead = _submitted_ahead(prefetch)
    epoch = _completed(submit, range(len(batches)), submitted_ahead=ahead)
    with contextlib.closing(engine), contextlib.closing(epoch):
        for crops, copied in epoch:
            take_over(crops, copied)
            yield crops[0][0]
