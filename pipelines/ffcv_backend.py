"""FFCV's loader with an operation of our own: one read, one decode, both crops.

FFCV brings the file, the page cache, the loader thread, the pinned buffers that rotate, and
libjpeg-turbo. Ours are the order, the boxes, the decoding operation (PyPI's FFCV cannot cut two
views from one decode) and the resampling, which equals PIL's. The operation runs in threads of its
own, compiled by numba ahead of FFCV, which would compile it anew for every loader, and whose
parallel loops deal out images before it is known how long each takes.

Evaluation, whose images come in the file's order, does without FFCV's loader: the same threads
decode and cut central crops out of the mapped file.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=misc
# What numba compiles has no annotations: one function serves arrays of several types.

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Full
from threading import get_native_id
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import binding
from numba import types
from numpy.typing import NDArray
from torch import Tensor

from fastsiam.config import AugmentConfig
from fastsiam.errors import DataError
from fastsiam.kernels.jit import compiled
from fastsiam.kernels.threads import now, run_all, take
from fastsiam.trace import note_stages, span
from fastsiam.views.batch import TwoViewBatch, to_device
from fastsiam.views.draws import ViewParams, draw_views
from fastsiam.views.photometric import photometric
from fastsiam.views.photometric.cpu import Stage, finish

from .geometric import Cuts, cut_centres, cut_views
from .geometric.cpu import Scratch, crop, crop_images, in_arrays
from .order import Order
from .store import Store
from .store.beton import RAW, BetonStore
from .workers import count, made_ahead

_threads = torch.get_num_threads(), numba.get_num_threads()

import ffcv._libffcv  # noqa: E402
from ffcv.fields.rgb_image import SimpleRGBImageDecoder  # noqa: E402
from ffcv.loader import Loader as FfcvOwnLoader  # noqa: E402
from ffcv.loader import OrderOption, epoch_iterator  # noqa: E402
from ffcv.loader.epoch_iterator import EpochIterator  # noqa: E402
from ffcv.memory_managers.os_cache import OSCacheManager  # noqa: E402
from ffcv.pipeline.compiler import Compiler  # noqa: E402
from ffcv.pipeline.state import State  # noqa: E402

torch.set_num_threads(_threads[0])  # to import FFCV makes it one, for the whole process
numba.set_num_threads(_threads[1])
epoch_iterator.IS_CUDA = False  # it would make new streams for every epoch; we copy ourselves

_STAGES = "decode", "crop", "photometric"
_SECONDS_BETWEEN_LOOKS = 1.0  # at whether the loader thread still lives
_DECODED, _REFUSED = 0, 1
_PIXEL_FORMAT_RGB, _ACCURATE_DCT = 0, 4096  # TJPF_RGB, TJFLAG_ACCURATEDCT: what PIL does


class FfcvLoader:
    """Two-view batches by FFCV's loader; see ``fastsiam.views.batch.Loader``.

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
        assert isinstance(store, BetonStore)
        self.source, self.images, self.steps = str(store), order.images, order.steps
        self._store, self._order, self._augment = store, order, augment
        self._device, self._dtype = device, dtype
        self._operation = TwoCrops(store, augment.crop, max(1, count(workers)))
        batch = order.batch // order.world
        self._loader = _open(store, self._operation, batch, prefetch, os_cache)
        self._slots = self._make_slots(batch, prefetch + 2)
        self._epoch: _Epoch | None = None
        self._closed = False
        atexit.register(_close_at_exit, weakref.ref(self))

    def crops(
        self, number: int, *, skip: int = 0
    ) -> Iterator[tuple[NDArray[np.int64], ViewParams, Tensor]]:
        """Yield what ``epoch`` makes its batches of; see ``fastsiam.views.batch.CropLoader``."""
        for made in self._batches(number, skip, finished=False):
            yield made.index, made.params, made.crops

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[TwoViewBatch]:
        """Yield the batches of an epoch from step ``skip`` on; one epoch at a time."""
        for made in self._batches(number, skip, finished=self._device.type == "cpu"):
            view1, view2 = made.views or photometric(
                made.crops, made.params, self._augment, dtype=self._dtype
            )
            label = to_device(self._store.labels[made.index], self._device)
            yield TwoViewBatch(view1, view2, to_device(made.index, self._device), label)

    def _batches(self, number: int, skip: int, *, finished: bool) -> Iterator[_Made]:
        if self._closed:
            raise RuntimeError("this loader is closed")
        self._leave()
        order, dtype = self._order, self._dtype if finished else None
        steps = [order.indices(number, step) for step in range(skip, order.steps)]
        if not steps:
            return
        epoch = self._epoch = _Epoch(
            self._loader,
            self._store,
            self._augment,
            self._slots,
            order.seed,
            number,
            steps,
            self._device,
            dtype,
        )
        try:
            yield from epoch
        finally:
            epoch.leave()
        if epoch is not self._epoch and not self._closed:
            raise RuntimeError("another epoch of this loader was begun; it makes one at a time")

    def _make_slots(self, batch: int, slots: int) -> list[torch.cuda.Stream | None]:
        """Give FFCV the buffers that it would allocate, and pin, for every epoch anew.

        Returns:
            For each slot of them the stream that copies it to the device, None on a CPU.
        """
        side, gpu = self._augment.crop, self._device.type == "cuda"
        shape = (slots, batch, 2, side, side, 3)
        crops = torch.empty(shape, dtype=torch.uint8, pin_memory=gpu).numpy()
        (node,) = self._loader.graph.root_nodes
        buffers = {node.id: (crops, np.empty((slots, batch, 1), np.uint8))}
        memory = {"operation": buffers, "shared": {node.id: None}}
        self._loader.graph.allocate_memory = lambda *_: memory
        return [torch.cuda.Stream(self._device) if gpu else None for _ in range(slots)]

    def close(self) -> None:
        """End the threads and free the buffers."""
        if not self._closed:
            self._closed = True
            self._leave()
            for stream in self._slots:
                if stream is not None:
                    stream.synchronize()  # a copy may still read the buffers
            self._operation.close()
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

    It sets torch's and numba's numbers of threads. It compiles, with every loader, a reader of its
    own, for which it declares numba's type of all byte arrays read-only: whatever was compiled for
    such arrays before cannot be called any more.
    """
    threads = torch.get_num_threads(), numba.get_num_threads()
    compiling, reader = Compiler.is_enabled, OSCacheManager.compile_reader
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
        torch.set_num_threads(threads[0])
        numba.set_num_threads(threads[1])


@dataclass(frozen=True, slots=True)
class _Made:
    """A batch that FFCV's thread made."""

    index: NDArray[np.int64]
    params: ViewParams
    crops: Tensor
    views: tuple[Tensor, Tensor] | None
    """Where the thread took them through the photometric stage too."""
    copied: torch.cuda.Event | None
    """When the crops are on the device."""


