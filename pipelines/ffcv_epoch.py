"""One epoch in FFCV's loader thread: its batches as they come, its errors where one waits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, Full
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.errors import DataError
from fastsiam.trace import span
from fastsiam.views.batch import Crops, crop_shapes
from fastsiam.views.draws import ViewParams, draw_views
from fastsiam.views.photometric import photometric
from fastsiam.views.photometric.operations import in_views_order

from .copies import take_over
from .ffcv_decoder import Making, Work, crop_by_pil
from .ffcv_library import EpochIterator, Loader
from .geometric import cut_views
from .geometric.cpu import stages_of
from .store.beton import BetonStore

_SECONDS_BETWEEN_LOOKS = 1.0  # at whether the loader thread still lives


class Layout:
    """Where the crops of N images lie in one block of memory: those of one side after the other.

    Args:
        augment: for the views of each side.
    """

    def __init__(self, augment: AugmentConfig) -> None:
        self._augment = augment
        self._bytes = [math.prod(shape) for shape in crop_shapes(augment, 1)]
        self.bytes_per_image = sum(self._bytes)

    def crops(self, memory: Tensor) -> Crops:
        """Return the crops that lie in a block of whole images, as they are."""
        images = memory.numel() // self.bytes_per_image
        parts = memory.reshape(-1).split([images * count for count in self._bytes])
        shapes = crop_shapes(self._augment, images)
        return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


@dataclass(frozen=True, slots=True)
class Made:
    """A batch that FFCV's thread made."""

    index: NDArray[np.int64]
    params: ViewParams
    crops: Crops
    views: tuple[Tensor, ...] | None
    """Where the thread took them through the photometric stage too."""
    copied: torch.cuda.Event | None
    """When the crops are on the device."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """A batch that threads work on."""

    work: Work
    params: ViewParams
    memory: Tensor
    """Of its crops."""
    making: Making
    stream: torch.cuda.Stream | None
    """That copies them to the device."""


class Epoch(EpochIterator):  # type: ignore[misc]
    """One epoch in FFCV's thread; iterating over it yields its batches.

    An error in FFCV's own thread ends that thread, and whoever waits for a batch waits for ever:
    here it comes out where the batch is waited for.

    Args:
        loader: FFCV's.
        store: the images.
        augment: what becomes of them.
        layout: of a batch's crops in a buffer.
        slots: the stream of each of the buffers that rotate, None on a CPU.
        seed: the run's.
        number: of the epoch.
        steps: of each batch, the images, and by which their parameters are drawn.
        device: where the crops shall lie.
        dtype: of views, if this thread shall make them, on a CPU: there, one thread that takes an
            image all the way finds it in its own cache.
    """

    def __init__(
        self,
        loader: Loader,
        store: BetonStore,
        augment: AugmentConfig,
        layout: Layout,
        slots: Sequence[torch.cuda.Stream | None],
        seed: int,
        number: int,
        steps: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]],
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> None:
        self._store, self._augment, self._device, self._dtype = store, augment, device, dtype
        self._slots, self._seed, self._number, self._left = slots, seed, number, False
        self._layout, self._steps = layout, steps
        shown = np.concatenate([index for index, _ in steps])
        super().__init__(loader, store.in_file(shown))  # FFCV reads these pages

    def run(self) -> None:
        """Make the batches; FFCV's own loop, but for errors and for threads that are not FFCV's."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread begins with the first GPU
        try:
            with contextlib.closing(self._made()) as batches:
                for made in batches:
                    if not self._put(made):
                        return
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _made(self) -> Generator[Made]:
        """Make the batches, each while threads that are done with it begin with the next."""
        begun: _Begun | None = None
        try:
            for number, (index, drawn_for) in enumerate(self._steps):
                if begun is not None and self._pages:
                    begun.making.end()  # FFCV reads the next batch's pages into this one's memory
                following = self._begin(number, index, drawn_for, number % len(self._slots))
                begun, finished = following, begun
                if finished is not None:
                    yield self._finish(finished)
            if begun is not None:
                yield self._finish(begun)
        finally:
            if begun is not None:
                begun.making.end()  # the memory that it reads and writes may go away

    def __iter__(self) -> Iterator[Made]:
        """Wait for the batches."""
        while not self.terminate_event.is_set():
            try:
                made = self.output_queue.get(timeout=_SECONDS_BETWEEN_LOOKS)
            except Empty:
                if (self.is_alive() and self._reads()) or not self.output_queue.empty():
                    continue
                raise DataError(
                    f"the thread that loads from {self._store} died; is the file still there?"
                ) from None
            if made is None:
                return
            if isinstance(made, BaseException):
                raise made
            take_over(made.crops, made.copied)
            yield made

    def _reads(self) -> bool:
        """Tell whether FFCV's page cache still has threads that read, if there is one."""
        executor = getattr(self.memory_context, "executor", None)
        return executor is None or any(thread.is_alive() for thread in executor.threads)

    def leave(self) -> None:
        """End the thread, wherever it is, and forget its batches."""
        self.terminate_event.set()
        while self.is_alive() and self._reads():  # without readers it waits for ever: let it
            self.join(_SECONDS_BETWEEN_LOOKS)
        if not self._left:
            self._left = True
            self.memory_context.__exit__(None, None, None)
        with contextlib.suppress(Empty):
            while True:
                self.output_queue.get_nowait()
        self.memory_allocations = None

    def close(self) -> None:
        """Do nothing: FFCV calls this when the object is collected; ``leave`` did it all."""

    def _put(self, item: Any) -> bool:
        """Hand over an item; False if nobody wants it any more."""
        while not self.terminate_event.is_set():
            with contextlib.suppress(Full):
                self.output_queue.put(item, timeout=0.1)
                return True
        return False

    @property
    def _pages(self) -> bool:
        """Whether FFCV reads the file's pages into memory of its own."""
        return bool(self.memory_context.state[0].ndim > 1)

    def _begin(
        self, number: int, index: NDArray[np.int64], drawn_for: NDArray[np.int64], slot: int
    ) -> _Begun:
        """Let threads begin with a batch."""
        store, augment = self._store, self._augment
        stream = self._slots[slot]
        if stream is not None:
            stream.synchronize()  # the copy out of this slot's buffer, some batches ago
        size = np.stack([store.height[index], store.width[index]], axis=1).astype(np.int64)
        params = draw_views(
            augment, seed=self._seed, epoch=self._number, index=drawn_for, size=size
        )
        stages = [] if self._dtype is None else stages_of(params, augment, self._dtype)
        cuts = cut_views(params, augment)
        work = self.storage_state = Work(*self._memory(index), index, cuts, stages)
        ((memory, making),) = self.run_pipeline(number, index, slot, None)
        return _Begun(work, params, torch.from_numpy(memory), making, stream)

    def _finish(self, begun: _Begun) -> Made:
        """Wait for a batch's threads, make what they could not, and send it on its way."""
        work, params, stream = begun.work, begun.params, begun.stream
        crops, stages = self._layout.crops(begun.memory), work.stages
        refused = begun.making.refused()
        made = [stage.views() for stage in stages]
        views = in_views_order(made, self._augment) if stages else None
        for row in refused.tolist():
            self._make_by_pil(work, slice(row, row + 1), params, crops, views)
        if stream is None:
            return Made(work.indices, params, crops, views, None)
        with span("copy"), torch.cuda.stream(stream):
            crops = self._layout.crops(begun.memory.to(self._device, non_blocking=True))
        return Made(work.indices, params, crops, None, stream.record_event())

    def _make_by_pil(
        self,
        work: Work,
        row: slice,
        params: ViewParams,
        crops: Crops,
        views: tuple[Tensor, ...] | None,
    ) -> None:
        """Make crops, and perhaps views, of an image that libjpeg-turbo refused."""
        own = tuple(side[:, row] for side in crops)
        index = int(work.indices[row.start])
        crop_by_pil(self._store, index, [cuts.rows(row) for cuts in work.cuts], own)
        if views is not None and self._dtype is not None:
            made = photometric(own, params.rows(row), self._augment, dtype=self._dtype)
            for view, own_view in zip(views, made, strict=True):
                view[row] = own_view

    def _memory(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return FFCV's memory and where the records lie in it: the file, or pages of it."""
        memory, *rest = self.memory_context.state
        start = self._store.start[indices]
        if not self._pages:
            return self._store.memory, start  # FFCV's own mapping is not watched over
        page_size = memory.shape[1]
        slot = rest[-1][start // page_size].astype(np.int64)
        return memory.reshape(-1), slot * page_size + start % page_size
