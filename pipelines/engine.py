"""The engine: decodes, crops and augments the images of any store on a CPU.

A thread decodes an image once, and only the part that its crops need. It then makes each crop and,
where views are wanted, applies the photometric stage while the crop is in the cache. Compiled code
(``fastsiam/kernels/source``) decodes JPEGs, crops and augments. Pillow decodes other images, and
JPEGs that the compiled code refuses, in the same threads. Crops are bit-identical to Pillow's, and
views to torchvision's before the normalisation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.errors import DataError
from fastsiam.kernels.buffers import BufferPool
from fastsiam.kernels.threads import run_all, submit_all, wait_all
from fastsiam.trace import span
from fastsiam.views.batch import Crops
from fastsiam.views.draws import ViewParams
from fastsiam.views.photometric.cpu import Stage
from fastsiam.views.photometric.operations import in_views_order

from .cuts import Cuts, cut_views
from .headers import Headers
from .job import PILLOW, Images, Job, stages_of
from .store import Store
from .workers import count

_READERS = 8
"""Reader threads: the number of requests that a disk or a server gets at once."""
_PART = 32
"""Images that a reader thread reads per call."""
_AHEAD = 2**27
"""Bytes of coming batches that are requested ahead from another machine."""
_CHUNK = 2**21
"""Bytes of a chunk of memory, which several images share; a larger image gets its own memory."""
_MOST_CHUNKS = 256
"""Chunks that are kept while no batch uses them: half a gigabyte, of 5,000 photographs."""


class Lookahead:
    """Requests the images of coming batches from a remote store while earlier ones are decoded.

    It does nothing for local stores, whose files the operating system reads ahead.

    Args:
        store: the images.
        images_of: returns the positions of a step's images.
        steps: steps that will be read, in order.
    """

    def __init__(
        self, store: Store, images_of: Callable[[int], NDArray[np.int64]], steps: range
    ) -> None:
        self._store, self._images_of = store, images_of
        self._rest = iter(steps if store.is_remote else ())
        self._sizes = store.sizes() if store.is_remote else np.zeros(0, np.int64)
        self._waiting: deque[int] = deque()
        """Bytes of each batch that was requested and not yet read; the next one first."""

    def advance(self) -> None:
        """Request more batches; call it before each batch is read."""
        if self._waiting:
            self._waiting.popleft()
        while not self._waiting or sum(self._waiting) < _AHEAD:
            if (step := next(self._rest, None)) is None:
                return
            index = self._images_of(step)
            self._store.ahead(index.tolist())
            self._waiting.append(int(self._sizes[index].sum()))


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """N encoded images of a store, with the sizes that their headers state."""

    index: NDArray[np.int64]
    """(N,) positions in the store."""
    images: Images
    owners: list[object] = field(default_factory=list)
    """Objects that own the memory at ``images.address``; they live as long as the batch."""

    @property
    def size(self) -> NDArray[np.int64]:
        """(N, 2) height and width of each decoded image."""
        return np.stack([self.images.height, self.images.width], axis=1).astype(np.int64)


class Engine:
    """Threads that read, decode, crop and augment the images of a store.

    Call ``read`` first. It returns the encoded images and their sizes, which drawing the crop boxes
    needs. Then pass them with the boxes to ``submit``, and wait for the ``result`` of the pending
    batch. Several batches may be pending: a thread that finds no work left in one starts the next.

    Args:
        store: the images.
        workers: threads that decode and crop; -1 means one per core of this rank.
    """

    def __init__(self, store: Store, *, workers: int) -> None:
        self._store, self._workers = store, max(1, count(workers))
        self._threads = ThreadPoolExecutor(self._workers, "fastsiam-engine")
        self._readers = ThreadPoolExecutor(_READERS, "fastsiam-reader")
        self._headers = Headers(store)
        self._chunks = BufferPool(_MOST_CHUNKS)

    def read(self, index: NDArray[np.int64]) -> EncodedBatch:
        """Read N encoded images, and the headers that are not known yet.

        Args:
            index: (N,) positions in the store.

        Raises:
            DataError: a file cannot be read or is not an image; the message names it.
        """
        self._store.ahead(index.tolist())
        if (located := self._store.locate(index)) is not None:
            address, size = located
            self._headers.read(index)
            return EncodedBatch(index, self._headers.images(index, address, size))
        address, size = np.zeros(len(index), np.int64), np.zeros(len(index), np.int64)
        owners: list[object] = [None] * len(index)

        def read(first: int) -> None:
            with span("read"):
                part = index[first : first + _PART]
                for row, data in self._headers.read_images(part, self._new_chunk).items():
                    owners[first + row] = data
                    address[first + row], size[first + row] = data.ctypes.data, len(data)

        parts = range(0, len(index), _PART)
        run_all([self._readers.submit(read, first) for first in parts])
        return EncodedBatch(index, self._headers.images(index, address, size), owners)

    def in_memory(
        self, index: NDArray[np.int64], memory: NDArray[np.uint8], start: NDArray[np.int64]
    ) -> EncodedBatch:
        """Return N images of a .beton file whose bytes are in memory.

        Args:
            index: (N,) positions in the store.
            memory: bytes of the file; the batch keeps a reference.
            start: (N,) offset of each image in ``memory``.
        """
        size = self._store.sizes()[index]
        images = self._headers.images(index, memory.ctypes.data + start, size)
        return EncodedBatch(index, images, [memory])

    def submit(
        self,
        batch: EncodedBatch,
        cuts: Sequence[Cuts],
        sides: Sequence[int],
        *,
        crops: Crops | None = None,
        stages: Sequence[Stage] = (),
    ) -> PendingBatch:
        """Queue a batch for the threads, and return without waiting.

        Args:
            batch: N encoded images.
            cuts: crop boxes and flips, for each side of the crops.
            sides: sides of the crops, in pixels.
            crops: output for each side, (V, N, S, S, 3) uint8, contiguous; None if only views are
                wanted.
            stages: photometric stage for each side, if views are wanted; it holds the views.
        """
        job = Job(batch.images, cuts, sides, crops, stages, decode=self._headers.decode)
        return PendingBatch(self._store, batch, job, self._threads, self._workers)

    def make_views(
        self,
        batch: EncodedBatch,
        params: ViewParams,
        augment: AugmentConfig,
        dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        """Make the views of a batch and wait for them.

        Args:
            batch: N encoded images.
            params: their augmentation parameters.
            augment: sides of the views and constants of the normalisation.
            dtype: floating type of the views.

        Returns:
            The views in the order of ``augment.views``: (N, 3, S, S) each, channels-last.

        Raises:
            DataError: an image cannot be decoded; the message names it.
        """
        stages = stages_of(params, augment, dtype)
        cuts = cut_views(params, augment)
        self.submit(batch, cuts, list(augment.by_side), stages=stages).result()
        return in_views_order([stage.views() for stage in stages], augment)

    def _new_chunk(self) -> memoryview:
        return self._chunks.array((_CHUNK,), np.uint8).data  # its slices keep the array

    def close(self) -> None:
        """End the threads."""
        for pool in (self._readers, self._threads):
            pool.shutdown(cancel_futures=True)


class PendingBatch:
    """A batch that the engine's threads work on; see ``Engine.submit``."""

    def __init__(
        self,
        store: Store,
        batch: EncodedBatch,
        job: Job,
        threads: ThreadPoolExecutor,
        workers: int,
    ) -> None:
        self._store, self._batch, self._job = store, batch, job
        self._pool, self._workers = threads, workers
        self._for_pillow = deque(np.flatnonzero(batch.images.form == PILLOW).tolist())
        self._errors: dict[int, DataError] = {}
        self._running = submit_all(threads, self._work, workers)

    def result(self) -> None:
        """Wait until all crops or views are complete.

        Raises:
            DataError: an image cannot be read or decoded; the message names the first one.
        """
        run_all(self._running)
        if len(refused := self._job.refused()):
            self._for_pillow.extend(refused.tolist())
            several = min(self._workers, len(refused))
            run_all(submit_all(self._pool, self._decode_by_pillow, several))
        if self._errors:
            raise self._errors[min(self._errors)]

    def wait(self) -> None:
        """Wait until no thread uses the batch's memory; Ctrl-C is raised after that."""
        if stopped := wait_all(self._running):
            raise stopped

    def cancel(self) -> None:
        """Drop the images that no thread has started, and wait for the others."""
        self._for_pillow.clear()
        self._job.cancel()
        for future in self._running:
            future.cancel()
        self.wait()

    def _work(self) -> None:
        self._decode_by_pillow()
        self._job.run()

    def _decode_by_pillow(self) -> None:
        """Decode and crop the images that are left to Pillow, one after the other."""
        while True:
            try:
                row = self._for_pillow.popleft()
            except IndexError:
                return
            try:
                self._job.make_pixels(row, self._decoded(row))
            except DataError as error:
                self._errors[row] = error

    def _decoded(self, row: int) -> NDArray[np.uint8]:
        index, images = int(self._batch.index[row]), self._batch.images
        pixels = np.asarray(self._store.decode(index))
        if pixels.shape[:2] != (images.height[row], images.width[row]):
            raise self._store.cannot_decode(
                index,
                f"it has {pixels.shape[1]} x {pixels.shape[0]} pixels, and its header says "
                f"{images.width[row]} x {images.height[row]}",
            )
        return pixels
