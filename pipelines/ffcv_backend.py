"""FFCV's loader with an operation of our own: one read, one decode, both crops.

FFCV brings the file, the page cache, the loader thread, the pinned buffers that rotate, and
libjpeg-turbo. Ours are the order, the boxes, the decoding operation (PyPI's FFCV cannot cut two
views from one decode) and the resampling, which equals PIL's. The operation runs in threads of its
own, compiled by numba ahead of FFCV, which would compile it anew for every loader, and whose
parallel loops deal out images before it is known how long each takes.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=misc
# What numba compiles has no annotations: one function serves arrays of several types.

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Full
from typing import Any

import ffcv._libffcv
import numpy as np
import torch
from ffcv.fields.rgb_image import SimpleRGBImageDecoder
from ffcv.loader import Loader as FfcvOwnLoader
from ffcv.loader import OrderOption
from ffcv.loader.epoch_iterator import EpochIterator
from ffcv.memory_managers.os_cache import OSCacheManager
from ffcv.pipeline.allocation_query import AllocationQuery
from ffcv.pipeline.compiler import Compiler
from ffcv.pipeline.state import State
from llvmlite import binding, ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.augment import ViewParams, draw_views
from fastsiam.batch import TwoViewBatch, to_device
from fastsiam.config import AugmentConfig
from fastsiam.errors import DataError
from fastsiam.photometric import photometric

from .geometric import OVERREAD, crop_views
from .geometric.cpu import Scratch, crop
from .order import Order
from .store import Store
from .store.beton import RAW, BetonStore
from .workers import count

_SECONDS_BETWEEN_LOOKS = 1.0  # at whether the loader thread still lives
_DECODED, _REFUSED = 0, 1
_PIXEL_FORMAT_RGB, _ACCURATE_DCT = 0, 4096  # TJPF_RGB, TJFLAG_ACCURATEDCT: what PIL does


class FfcvLoader:
    """Two-view batches by FFCV's loader; see ``fastsiam.batch.Loader``.

    Args:
        store: a .beton file, of ours or of FFCV's own writer.
        order: which images make up which batch.
        augment: what becomes of them.
        workers: threads that decode and crop; -1 is one for each core of this rank.
        prefetch: batches that are made ahead of the training step.
        os_cache: map the file and leave caching to the system; otherwise FFCV reads the pages that
            the epoch needs, each once, into memory of its own.
        device: where the views shall lie.
        dtype: of the views.

    Raises:
        DataError: the store is not a .beton file.
    """

    def __init__(
        self,
        store: Store,
        order: Order,
        augment: AugmentConfig,
        *,
        workers: int,
        prefetch: int,
        os_cache: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        if not isinstance(store, BetonStore):
            raise DataError(
                f"--pipeline ffcv reads one .beton file, and {store} is none: make one with "
                f"fastsiam convert folder --source {store.root}, or choose --pipeline dali"
            )
        self.source, self.images, self.steps = str(store), len(store), order.steps
        self._store, self._order, self._augment = store, order, augment
        self._device, self._dtype = device, dtype
        self._crops = TwoCrops(store, augment.crop, max(1, count(workers)))
        self._loader = _open(store, self._crops, order.batch // order.world, prefetch, os_cache)
        self._epoch: _Epoch | None = None
        atexit.register(_close_at_exit, weakref.ref(self))

    def crops(
        self, number: int, *, skip: int = 0
    ) -> Generator[tuple[NDArray[np.int64], ViewParams, Tensor]]:
        """Yield positions, parameters and crops (2, N, S, S, 3) uint8 of an epoch's batches.

        The crops lie on the device; on a CPU they are overwritten when the next are asked for.
        """
        self._leave()
        epoch = _Epoch(
            self._loader, self._store, self._order, self._augment, number, skip, self._device
        )
        self._epoch = epoch
        try:
            yield from epoch
        finally:
            epoch.leave()

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[TwoViewBatch]:
        """Yield the batches of an epoch from step ``skip`` on; one epoch at a time."""
        with contextlib.closing(self.crops(number, skip=skip)) as batches:
            for index, params, crops in batches:
                view1, view2 = photometric(crops, params, self._augment, dtype=self._dtype)
                label = to_device(self._store.labels[index], self._device)
                yield TwoViewBatch(view1, view2, to_device(index, self._device), label)

    def close(self) -> None:
        """End the threads and free the buffers."""
        self._leave()
        self._crops.close()
        del self._loader

    def _leave(self) -> None:
        if self._epoch is not None:
            self._epoch.leave()
            self._epoch = None


def _close_at_exit(reference: weakref.ref[FfcvLoader]) -> None:
    """Stop the thread of a loader that its user left open, while it can be stopped."""
    loader = reference()
    if loader is not None:
        loader._leave()


def _open(
    store: BetonStore, operation: TwoCrops, batch: int, prefetch: int, os_cache: bool
) -> FfcvOwnLoader:
    """Open FFCV's loader, and keep it from what it would do to others.

    It sets torch's number of threads. It compiles, with every loader, a reader of its own, for
    which it declares numba's type of all byte arrays read-only: whatever was compiled for such
    arrays before cannot be called any more.
    """
    threads, compiling, reader = (
        torch.get_num_threads(),
        Compiler.is_enabled,
        OSCacheManager.compile_reader,
    )
    Compiler.set_enabled(False)  # our operation is compiled already
    OSCacheManager.compile_reader = lambda manager: None  # and reads by itself
    try:
        return FfcvOwnLoader(
            str(store.root),
            batch_size=batch,
            num_workers=1,
            order=OrderOption.SEQUENTIAL,  # ours is handed to each epoch
            os_cache=os_cache,
            pipelines=dict.fromkeys(store.fields) | {store.image_field: [operation]},
            batches_ahead=prefetch,
        )
    finally:
        Compiler.set_enabled(compiling)
        OSCacheManager.compile_reader = reader
        torch.set_num_threads(threads)


class _Epoch(EpochIterator):
    """One epoch in FFCV's thread; iterating over it yields what ``FfcvLoader.crops`` says.

    An error in FFCV's own thread ends that thread, and whoever waits for a batch waits for ever:
    here it comes out where the batch is waited for.
    """

    def __init__(
        self,
        loader: FfcvOwnLoader,
        store: BetonStore,
        order: Order,
        augment: AugmentConfig,
        number: int,
        skip: int,
        device: torch.device,
    ) -> None:
        self._store, self._augment, self._device = store, augment, device
        self._seed, self._number, self._left = order.seed, number, False
        steps = [order.indices(number, step) for step in range(skip, order.steps)]
        super().__init__(loader, np.concatenate([*steps, np.empty(0, np.int64)]))

    def run(self) -> None:
        """Make the batches; FFCV's own loop, but for errors and for threads that are not FFCV's."""
        try:
            for number, indices in enumerate(self.iter_ixes):
                slot = number % (self.loader.batches_ahead + 2)
                if not self._put(self._make(number, indices, slot)):
                    return
            self._put(None)
        except BaseException as error:
            self._put(error)

    def __iter__(self) -> Iterator[tuple[NDArray[np.int64], ViewParams, Tensor]]:
        """Wait for the batches."""
        while not self.terminate_event.is_set():
            try:
                item = self.output_queue.get(timeout=_SECONDS_BETWEEN_LOOKS)
            except Empty:
                if self.is_alive() or not self.output_queue.empty():
                    continue
                raise DataError(f"the loader of {self._store} died; run again") from None
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            indices, params, crops, ready = item
            if ready is not None:
                stream = torch.cuda.current_stream(self._device)
                stream.wait_event(ready)
                crops.record_stream(stream)
            yield indices, params, crops

    def leave(self) -> None:
        """End the thread, wherever it is, and forget its batches."""
        self.terminate_event.set()
        if self.is_alive():
            self.join()
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

    def _make(self, number: int, indices: NDArray[np.int64], slot: int) -> Any:
        store = self._store
        stream = self.cuda_streams[slot] if self._device.type == "cuda" else None
        if stream is not None:
            stream.synchronize()  # the copy out of this slot's buffer, some batches ago
        size = np.stack([store.height[indices], store.width[indices]], axis=1).astype(np.int64)
        params = draw_views(
            self._augment, seed=self._seed, epoch=self._number, index=indices, size=size
        )
        self.storage_state = _Batch(*self._memory(indices), indices, size, params)
        ((crops, status),) = self.run_pipeline(number, indices, slot, None)
        for row in np.flatnonzero(status != _DECODED):
            self._decode_with_pil(int(indices[row]), int(row), size, params, crops)
        crops = torch.from_numpy(crops)
        if stream is None:
            return indices, params, crops, None
        with torch.cuda.stream(stream):
            crops = crops.to(self._device, non_blocking=True)
        return indices, params, crops, stream.record_event()

    def _memory(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return FFCV's memory and where the records lie in it: the file, or pages of it."""
        memory, *rest = self.memory_context.state
        start = self._store.start[indices]
        if memory.ndim == 1:
            return memory, start
        page_size = memory.shape[1]
        slot = rest[-1][start // page_size].astype(np.int64)
        return memory.reshape(-1), slot * page_size + start % page_size

    def _decode_with_pil(
        self, index: int, row: int, size: NDArray[np.int64], params: ViewParams, crops: Any
    ) -> None:
        """Make a sample that libjpeg-turbo refused or had doubts about: PIL decides.

        Raises:
            DataError: PIL cannot decode it either, or it is not of the size that the file states.
        """
        image = np.asarray(self._store.decode(index))
        if image.shape[:2] != tuple(size[row]):
            raise self._store.cannot_decode(index, "it is not as large as the file says")
        pixels = torch.from_numpy(np.append(image.reshape(-1), np.zeros(OVERREAD, np.uint8)))
        one = ViewParams(
            *(getattr(params, name)[:, row : row + 1] for name in ViewParams.__slots__)
        )
        made = crop_views(pixels, np.zeros(1, np.int64), size[row : row + 1], one, crops.shape[2])
        crops[:, row] = made[:, 0].numpy()


@dataclass(frozen=True, slots=True)
class _Batch:
    """What the operation needs to know of a batch, in the place of FFCV's state of its storage."""

    source: NDArray[np.uint8]
    """The memory that holds the records."""
    start: NDArray[np.int64]
    """(N,) where each begins in it."""
    indices: NDArray[np.int64]
    size: NDArray[np.int64]
    """(N, 2) height and width."""
    params: ViewParams


class TwoCrops(SimpleRGBImageDecoder):
    """FFCV operation: decode an image once, make both crops, in threads.

    FFCV takes an operation for an image field's decoder if it descends from the simple one.

    Its output is a pair of arrays: crops (2, N, side, side, 3) uint8, and what became of each image
    (N,) uint8.
    """

    def __init__(self, store: BetonStore, side: int, workers: int) -> None:
        super().__init__()
        self._store, self._side = store, side
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="fastsiam-ffcv")
        height, width = int(store.height.max()), int(store.width.max())
        largest = int((store.height.astype(np.int64) * store.width).max())
        self._threads = [
            (Decompressor(largest), Scratch(height, width, side).arrays) for _ in range(workers)
        ]

    def declare_state_and_memory(self, previous_state: State) -> tuple[State, Any]:
        """Ask FFCV for the buffers of a batch."""
        shape = (2, self._side, self._side, 3)
        byte = np.dtype("u1")
        return State(True, previous_state.device, shape, byte), (
            AllocationQuery(shape, byte),
            AllocationQuery((1,), byte),
        )

    def generate_code(self) -> Any:
        """Return the function that FFCV calls for each batch."""

        def two_crops(indices: Any, memory: Any, metadata: Any, batch: _Batch) -> Any:
            crops, status = memory
            crops = crops.reshape(2, len(indices), self._side, self._side, 3)
            self._run(batch, crops.reshape(2, len(indices), -1), status[:, 0])
            return crops, status[:, 0]

        return two_crops

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _run(self, batch: _Batch, crops: NDArray[np.uint8], status: NDArray[np.uint8]) -> None:
        store, indices, params = self._store, batch.indices, batch.params
        length, raw = store.bytes[indices], store.modes[indices] == RAW
        turns = np.argsort(-length)  # those that take long first: no thread is left with one
        counter = np.zeros(1, np.int64)

        def work(decompressor: Decompressor, scratch: Any) -> None:
            _two_crops(
                batch.source,
                batch.start,
                length,
                batch.size,
                raw,
                params.box,
                params.flip,
                self._side,
                turns,
                counter,
                decompressor.handle,
                decompressor.pixels,
                scratch,
                crops,
                status,
            )

        for done in [self._pool.submit(work, *own) for own in self._threads]:
            done.result()


