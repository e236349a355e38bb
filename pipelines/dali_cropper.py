"""Runs batches of images through DALI; Pillow decodes the images that DALI refuses."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from nvidia.dali import backend
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from fastsiam.errors import DataError, ImageError
from fastsiam.trace import span
from fastsiam.views.batch import Shape

from .cuts import Cuts
from .dali_graph import build_graph, cut_arguments, refuses_an_image
from .job import Images
from .store import Store
from .store.decode import MOST_PIXELS
from .store.probe import Bytes, is_all_code
from .workers import count, made_ahead

log = logging.getLogger(__name__)

_PART = 16
"""Images that a reader thread reads per call."""

Plan = TypeVar("Plan")
"""Data of the caller that is yielded with the crops of its task."""
Make = Callable[[NDArray[np.int64], Images, Plan], tuple[Tensor, ...]]
"""Returns the crops or views of decoded images, given their positions in the store."""


@dataclass(frozen=True, slots=True)
class Task(Generic[Plan]):
    """A batch that the cropper is asked for."""

    index: NDArray[np.int64]
    """(N,) positions of its images in the store."""
    cut: Callable[[NDArray[np.int64]], tuple[tuple[Cuts, ...], Plan]]
    """Returns the cuts of each side, and the plan, for images of the sizes (N, 2)."""


@dataclass(frozen=True, slots=True)
class _Batch(Generic[Plan]):
    """A batch that was read, and that DALI may be working on."""

    task: Task[Plan]
    cuts: tuple[Cuts, ...]
    plan: Plan
    encoded: list[NDArray[np.uint8]]


class Cropper:
    """DALI's graph, the threads that read for it, and the batches in flight.

    Args:
        store: the images.
        shapes: shape (V, N, S, S, 3) of a batch's crops, for each side; the last batch may have
            fewer images.
        workers: as for ``DaliLoader``, as are the other arguments.
        device: device of the crops.
        prefetch: batches in flight while the caller works on one.
        hw_decoder_load: share of the images that is decoded by the GPU's JPEG engine.
        dali_resizes: whether DALI crops and resizes too, or only decodes.
    """

    def __init__(
        self,
        store: Store,
        shapes: Sequence[Shape],
        *,
        workers: int | str,
        device: torch.device,
        prefetch: int,
        hw_decoder_load: float,
        dali_resizes: bool,
    ) -> None:
        self._store, self._shapes, self._device, self._prefetch = store, shapes, device, prefetch
        self._threads, self._hw_decoder_load = max(1, count(workers)), hw_decoder_load
        self._dali_resizes, self._warned = dali_resizes, False
        assert self._dali_resizes or device.type == "cpu"
        self._dimensions = store.dimensions()
        self._readers = ThreadPoolExecutor(self._threads, "fastsiam-reader")
        self._dali: Any = None
        self._is_idle = False
        self._build()

    def run(
        self, tasks: Iterable[Task[Plan]], make: Make[Plan] | None = None
    ) -> Generator[tuple[NDArray[np.int64], Plan, tuple[Tensor, ...]]]:
        """Yield the index, the plan and the crops of each task; the next crops overwrite them.

        End or close a generator before the next one is begun.

        Args:
            tasks: the batches, in order.
            make: returns the crops of decoded images; required if DALI only decodes.

        Raises:
            DataError: an image cannot be read or decoded; the message names it.
            RuntimeError: CUDA fails, or DALI runs out of memory.
        """
        assert (make is None) == self._dali_resizes
        if not self._is_idle:
            self._build()
        self._is_idle = False
        shapes = self._shapes if make is None else ()
        crops = [torch.empty(shape, dtype=torch.uint8, device=self._device) for shape in shapes]
        flight, failed = deque[_Batch[Plan]](), list[DataError]()
        ahead = self._prefetch + 1
        batches = made_ahead(self._read, tasks, count=ahead, threads=ahead)

        def fill() -> None:
            """Have ``prefetch`` batches in flight; keep the error of one that cannot be read."""
            while len(flight) < self._prefetch and not failed:
                try:
                    read = next(batches, None)
                except DataError as error:
                    failed.append(error)
                    return
                if read is None:
                    return
                self._send(read)
                flight.append(read)

        with contextlib.closing(batches):
            fill()
            while flight:
                found = self._outputs(flight)
                batch = flight.popleft()
                made = self._crops(batch, found, crops, make)
                fill()
                try:
                    yield batch.task.index, batch.plan, made
                except GeneratorExit:
                    self._drop(len(flight))
                    raise
        if failed:
            raise failed[0]
        self._is_idle = True

    def close(self) -> None:
        """End all threads and free the memory."""
        self._dali, self._is_idle = None, False
        self._readers.shutdown(cancel_futures=True)
        backend.ReleaseUnusedMemory()  # type: ignore[attr-defined]

    def _build(self) -> None:
        """Build DALI's graph; again after an error, which may have left batches in it."""
        self._dali = build_graph(
            self._shapes,
            threads=self._threads,
            device=_number(self._device) if self._device.type == "cuda" else None,
            hw_decoder_load=self._hw_decoder_load,
            resizes=self._dali_resizes,
        )
        self._is_idle = True

    def _drop(self, batches: int) -> None:
        """Wait for the batches that an abandoned run left in flight, so that the graph stays."""
        with contextlib.suppress(RuntimeError):
            for _ in range(batches):
                self._dali.outputs()
            self._is_idle = True

    def _read(self, task: Task[Plan], *, by_pil: bool = False) -> _Batch[Plan]:
        """Read the images of a batch and compute its cuts."""

        def read(images: list[int]) -> list[tuple[NDArray[np.uint8], int, int]]:
            with span("read"):
                return [self._by_pil(i) if by_pil else self._encoded(i) for i in images]

        index = task.index
        self._store.ahead(index.tolist())
        parts = [index[i : i + _PART].tolist() for i in range(0, len(index), _PART)]
        found = [image for part in self._readers.map(read, parts) for image in part]
        cuts, plan = task.cut(np.array([(height, width) for _, height, width in found]))
        return _Batch(task, cuts, plan, [data for data, _, _ in found])

    def _encoded(self, index: int) -> tuple[NDArray[np.uint8], int, int]:
        """Return bytes that DALI decodes to Pillow's pixels, and the height and width."""
        data = self._store.read(index)
        try:
            head = self._store.header(index, data)
        except ImageError:  # Pillow may read headers that ``probe`` refuses
            return self._by_pil(index)
        height, width = self._store.rules.size(head)
        if self._dimensions is not None and (height, width) != tuple(self._dimensions[index]):
            return self._by_pil(index)  # it may refuse the image for that
        if self._store.raw_size(index) is not None:
            return _ppm(data, height, width), height, width
        # Pillow refuses truncated or damaged images; DALI's decoders may fill in pixels.
        odd = self._store.rules.needs_pillow(head) or width * height > MOST_PIXELS
        if not odd and is_all_code(data, head):
            return np.frombuffer(data, np.uint8), height, width
        return self._by_pil(index)

    def _by_pil(self, index: int) -> tuple[NDArray[np.uint8], int, int]:
        image = self._store.decode(index)
        return _ppm(image.tobytes(), image.height, image.width), image.height, image.width

    def _send(self, batch: _Batch[Plan]) -> None:
        """Send a batch to DALI."""
        self._dali.feed_input("encoded", batch.encoded)
        if self._dali_resizes:
            for name, data in cut_arguments(batch.cuts, self._shapes).items():
                self._dali.feed_input(name, data)
        self._dali.schedule_run()

    def _outputs(self, flight: deque[_Batch[Plan]]) -> Any:
        """Wait for what DALI makes of the first batch in flight.

        DALI does not report which image it refuses. If it does, Pillow decodes the batch, and all
        batches are sent again.

        Raises:
            DataError: Pillow cannot decode one of the images either.
        """
        gpu = self._device.type == "cuda"
        stream = torch.cuda.current_stream(self._device) if gpu else None
        try:
            with span("decode"):
                return self._dali.outputs(cuda_stream=stream)
        except RuntimeError as error:
            if not refuses_an_image(error):
                raise
            if not self._warned:
                self._warned = True
                log.warning(
                    "DALI cannot decode an image, but PIL may: such batches are decoded by PIL, "
                    "which is slower"
                )
        self._build()
        self._is_idle = False
        flight[0] = self._read(flight[0].task, by_pil=True)
        for batch in flight:
            self._send(batch)
        return self._dali.outputs(cuda_stream=stream)

    def _crops(
        self,
        batch: _Batch[Plan],
        found: Any,
        crops: Sequence[Tensor],
        make: Make[Plan] | None,
    ) -> tuple[Tensor, ...]:
        """Return a batch's crops, or what ``make`` returns for its decoded images.

        Args:
            batch: the batch.
            found: DALI's views of each side, or its decoded images.
            crops: output, for each side.
            make: as for ``run``.
        """
        if make is None:
            sides = tuple(own[:, : len(batch.encoded)] for own in crops)
            # Shared without a copy. When torch releases the memory, a thread of DALI waits for the
            # device before DALI reuses it.
            views = (from_dlpack(view.as_tensor()) for view in found)
            for own in sides:
                torch.stack(list(islice(views, len(own))), out=own)
            return sides
        # Views of DALI's memory, valid while ``found`` lives; DALI's ``at`` would copy.
        decoded = [np.asarray(found[0][row]) for row in range(len(batch.encoded))]
        return make(batch.task.index, Images.of_arrays(decoded), batch.plan)


def _ppm(pixels: Bytes, height: int, width: int) -> NDArray[np.uint8]:
    """Encode pixels as PPM, which DALI decodes without loss."""
    return np.frombuffer(b"".join((b"P6 %d %d 255\n" % (width, height), pixels)), np.uint8)


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
