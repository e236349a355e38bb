"""The CPU engine: decodes, crops and augments the images of any store.

A thread decodes each image once, and only the region that its crops need. It then makes each crop
and, if views are requested, applies the photometric stage while the crop is in the CPU cache.
Compiled code (``fastsiam/kernels/source``) decodes JPEGs, crops and augments. Pillow decodes other
images, and JPEGs that the compiled code rejects, in the same threads. Crops are bit-identical to
Pillow's, and views to torchvision's before the normalisation.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import DataError
from fastsiam.kernels.buffers import BufferPool
from fastsiam.kernels.threads import run_all, submit_all, wait_all
from fastsiam.trace import span
from fastsiam.views.batch import Crops
from fastsiam.views.photometric.cpu import Stage

from .cuts import Cuts
from .headers import Headers
from .job import PILLOW, Images, Job
from .store import Store
from .workers import count, prefetch_map

Result = TypeVar("Result")

_READERS = 8
"""Number of reader threads, and so of concurrent requests to a disk or a server."""
_PART = 32
"""Images that a reader thread reads per call."""
_AHEAD = 2**27
"""Maximum bytes of upcoming batches to prefetch from a remote store."""
_CHUNK = 2**21
"""Bytes of a buffer that several images share; a larger image gets its own buffer."""
_MOST_CHUNKS = 256
"""Unused chunks to keep for later batches: 512 MiB, enough for 5,000 photographs."""


Submitted = tuple["PendingBatch", Callable[[], Result]]
"""A pending batch, and a function that returns its result once the batch is complete."""
Read = Callable[[NDArray[np.int64]], Images]
"""Reads images at N positions in the store."""


def batches_ahead(prefetch: int) -> int:
    """Return how many batches to submit in addition to the one completed ahead of the caller."""
    return max(1, prefetch - 1)


def prefetch_remote(
    store: Store, batches: Iterator[NDArray[np.int64]]
) -> Iterator[NDArray[np.int64]]:
    """Yield each batch's positions, after prefetching images of upcoming batches.

    Only remote stores are prefetched: the operating system reads ahead in local files. The first
    batch is requested alone, so that it does not share the connection with later ones. Then two
    batches are requested for each one that is yielded, up to ``_AHEAD`` bytes.
    """
    if not store.is_remote:
        yield from batches
        return
    sizes, requested_bytes, waiting = store.sizes(), 0, deque[NDArray[np.int64]]()
    yielded_count = 0
    for index in batches:
        store.prefetch(index.tolist())
        waiting.append(index)
        requested_bytes += int(sizes[index].sum())
        while waiting and (requested_bytes >= _AHEAD or len(waiting) > yielded_count):
            first = waiting.popleft()
            requested_bytes -= int(sizes[first].sum())
            yielded_count += 1
            yield first
    yield from waiting


class Engine:
    """Threads that read, decode, crop and augment the images of a store.

    Call ``read`` first. It returns the encoded images and their sizes, from which crop boxes are
    drawn. Pass both to ``submit``, and wait for the ``result`` of the pending batch. Several
    batches may be pending: a thread that finds no work left in one starts on the next. ``batches``
    does all this for the steps of an epoch.

    Args:
        store: the images.
        workers: threads that decode and crop; -1 means one per core of this rank.
    """

    def __init__(self, store: Store, *, workers: int | str) -> None:
        self.store = store
        self.use(max(1, count(workers)))
        self._readers = ThreadPoolExecutor(_READERS, "fastsiam-reader")
        self.headers = Headers(store)
        self._chunks = BufferPool(_MOST_CHUNKS)
        self._last: Callable[[], PendingBatch | None] = lambda: None

    def use(self, workers: int) -> None:
        """Set the number of threads for batches that are submitted from now on.

        Pending batches keep their threads, which end after them.
        """
        self.workers = workers
        self.threads = ThreadPoolExecutor(workers, "fastsiam-engine")

    def batches(
        self,
        index_of: Callable[[int], NDArray[np.int64]],
        steps: range,
        submit: Callable[[int, NDArray[np.int64], Images], Submitted[Result]],
        *,
        prefetch: int,
        read: Read | None = None,
    ) -> Generator[Result]:
        """Yield the results of batches in order; one thread submits them, another awaits them.

        ``prefetch`` batches, at least two, are in progress. The first of them is completed ahead of
        the caller. Once the generator is closed, no thread writes to the batches' memory.

        Args:
            index_of: returns the positions of a step's images.
            steps: steps of the epoch, in order.
            submit: submits the batch of a step, given the positions and the images.
            prefetch: batches in progress while the caller works on one.
            read: reads the images of the next batch; the engine's ``read`` by default.
        """
        indices: Iterator[NDArray[np.int64]] = map(index_of, steps)
        if read is None:
            read, indices = self.read, prefetch_remote(self.store, indices)
        running: set[PendingBatch] = set()

        def start(step: int) -> Submitted[Result] | Exception:
            try:
                index = next(indices)
                pending, finish = submit(step, index, read(index))
            except Exception as error:  # raised after the batches before it
                return error
            running.add(pending)
            return pending, finish

        def complete(submission: Submitted[Result] | Exception) -> Result:
            if isinstance(submission, Exception):
                raise submission
            pending, finish = submission
            with span("decode"):
                pending.result()
            running.discard(pending)  # frees the encoded images
            return finish()

        def cancel() -> None:
            for pending in tuple(running):
                pending.cancel()

        submissions = prefetch_map(start, steps, count=batches_ahead(prefetch))
        results = prefetch_map(complete, submissions, count=1)
        try:
            # "yield from" would close `results` before the work is cancelled, and wait for it.
            for batch in results:  # noqa: UP028
                yield batch
        finally:
            cancel()
            results.close()
            submissions.close()
            cancel()  # batches submitted since the first call

    def read(self, index: NDArray[np.int64]) -> Images:
        """Read the encoded images at N positions, and any headers not read yet.

        Raises:
            DataError: a file cannot be read or is not an image; the message names it.
        """
        self.store.prefetch(index.tolist())
        if (located := self.store.locate(index)) is not None:
            self.headers.read(index)
            return self.headers.images(index, *located)
        address, size = np.zeros(len(index), np.int64), np.zeros(len(index), np.int64)
        owners: list[object] = [None] * len(index)

        def read(first: int) -> None:
            with span("read"):
                part = index[first : first + _PART]
                for row, data in enumerate(self.headers.read_images(part, self._new_chunk), first):
                    owners[row], size[row] = data, len(data)
                    address[row] = np.frombuffer(data, np.uint8).ctypes.data

        parts = range(0, len(index), _PART)
        run_all([self._readers.submit(read, first) for first in parts])
        return self.headers.images(index, address, size, owners)

    def submit(
        self,
        index: NDArray[np.int64],
        images: Images,
        cuts: Sequence[Cuts],
        *,
        crops: Crops | None = None,
        stages: Sequence[Stage] = (),
    ) -> PendingBatch:
        """Queue a batch for the threads, and return without waiting.

        ``images`` are those at the N positions of ``index``; for the other arguments see ``Job``.
        """
        job = Job(images, cuts, crops, stages, decode=self.headers.decode)
        pending = PendingBatch(self, index, images, job)
        self._last = weakref.ref(pending)
        return pending

    def _new_chunk(self) -> memoryview:
        return self._chunks.array((_CHUNK,), np.uint8).data  # its slices keep the array

    def wait(self) -> None:
        """Wait until no thread uses the memory of the last submitted batch."""
        if (pending := self._last()) is not None:
            pending.wait()

    def close(self) -> None:
        """End the threads and free the unused buffers."""
        for pool in (self._readers, self.threads):
            pool.shutdown(cancel_futures=True)
        self._chunks.clear()


class PendingBatch:
    """A batch in progress in the engine's threads; see ``Engine.submit``."""

    def __init__(self, engine: Engine, index: NDArray[np.int64], images: Images, job: Job) -> None:
        self._engine, self._index, self._images, self._job = engine, index, images, job
        self._for_pillow = deque(np.flatnonzero(images.form == PILLOW).tolist())
        self._errors: dict[int, DataError] = {}
        self._running = submit_all(engine.threads, self._work, engine.workers)

    def result(self) -> None:
        """Wait until all crops or views are complete.

        Raises:
            DataError: an image cannot be read or decoded; the message names the first one.
        """
        run_all(self._running)
        if len(rows := self._job.rejected_rows()):
            self._for_pillow.extend(rows.tolist())
            workers = min(self._engine.workers, len(rows))
            run_all(submit_all(self._engine.threads, self._decode_by_pillow, workers))
        if self._errors:
            raise self._errors[min(self._errors)]

    def wait(self) -> None:
        """Wait until no thread uses the batch's memory; a Ctrl-C meanwhile is raised afterwards."""
        if interrupt := wait_all(self._running):
            raise interrupt

    def cancel(self) -> None:
        """Skip the images that no thread has started, and wait for the others."""
        self._for_pillow.clear()
        self._job.cancel()
        for future in self._running:
            future.cancel()
        self.wait()

    def _work(self) -> None:
        self._decode_by_pillow()
        self._job.run()

    def _decode_by_pillow(self) -> None:
        while True:
            try:
                row = self._for_pillow.popleft()
            except IndexError:
                return
            try:
                self._job.make_pixels(row, self._decode(row))
            except DataError as error:
                self._errors[row] = error

    def _decode(self, row: int) -> NDArray[np.uint8]:
        index, images, store = int(self._index[row]), self._images, self._engine.store
        data = images.owner[row] if isinstance(images.owner, list) else None
        pixels = np.asarray(store.decode(index, data))
        if pixels.shape[:2] != (images.height[row], images.width[row]):
            raise store.cannot_decode(
                index,
                f"it has {pixels.shape[1]} x {pixels.shape[0]} pixels, but its header said "
                f"{images.width[row]} x {images.height[row]}: the file is corrupt or was replaced",
            )
        return pixels