class Decompressor:
    """One thread's libjpeg-turbo, with room for images of up to so many pixels."""

    def __init__(self, largest: int) -> None:
        self.handle = _new_decompressor()
        if not self.handle:
            raise MemoryError("libjpeg-turbo found no memory for a decompressor")
        self.pixels = np.empty(3 * largest + OVERREAD, np.uint8)
        weakref.finalize(self, _end_decompressor, self.handle)

    def decode(self, store: BetonStore, index: int) -> bool:
        """Decode an image of a store into ``pixels``; false if libjpeg-turbo has doubts."""
        data = np.frombuffer(store.read(index), np.uint8)
        width, height = int(store.width[index]), int(store.height[index])
        return bool(_decode(self.handle, data, width, height, self.pixels))


_compiled = njit(nogil=True, cache=True, error_model="numpy")

# FFCV's library is linked with libjpeg-turbo; whoever knows the one finds the other.
binding.load_library_permanently(str(Path(ffcv._libffcv.__file__)))


def _foreign(name: str, result: Any, *arguments: Any) -> Any:
    return types.ExternalFunction(name, result(*arguments))


_pointer, _int = types.uintp, types.int32
_tj_init = _foreign("tjInitDecompress", _pointer)
_tj_destroy = _foreign("tjDestroy", _int, _pointer)
_tj_decompress = _foreign(
    "tjDecompress2", _int, _pointer, _pointer, types.uint64, _pointer, *[_int] * 5
)
_tj_header = _foreign(
    "tjDecompressHeader3", _int, _pointer, _pointer, types.uint64, *[_pointer] * 4
)


