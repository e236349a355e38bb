"""From encoded images to crops and views on a CPU, for any store.

Each image is decoded once, only the part that its crops need, and cropped K times. Where views are
wanted, the same thread takes each crop through the photometric stage while it is in the cache.
Compiled code (``fastsiam/kernels/source``) decodes JPEGs, crops and augments. Pillow decodes the
images which that code refuses, in the same threads. Crops equal Pillow's, and views torchvision's,
to the last bit.
"""

from __future__ import annotations

import weakref
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
"""Threads that read: so many requests wait at a disk or a server at once."""
_PART = 32
"""Images that one thread reads in one go."""
_AHEAD = 2**27
"""Bytes of coming batches that are fetched ahead from another machine."""
_CHUNK = 2**21
"""Bytes of memory that several images share. A larger image has memory of its own."""


class Lookahead:
    """Has the images of coming batches fetched while those of earlier ones are decoded.

    A disk of this machine does that itself; it is for stores on another machine.

    Args:
        store: the images.
        images_of: returns the positions of a step's images.
        steps: of the pass.
    """

    def __init__(
        self, store: Store, images_of: Callable[[int], NDArray[np.int64]], steps: range
    ) -> None:
        self._store, self._images_of = store, images_of
        self._rest = iter(steps if store.is_remote else ())
        self._sizes = store.sizes() if store.is_remote else np.zeros(0, np.int64)
        self._waiting: deque[int] = deque()
        """Bytes of the batches that were asked for, the next one first."""

    def advance(self) -> None:
        """Ask for coming batches, as the next one is about to be read."""
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
    """N images of a store that are read, and what their headers say."""

    index: NDArray[np.int64]
    """(N,) positions in the store."""
    images: Images
    owners: list[object] = field(default_factory=list)
    """Objects that own the memory at ``images.address``."""

    @property
    def size(self) -> NDArray[np.int64]:
        """(N, 2) height and width of each decoded image."""
        return np.stack([self.images.height, self.images.width], axis=1).astype(np.int64)


class Engine:
    """Threads that read, decode and crop the images of a store.

    A batch takes two calls: ``read``, after which the sizes of its images are known, so that boxes
    can be drawn, and ``submit``. Threads that are done with one batch start with the next.

    Args:
        store: the images.
        workers: threads that decode and crop; -1 is one for each core of this rank.
    """

    def __init__(self, store: Store, *, workers: int) -> None:
        self._store, self._workers = store, max(1, count(workers))
        self._threads = ThreadPoolExecutor(self._workers, "fastsiam-engine")
        self._readers = ThreadPoolExecutor(_READERS, "fastsiam-reader")
        self._headers = Headers(store)
        self._chunks = _Chunks()

    def read(self, index: NDArray[np.int64]) -> EncodedBatch:
        """Read images and their headers.

        Args:
            index: (N,) positions in the store.

        Raises:
            DataError: an image cannot be read, or is not an image; names it.
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
                for row, data in self._headers.read_images(part, self._chunks.new).items():
                    owners[first + row] = data
                    address[first + row], size[first + row] = data.ctypes.data, len(data)

        parts = range(0, len(index), _PART)
        run_all([self._readers.submit(read, first) for first in parts])
        return EncodedBatch(index, self._headers.images(index, address, size), owners)

    def in_memory(
        self, index: NDArray[np.int64], memory: NDArray[np.uint8], start: NDArray[np.int64]
    ) -> EncodedBatch:
        """Return images of a .beton file that were read already.

        Args:
            index: (N,) positions in the store.
            memory: bytes of the file; the batch keeps them alive.
            start: (N,) where each record begins in it.
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
        """Let the threads start with a batch.

        Args:
            batch: N images.
            cuts: of each side.
            sides: of the crops, in pixels.
            crops: of each side (V, N, S, S, 3) uint8, contiguous, filled in; None where only views
                are wanted.
            stages: of each side, where views are wanted.
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
            batch: N images.
            params: the augmentations that are drawn for them.
            augment: for the sides and the normalisation.
            dtype: of the views.

        Returns:
            The views, as ``photometric`` returns them.

        Raises:
            DataError: an image cannot be decoded; names it.
        """
        stages = stages_of(params, augment, dtype)
        cuts = cut_views(params, augment)
        self.submit(batch, cuts, list(augment.by_side), stages=stages).result()
        return in_views_order([stage.views() for stage in stages], augment)

    def close(self) -> None:
        """End the threads."""
        for pool in (self._readers, self._threads):
            pool.shutdown(cancel_futures=True)


class PendingBatch:
    """A batch that threads work on; see ``Engine.submit``."""

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
        """Wait until crops or views are complete.

        Raises:
            DataError: an image cannot be read or decoded; names the first of them.
        """
        run_all(self._running)
        if len(refused := self._job.refused()):
            self._for_pillow.extend(refused.tolist())
            several = min(self._workers, len(refused))
            run_all(submit_all(self._pool, self._decode_by_pillow, several))
        if self._errors:
            raise self._errors[min(self._errors)]

    def wait(self) -> None:
        """Wait until the threads no longer use the batch's memory, even if Ctrl-C is pressed."""
        if stopped := wait_all(self._running):
            raise stopped

    def cancel(self) -> None:
        """Stop the work soon and wait until nothing writes to the batch's memory any more."""
        self._for_pillow.clear()
        self._job.cancel()
        for future in self._running:
            future.cancel()
        self.wait()

    def _work(self) -> None:
        self._decode_by_pillow()
        self._job.run()

    def _decode_by_pillow(self) -> None:
        """Decode one image after the other by Pillow and crop it, as long as there are any."""
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


class _Chunks:
    """Memory for encoded images, used again when no batch needs it any more.

    The system clears new memory page by page, which takes longer than reading a cached file.
    """

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []

    def new(self) -> memoryview:
        """Return a chunk, whose memory is free again when the last reference to it is gone."""
        try:
            block = self._free.pop()
        except IndexError:
            block = np.empty(_CHUNK, np.uint8)
        chunk = block[:]
        weakref.finalize(chunk, self._free.append, block).atexit = False
        return chunk.data  # slices of it, unlike numpy's, keep the array
