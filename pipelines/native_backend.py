"""Batches from any store by compiled code in threads: nothing beyond ``pip install fastsiam``.

There are no worker processes, hence no fork and no shared memory. On a CPU the threads finish the
views. For a GPU they make uint8 crops in pinned buffers that rotate; copies run on streams of their
own, and the photometric stage follows on the GPU.
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

Made = TypeVar("Made")


class NativeLoader(StoreLoader):
    """Batches by the engine.

    Args:
        store: the images.
        order: as for ``StoreLoader``, as are ``augment``, ``device`` and ``dtype``.
        workers: threads that decode and crop; -1 is one for each core of this rank.
        prefetch: batches that are made ahead of the training step; at least two are.
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
        self._epoch: Generator[_Made] | None = None
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
        """Yield what ``epoch`` makes its batches of; see ``fastsiam.views.batch.CropLoader``."""
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

    def _batches(self, number: int, skip: int, *, finished: bool) -> Generator[_Made]:
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
        """Prepare to read the batches of an epoch from step ``skip`` on."""

    def _read(self, index: NDArray[np.int64]) -> EncodedBatch:
        """Read the next batch of the epoch."""
        return self._engine.read(index)

    def _close_epoch(self) -> None:
        """Stop reading; a batch that is waited for is an error."""

    def _submit(
        self, epoch: int, finished: bool, lookahead: Lookahead, step: int
    ) -> tuple[PendingBatch, Callable[[], _Made]]:
        """Read a batch, draw its boxes and let the threads start with it."""
        lookahead.advance()
        index = self._order.indices(epoch, step)
        encoded = self._read(index)
        params = self._draw(epoch, step, encoded.size)
        cuts, sides = cut_views(params, self._augment), list(self._augment.by_side)
        if finished:
            stages = stages_of(params, self._augment, self._dtype)
            self._submitted = self._engine.submit(encoded, cuts, sides, stages=stages)
            return self._submitted, lambda: _Made(index, params, stages)
        slot = self._slots[step % len(self._slots)]
        slot.wait()
        self._submitted = self._engine.submit(encoded, cuts, sides, crops=slot.crops)
        return self._submitted, lambda: _Made(index, params, (), *slot.copied())

    def _make_slots(self) -> list[_Slot]:
        """Allocate the buffers: one for each batch that threads or copies work on at once.

        On a CPU the caller has one more of them.
        """
        count = self._submitted_ahead + (1 if self._device.type == "cuda" else 2)
        return [_Slot(self._shapes, self._device) for _ in range(count)]


class _Slot:
    """Memory for the crops of a batch, and the stream that copies it to a GPU."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.crops: Crops = tuple(
            torch.empty(shape, dtype=torch.uint8, pin_memory=pinned) for shape in shapes
        )
        self.stream, self._device = copy_stream(device), device

    def copied(self) -> tuple[Crops, torch.cuda.Event | None]:
        """Start to copy the crops to the device; return them and when they are whole there."""
        if self.stream is None:
            return self.crops, None
        with span("copy"), torch.cuda.stream(self.stream):
            crops = tuple(own.to(self._device, non_blocking=True) for own in self.crops)
        return crops, self.stream.record_event()

    def wait(self) -> None:
        """Wait until no copy reads the memory any more."""
        if self.stream is not None:
            self.stream.synchronize()


@dataclass(frozen=True, slots=True)
class _Made:
    """A complete batch."""

    index: NDArray[np.int64]
    """(N,) positions of its images."""
    params: ViewParams
    """Drawn for them."""
    stages: Sequence[Stage]
    """The views of each side; empty where crops are made."""
    crops: Crops = ()
    """On the device, or on their way to it; empty where views are made."""
    copied: torch.cuda.Event | None = None
    """After which the crops are on the device."""


def _submitted_ahead(prefetch: int) -> int:
    """Return how many batches are submitted beyond the one that is completed ahead."""
    return max(1, prefetch - 1)


def _completed(
    submit: Callable[[int], tuple[PendingBatch, Callable[[], Made]]],
    steps: Sequence[int],
    *,
    submitted_ahead: int,
) -> Generator[Made]:
    """Yield batches in order: one thread submits them, and another one completes them.

    A batch is submitted once the one ``submitted_ahead + 1`` before it is complete and the one
    before that is no longer used. When the generator is closed, nothing writes to the batches'
    memory any more.

    Args:
        submit: starts with the batch of a step; returns it and a function that is called when it
            is complete, whose result is yielded.
        steps: of the epoch.
        submitted_ahead: batches that are submitted beyond the one that is completed ahead.
    """
    running: set[PendingBatch] = set()

    def start(step: int) -> tuple[PendingBatch, Callable[[], Made]] | Exception:
        try:
            pending, finish = submit(step)
        except Exception as error:  # a value, so that the batches before it go first
            return error
        running.add(pending)
        return pending, finish

    def complete(started: tuple[PendingBatch, Callable[[], Made]] | Exception) -> Made:
        if isinstance(started, Exception):
            raise started
        pending, finish = started
        with span("decode"):
            pending.result()
        running.discard(pending)  # it keeps encoded images
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
        cancel()  # what was submitted meanwhile


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
        batches: the images of each.
        resize: shorter side before the crop is taken, in pixels.
        side: of the crops, in pixels.
        workers: threads that decode and crop; -1 is one for each core of this rank.
        prefetch: batches that are made ahead.
        device: where they will go; the crops lie in memory from which a GPU can copy them.
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