@_compiled
def _new_decompressor():
    return _tj_init()


@_compiled
def _end_decompressor(handle):
    return _tj_destroy(np.uintp(handle))


@_compiled
def _two_crops(
    source,
    start,
    length,
    size,
    raw,
    box,
    flip,
    side,
    turns,
    counter,
    handle,
    pixels,
    scratch,
    out,
    status,
):
    """Take one image after the other, as long as there are any, and make its crops."""
    while True:
        turn = _next(counter.ctypes.data)  # type: ignore[call-arg, var-annotated]
        if turn >= len(turns):
            return
        row = turns[turn]
        height, width = size[row, 0], size[row, 1]
        data = source[start[row] :]
        image = data if raw[row] else pixels
        if raw[row] or _decode(handle, data[: length[row]], width, height, pixels):
            status[row] = _DECODED
            for view in range(2):
                crop(image, width, box[view, row], flip[view, row], side, out[view, row], scratch)
        else:
            status[row] = _REFUSED


@_compiled
def _decode(handle, data, width, height, pixels):
    """Decode a JPEG; false if it is damaged, of another size, or its colours are no RGB's."""
    found = np.empty((1, 4), np.int32)  # width, height, subsampling, colour space
    at = np.uintp(found.ctypes.data)
    begin, count, own = np.uintp(data.ctypes.data), np.uint64(len(data)), np.uintp(handle)
    failed = _tj_header(
        own, begin, count, at, at + np.uintp(4), at + np.uintp(8), at + np.uintp(12)
    )
    if failed or found[0, 0] != width or found[0, 1] != height:
        return False
    failed = _tj_decompress(
        own,
        begin,
        count,
        np.uintp(pixels.ctypes.data),
        np.int32(width),
        np.int32(3 * width),
        np.int32(height),
        np.int32(_PIXEL_FORMAT_RGB),
        np.int32(_ACCURATE_DCT),
    )
    return failed == 0


@intrinsic
def _next(context, address):
    """Add one to the int64 at an address and return what it was, whoever else does the same."""

    def generate(context, builder, signature, arguments):
        index = ir.IntType(64)
        pointer = builder.inttoptr(arguments[0], index.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(index, 1), "monotonic")

    return types.int64(types.intp), generate
