"""From encoded images to crops and views on a CPU, for any store.

Each image is decoded once, only the part that its crops need, and cropped K times. Where views are
wanted, the same thread takes each crop through the photometric stage while it is in the cache.
Compiled code (``fastsiam/kernels/source``) decodes JPEGs, crops and augments. Pillow decodes the
images which that code refuses, in the same threads. Crops equal Pillow's, and views torchvision's,
to the last bit.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError, ImageError
from fastsiam.kernels import library
from fastsiam.kernels.threads import run_all, submit_all, wait_all
from fastsiam.trace import span
from fastsiam.views.batch import Crops
from fastsiam.views.photometric.cpu import Stage

from .geometric import Cuts
from .geometric.cpu import JPEG, PILLOW, PIXELS, Images, Job
from .store import BetonStore, Store
from .store.probe import Bytes
from .workers import count

log = logging.getLogger(__name__)

_UNKNOWN = 254
"""Form of an image whose header was not read yet."""
_READERS = 8
"""Threads that read: so many requests wait at a disk or a server at once."""
_PART = 32
"""Images that one thread reads in one go."""


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
        self._headers = _Headers(store)

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
                for row in range(first, min(first + _PART, len(index))):
                    if (data := self._headers.read_image(int(index[row]))) is not None:
                        owners[row], address[row], size[row] = data, _address(data), len(data)

        parts = range(0, len(index), _PART)
        run_all([self._readers.submit(read, first) for first in parts])
        return EncodedBatch(index, self._headers.images(index, address, size), owners)

    def at(
        self, index: NDArray[np.int64], memory: NDArray[np.uint8], start: NDArray[np.int64]
    ) -> EncodedBatch:
        """Return images of a .beton file that were read into memory already.

        Args:
            index: (N,) positions in the store.
            memory: bytes of the file.
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
        job = Job(
            batch.images,
            cuts,
            sides,
            crops,
            stages,
            decode=decoder() or 0,
            longest_first=True,
        )
        return PendingBatch(self._store, batch, job, self._threads, self._workers)

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


class _Headers:
    """Sizes and forms of a store's images: each header is read once and then remembered."""

    def __init__(self, store: Store) -> None:
        self._store = store
        if isinstance(store, BetonStore):  # its table has them all
            self._height, self._width, self._form = store.height, store.width, store.modes
        else:
            images = len(store)
            self._height, self._width = np.zeros(images, np.int32), np.zeros(images, np.int32)
            self._form = np.full(images, _UNKNOWN, np.uint8)
        if decoder() is None:
            self._form = np.where(self._form == JPEG, np.uint8(PILLOW), self._form)

    def images(
        self, index: NDArray[np.int64], address: NDArray[np.int64], size: NDArray[np.int64]
    ) -> Images:
        """Return images whose headers are read.

        Args:
            index: (N,) positions in the store.
            address: (N,) of each one's first byte.
            size: (N,) bytes of each.
        """
        form = self._form[index]
        return Images(address, size, self._height[index], self._width[index], form)

    def read(self, index: NDArray[np.int64]) -> None:
        """Read the headers of images, as far as they are unknown.

        Raises:
            DataError: it is not an image; names it.
        """
        for image in index[self._form[index] == _UNKNOWN].tolist():
            self._read(image, self._store.read(image))

    def read_image(self, index: int) -> Bytes | None:
        """Read an image's bytes, and its header if it is unknown; None if Pillow is to read it.

        Raises:
            DataError: it cannot be read, or is not an image; names it.
        """
        if self._form[index] == PILLOW:
            return None
        data = self._store.read(index)
        if self._form[index] == _UNKNOWN:
            self._read(index, data)
        return data

    def _read(self, index: int, data: Bytes) -> None:
        store = self._store
        try:
            head = store.header(index, data)
        except ImageError:  # Pillow reads some files whose header this program refuses
            image = store.decode(index)
            (height, width), form = (image.height, image.width), PILLOW
        else:
            height, width = store.rules.size(head)
            form = JPEG
            if store.raw_size(index) is not None:
                form = PIXELS
            elif store.rules.needs_pillow(head) or decoder() is None:
                form = PILLOW
        self._height[index], self._width[index] = height, width
        self._form[index] = form  # last: other threads read it first


def _address(data: Bytes) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


@cache
def decoder() -> int | None:
    """Return the address of the function that decodes JPEGs (``Decode`` in ``source/job.h``).

    None where fastsiam was compiled without libjpeg-turbo: Pillow decodes then.
    """
    if (jpeg := library.jpeg()) is None:
        log.warning(
            "fastsiam was compiled without libjpeg-turbo's header: Pillow decodes JPEGs, which is "
            "slower; install libjpeg-dev and run python -m fastsiam.kernels.build"
        )
        return None
    return library.address(jpeg.fastsiam_decode)
