"""Batches from any store by compiled code in threads: nothing beyond ``pip install fastsiam``.

There are no worker processes, hence no fork and no shared memory. On a CPU the threads finish the
views. For a GPU they make uint8 crops in pinned buffers that rotate; copies run on streams of their
own, and the photometric stage follows on the GPU.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.trace import span
from fastsiam.views.batch import Batch, Crops, crop_shapes
from fastsiam.views.draws import ViewParams, draw_views
from fastsiam.views.photometric.cpu import Stage
from fastsiam.views.photometric.operations import in_views_order

from .copies import copy_stream, take_over
from .cuts import cut_centres, cut_views
from .engine import EncodedBatch, Engine, Lookahead, PendingBatch
from .finish import Finisher
from .job import stages_of
from .order import Order
from .store import Store
from .workers import closes_at_exit, made_ahead


class NativeLoader:
    """Batches by the engine; see ``fastsiam.views.batch.Loader``.

    Args:
        store: the images.
        order: which images make up which batch.
        augment: how views are drawn.
        workers: threads that decode and crop; -1 is one for each core of this rank.
        prefetch: batches that are made ahead of the training step.
        device: where the views shall lie.
        dtype: floating type of the views.
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
        self.source, self.images, self.steps = str(store), order.images, order.steps
        self._order, self._augment, self._prefetch = order, augment, prefetch
        self._device, self._dtype = device, dtype
        self._store, self._engine = store, Engine(store, workers=workers)
        self._finisher = Finisher(store, order, augment, device=device, dtype=dtype)
        self._slots: list[_Slot] = []
        self._epoch: _Epoch | None = None
        self._submitted: PendingBatch | None = None
        self._closed = False
        closes_at_exit(self)

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from step ``skip`` on; one epoch at a time."""
        on_cpu = self._device.type == "cpu"
        for step, made in enumerate(self._batches(number, skip, finished=on_cpu), skip):
            where, finisher = {"epoch": number, "step": step}, self._finisher
            assert made.params is not None
            if made.stages:
                views = in_views_order([stage.views() for stage in made.stages], self._augment)
                yield finisher.made(made.index, made.params, views, **where)
            else:
                yield finisher.finish(made.index, made.params, made.crops, **where)

    def crops(
        self, number: int, *, skip: int = 0
    ) -> Iterator[tuple[NDArray[np.int64], ViewParams, Crops]]:
        """Yield what ``epoch`` makes its batches of; see ``fastsiam.views.batch.CropLoader``."""
        for made in self._batches(number, skip, finished=False):
            assert made.params is not None
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

    def _batches(self, number: int, skip: int, *, finished: bool) -> Generator[_CropBatch]:
        if self._closed:
            raise RuntimeError("this loader is closed")
        self._stop()
        if not (finished or self._slots):
            self._slots = self._make_slots()
        self._open_epoch(number, skip)
        steps = range(skip, self.steps)
        lookahead = Lookahead(self._store, partial(self._order.indices, number), steps)
        submit = partial(self._submit, number, finished, lookahead)
        epoch = self._epoch = closes_at_exit(_Epoch(submit, steps, prefetch=self._prefetch))
        with contextlib.closing(epoch):
            for made in epoch.batches:
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

    def _submit(self, epoch: int, finished: bool, lookahead: Lookahead, step: int) -> _CropBatch:
        """Read a batch, draw its boxes and let the threads start with it."""
        order, augment = self._order, self._augment
        lookahead.advance()
        index, drawn_for = order.indices(epoch, step), order.drawn_for(epoch, step)
        encoded = self._read(index)
        params = draw_views(
            augment, seed=order.seed, epoch=epoch, index=drawn_for, size=encoded.size
        )
        stages = stages_of(params, augment, self._dtype) if finished else ()
        slot = None if finished else self._slots[step % len(self._slots)]
        if slot is not None:
            slot.wait()
        pending = self._engine.submit(
            encoded,
            cut_views(params, augment),
            list(augment.by_side),
            crops=None if slot is None else slot.crops,
            stages=stages,
        )
        self._submitted = pending
        return _CropBatch(index, pending, params, stages, slot)

    def _make_slots(self) -> list[_Slot]:
        """Allocate the buffers: one for each batch that threads or copies work on at once.

        On a CPU the caller has one more of them.
        """
        shapes = crop_shapes(self._augment, self._order.batch // self._order.world)
        gpu = self._device.type == "cuda"
        return [_Slot(shapes, self._device) for _ in range(self._prefetch + (1 if gpu else 2))]


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


@dataclass(slots=True)
class _CropBatch:
    """A batch on its way."""

    index: NDArray[np.int64]
    """(N,) positions of its images."""
    pending: PendingBatch
    params: ViewParams | None = None
    """What was drawn for them; None for central crops."""
    stages: Sequence[Stage] = ()
    """Of each side, that hold the views; empty where crops are made."""
    slot: _Slot | None = None
    crops: Crops = ()
    """On the device, or on their way to it."""
    copied: torch.cuda.Event | None = None

    def complete(self) -> None:
        """Wait for the threads and send the crops to the device."""
        with span("decode"):
            self.pending.result()
        if self.slot is not None:
            self.crops, self.copied = self.slot.copied()


class _Epoch:
    """An epoch in two stages, each in a thread of its own: batches are submitted and completed.

    A batch is submitted once the one ``prefetch + 1`` before it is complete, so that as many slots
    are enough.

    Args:
        submit: starts with the batch of a step.
        steps: of the epoch.
        prefetch: batches that are submitted ahead.
    """

    def __init__(
        self, submit: Callable[[int], _CropBatch], steps: Sequence[int], *, prefetch: int
    ) -> None:
        self._submit = submit
        self._pending: deque[PendingBatch] = deque(maxlen=prefetch + 2)
        self._submitted = made_ahead(self._start, steps, count=prefetch)
        self.batches = made_ahead(_completed, self._submitted, count=1)

    def close(self) -> None:
        """Stop the work, and wait until nothing writes to the batches' memory any more."""
        self._cancel()
        for stage in (self.batches, self._submitted):
            stage.close()
        self._cancel()  # what was submitted meanwhile

    def _start(self, step: int) -> _CropBatch | Exception:
        """Submit a batch. An error travels as a value: the batches before it go first."""
        try:
            batch = self._submit(step)
        except Exception as error:
            return error
        self._pending.append(batch.pending)
        return batch

    def _cancel(self) -> None:
        while self._pending:
            self._pending.popleft().cancel()


def _completed(batch: _CropBatch | Exception) -> _CropBatch:
    if isinstance(batch, Exception):
        raise batch
    batch.complete()
    return batch


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

    def submit(number: int) -> _CropBatch:
        lookahead.advance()
        index = batches[number]
        encoded = engine.read(index)
        slot = _Slot([(1, len(index), side, side, 3)], device)
        cuts = cut_centres(encoded.size, resize=resize, side=side)
        pending = engine.submit(encoded, [cuts], [side], crops=slot.crops)
        return _CropBatch(index, pending, slot=slot)

    epoch = _Epoch(submit, range(len(batches)), prefetch=prefetch)
    with contextlib.closing(engine), contextlib.closing(epoch):
        for made in epoch.batches:
            take_over(made.crops, made.copied)
            yield made.crops[0][0]