class _Epoch(EpochIterator):
    """One epoch in FFCV's thread; iterating over it yields its batches.

    An error in FFCV's own thread ends that thread, and whoever waits for a batch waits for ever:
    here it comes out where the batch is waited for.

    Args:
        loader: FFCV's.
        store: the images.
        augment: what becomes of them.
        slots: the stream of each of the buffers that rotate, None on a CPU.
        seed: the run's.
        number: of the epoch.
        steps: the images of each batch.
        device: where the crops shall lie.
        dtype: of views, if this thread shall make them, on a CPU: there, one thread that takes an
            image all the way finds it in its own cache.
    """

    def __init__(
        self,
        loader: FfcvOwnLoader,
        store: BetonStore,
        augment: AugmentConfig,
        slots: Sequence[torch.cuda.Stream | None],
        seed: int,
        number: int,
        steps: Sequence[NDArray[np.int64]],
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> None:
        self._store, self._augment, self._device, self._dtype = store, augment, device, dtype
        self._slots, self._seed, self._number, self._left = slots, seed, number, False
        super().__init__(loader, np.concatenate(steps))

    def run(self) -> None:
        """Make the batches; FFCV's own loop, but for errors and for threads that are not FFCV's."""
        try:
            for number, indices in enumerate(self.iter_ixes):
                slot = number % len(self._slots)
                if not self._put(self._make(number, indices, slot)):
                    return
            self._put(None)
        except BaseException as error:
            self._put(error)

    def __iter__(self) -> Iterator[_Made]:
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
            if made.copied is not None:
                stream = torch.cuda.current_stream(self._device)
                stream.wait_event(made.copied)
                made.crops.record_stream(stream)
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

    def _make(self, number: int, index: NDArray[np.int64], slot: int) -> _Made:
        store, side = self._store, self._augment.crop
        stream = self._slots[slot]
        if stream is not None:
            stream.synchronize()  # the copy out of this slot's buffer, some batches ago
        size = np.stack([store.height[index], store.width[index]], axis=1).astype(np.int64)
        params = draw_views(
            self._augment, seed=self._seed, epoch=self._number, index=index, size=size
        )
        cuts = cut_views(params, side)
        stage = Stage(params, self._augment, side, side, self._dtype) if self._dtype else None
        self.storage_state = _Batch(*self._memory(index), index, cuts, stage)
        ((crops, status),) = self.run_pipeline(number, index, slot, None)
        crops = torch.from_numpy(crops)
        views = stage.views() if stage else None
        for row in np.flatnonzero(status != _DECODED):
            own = slice(row, row + 1)
            crops[:, own] = _crop_by_pil(store, int(index[row]), cuts.rows(own), side)
            if views and self._dtype:
                finished = photometric(
                    crops[:, own], params.rows(own), self._augment, dtype=self._dtype
                )
                for view, own_view in zip(views, finished, strict=True):
                    view[own] = own_view
        if stream is None:
            return _Made(index, params, crops, views, None)
        with span("copy"), torch.cuda.stream(stream):
            crops = crops.to(self._device, non_blocking=True)
        return _Made(index, params, crops, None, stream.record_event())

    def _memory(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return FFCV's memory and where the records lie in it: the file, or pages of it."""
        memory, *rest = self.memory_context.state
        start = self._store.start[indices]
        if memory.ndim == 1:
            return memory, start
        page_size = memory.shape[1]
        slot = rest[-1][start // page_size].astype(np.int64)
        return memory.reshape(-1), slot * page_size + start % page_size


@dataclass(frozen=True, slots=True)
class _Batch:
    """What the operation needs to know of a batch, in the place of FFCV's state of its storage."""

    source: NDArray[np.uint8]
    """The memory that holds the records."""
    start: NDArray[np.int64]
    """(N,) where each begins in it."""
    indices: NDArray[np.int64]
    cuts: Cuts
    stage: Stage | None
    """Where the views go, if they shall be made too."""


class TwoCrops(SimpleRGBImageDecoder):
    """FFCV operation: decode an image once, make both crops, in threads.

    FFCV takes an operation for an image field's decoder if it descends from the simple one.

    Its output is a pair of arrays: crops (2, N, side, side, 3) uint8, and what became of each image
    (N,) uint8.
    """

    def __init__(self, store: BetonStore, side: int, workers: int) -> None:
        super().__init__()
        self._side, self._cutter = side, _Cutter(store, side, workers)

    def declare_state_and_memory(self, previous_state: State) -> tuple[State, None]:
        """Say what comes out; the buffers are the loader's, for all epochs."""
        shape = (2, self._side, self._side, 3)
        return State(True, previous_state.device, shape, np.dtype("u1")), None

    def generate_code(self) -> Any:
        """Return the function that FFCV calls for each batch."""

        def two_crops(indices: Any, memory: Any, metadata: Any, batch: _Batch) -> Any:
            crops, status = memory
            crops = crops.reshape(2, len(indices), self._side, self._side, 3)
            self._cutter.cut(batch, crops, status[:, 0])
            return crops, status[:, 0]

        return two_crops

    def close(self) -> None:
        """End the threads."""
        self._cutter.close()


class _Cutter:
    """Threads that decode a file's images and cut crops out of them.

    Args:
        store: the file.
        side: of the crops.
        workers: how many threads.
        shrink: ``Cuts.shrink``, at most; by default, that of a whole image which becomes a crop.
    """

    def __init__(
        self, store: BetonStore, side: int, workers: int, *, shrink: float | None = None
    ) -> None:
        self._store, self._side = store, side
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="fastsiam-ffcv")
        height, width = int(store.height.max()), int(store.width.max())
        largest = int((store.height.astype(np.int64) * store.width).max())
        self._threads = [
            (Decompressor(largest), Scratch(height, width, side, shrink=shrink).arrays)
            for _ in range(workers)
        ]

    def cut(self, batch: _Batch, crops: NDArray[np.uint8], status: NDArray[np.uint8]) -> None:
        """Make a batch's crops (V, N, side, side, 3), and say what became of each image (N,)."""
        store, indices, stage = self._store, batch.indices, batch.stage
        length, crops = store.bytes[indices], crops.reshape(*crops.shape[:2], -1)
        images = (
            batch.source,
            batch.start,
            length,
            store.height[indices],
            store.width[indices],
            store.modes[indices] == RAW,
            in_arrays(batch.cuts),
            np.argsort(-length),  # those that take long first: no thread is left with one
            np.zeros(1, np.int64),  # how many of them were taken
            np.zeros((len(indices), len(_STAGES) + 1), np.int64),  # when each stage began
            np.zeros(len(indices), np.int64),  # and which thread it was
        )

        def work(decompressor: Decompressor, scratch: Any) -> None:
            own = (decompressor.handle, decompressor.pixels, scratch, get_native_id())
            if stage is None:
                _crops(images, own, self._side, crops, status)
            else:
                views = (stage.tables, stage.scratch(), stage.out)
                _two_views(images, own, self._side, crops, status, views)

        run_all([self._pool.submit(work, *own) for own in self._threads])
        note_stages(_STAGES, *images[-2:])

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _crop_by_pil(store: BetonStore, index: int, cuts: Cuts, side: int) -> Tensor:
    """Make the crops (V, 1, S, S, 3) of an image that libjpeg-turbo refused or had doubts about.

    Raises:
        DataError: PIL cannot decode it either, or it is not of the size that the file states.
    """
    image = np.asarray(store.decode(index))
    if image.shape[:2] != (store.height[index], store.width[index]):
        raise store.cannot_decode(index, "it is not as large as the file says")
    crops = torch.empty((len(cuts.box), 1, side, side, 3), dtype=torch.uint8)
    crop_images([image], cuts, crops)
    return crops


def central_crops(
    store: BetonStore,
    batches: Sequence[NDArray[np.int64]],
    *,
    resize: int,
    side: int,
    workers: int,
    prefetch: int,
    device: torch.device,
) -> Iterator[Tensor]:
    """Yield batches of central crops; see ``fastsiam.pipelines.evaluation.Crops``.

    Args:
        store: a .beton file.
        batches: the images of each.
        resize: shorter side before the crop is taken.
        side: of the crops.
        workers: threads that decode and crop; -1 is one for each core of this rank.
        prefetch: batches that are made ahead.
        device: where they will go; the crops lie in memory from which a GPU can copy them.
    """
    size = np.stack([store.height, store.width], axis=1).astype(np.int64)
    shrink = cut_centres(size[np.concatenate(batches)], resize=resize, side=side).shrink
    cutter = _Cutter(store, side, max(1, count(workers)), shrink=shrink)

    def make(indices: NDArray[np.int64]) -> Tensor:
        cuts = cut_centres(size[indices], resize=resize, side=side)
        shape, pinned = (1, len(indices), side, side, 3), device.type == "cuda"
        crops = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
        status = np.empty(len(indices), np.uint8)
        batch = _Batch(store.memory, store.start[indices], indices, cuts, None)
        cutter.cut(batch, crops.numpy(), status)
        for row in np.flatnonzero(status != _DECODED):
            own = slice(row, row + 1)
            crops[:, own] = _crop_by_pil(store, int(indices[row]), cuts.rows(own), side)
        return crops[0]

    with contextlib.closing(cutter):
        yield from made_ahead(make, batches, count=prefetch)


class Decompressor:
    """One thread's libjpeg-turbo, with room for images of up to so many pixels."""

    def __init__(self, largest: int) -> None:
        self.handle = _new_decompressor()
        if not self.handle:
            raise MemoryError("libjpeg-turbo found no memory for a decompressor")
        self.pixels = np.empty(3 * largest, np.uint8)
        weakref.finalize(self, _end_decompressor, self.handle)

    def decode(self, store: BetonStore, index: int) -> bool:
        """Decode an image of a store into ``pixels``; false if libjpeg-turbo has doubts."""
        data = np.frombuffer(store.read(index), np.uint8)
        width, height = int(store.width[index]), int(store.height[index])
        return bool(_decode(self.handle, data, width, height, self.pixels))


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


@compiled
def _new_decompressor():
    return _tj_init()


@compiled
def _end_decompressor(handle):
    return _tj_destroy(np.uintp(handle))


@compiled
def _crops(images, own, side, crops, status):
    """Take one image after the other, as long as there are any, and make its crops."""
    while _crop_next(images, own, side, crops, status) >= 0:
        pass


@compiled
def _two_views(images, own, side, crops, status, views):
    """Do the same, and take the crops through the photometric stage."""
    tables, scratch, out = views
    while True:
        row = _crop_next(images, own, side, crops, status)
        if row < 0:
            return
        if status[row] == _DECODED:
            for view in range(2):
                place = view * len(status) + row
                finish(crops[view, row], place, tables, side, scratch, out[place])
            images[-2][row, 3] = now()


@compiled
def _crop_next(images, own, side, crops, status):
    """Make the crops of the next image; return its row, or -1 if there was none left."""
    source, start, length, height, width, raw, cuts, turns, counter, times, threads = images
    handle, pixels, scratch, thread = own
    turn = take(counter.ctypes.data)  # type: ignore[call-arg, var-annotated]
    if turn >= len(turns):
        return -1
    row = turns[turn]
    times[row, 0], threads[row] = now(), thread
    tall, wide = np.int64(height[row]), np.int64(width[row])
    data = source[start[row] : start[row] + length[row]]
    image = data if raw[row] else pixels[: 3 * tall * wide]
    if raw[row] or _decode(handle, data, wide, tall, pixels):
        status[row] = _DECODED
        times[row, 1] = now()
        crop(image, wide, cuts, row, side, crops, scratch)
        times[row, 2] = now()
    else:
        status[row] = _REFUSED
    return row


@compiled
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
