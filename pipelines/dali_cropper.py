"""Runs batches of images through DALI; Pillow decodes the images that DALI refuses."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from nvidia.dali import backend
from torch.utils.dlpack import from_dlpack

from fastsiam.config import DataConfig
from fastsiam.errors import DataError, ImageError
from fastsiam.trace import span
from fastsiam.views.batch import Crops, Shape

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

Result = TypeVar("Result")

Cut = Callable[[int, NDArray[np.int64]], tuple[tuple[Cuts, ...], Any]]
"""Returns the cuts of each side for the batch of a number, from 0, whose images have the sizes
(N, 2); and anything that is to be yielded with its crops."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch that was read, and that DALI may be working on."""

    number: int
    """Of the batch, from 0."""
    index: NDArray[np.int64]
    """(N,) positions of its images in the store."""
    encoded: list[NDArray[np.uint8]]
    cuts: tuple[Cuts, ...]
    """Empty if DALI only decodes."""
    extra: Any
    """What ``Cut`` returned with the cuts."""


class Cropper:
    """DALI's graph, the threads that read for it, and the batches in flight.

    It yields crops on a GPU, or decoded images on a CPU. End or close a generator before the next
    one is begun. Generators raise a DataError if an image cannot be read or decoded, whose message
    names it, and a RuntimeError if CUDA fails or DALI runs out of memory.

    Args:
        data: number of threads, batches to prepare ahead, and load of the GPU's JPEG engine.
        store: the images.
        shapes: shape (V, N, S, S, 3) of a batch's crops, for each side; the last batch may have
            fewer images.
        device: device of the crops.
        dali_resizes: whether DALI crops and resizes too, or only decodes.
    """

    def __init__(
        self,
        data: DataConfig,
        store: Store,
        shapes: Sequence[Shape],
        *,
        device: torch.device,
        dali_resizes: bool,
    ) -> None:
        self._store, self._shapes, self._device = store, shapes, device
        self._threads = max(1, count(data.workers))
        self._hw_decoder_load = data.dali_hw_decoder_load
        # If DALI only decodes, the engine crops one of the batches.
        self._prefetch = data.prefetch if dali_resizes else max(1, data.prefetch - 1)
        self._dali_resizes, self._warned = dali_resizes, False
        assert self._dali_resizes or device.type == "cpu"
        self._dimensions = store.dimensions()
        self._readers = ThreadPoolExecutor(self._threads, "fastsiam-reader")
        self._dali: Any = None
        self._is_idle = False
        self._build()

    def crops(
        self, indices: Iterable[NDArray[np.int64]], cut: Cut
    ) -> Generator[tuple[NDArray[np.int64], Any, Crops]]:
        """Yield each batch's positions, what ``cut`` added, and crops; the next overwrite them.

        Args:
            indices: positions of each batch's images.
            cut: returns the cuts of a batch.
        """
        assert self._dali_resizes
        crops = [torch.empty(own, dtype=torch.uint8, device=self._device) for own in self._shapes]

        def copied(batch: _Batch, outputs: Any) -> tuple[NDArray[np.int64], Any, Crops]:
            sides = tuple(own[:, : len(batch.index)] for own in crops)
            # Shared without a copy. When torch releases the memory, a thread of DALI waits for the
            # device before DALI reuses it.
            views = (from_dlpack(view.as_tensor()) for view in outputs)
            for own in sides:
                torch.stack(list(islice(views, len(own))), out=own)
            return batch.index, batch.extra, sides

        return self._run(indices, cut, copied)

    def decoded(self, indices: Iterable[NDArray[np.int64]]) -> Generator[Images]:
        """Yield each batch's images, in memory of DALI's that is theirs while they live.

        Args:
            indices: positions of each batch's images.
        """
        assert not self._dali_resizes

        def images(batch: _Batch, outputs: Any) -> Images:
            rows = range(len(batch.index))  # DALI's ``at`` would copy
            return Images.of_arrays([np.asarray(outputs[0][row]) for row in rows], owner=outputs)

        return self._run(indices, None, images)

    def _run(
        self,
        indices: Iterable[NDArray[np.int64]],
        cut: Cut | None,
        finish: Callable[[_Batch, Any], Result],
    ) -> Generator[Result]:
        """Yield what ``finish`` makes of each batch and DALI's outputs, in order."""
        if not self._is_idle:
            self._build()
        self._is_idle = False
        flight, failed = deque[_Batch](), list[DataError]()
        ahead = self._prefetch + 1
        batches = made_ahead(
            partial(self._read, cut), enumerate(indices), count=ahead, threads=ahead
        )

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
                outputs = self._outputs(flight, cut)
                result = finish(flight.popleft(), outputs)
                fill()
                try:
                    yield result
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

    def _read(
        self, cut: Cut | None, task: tuple[int, NDArray[np.int64]], *, by_pil: bool = False
    ) -> _Batch:
        """Read the images of a batch, given its number and positions, and compute its cuts."""

        def read(images: list[int]) -> list[tuple[NDArray[np.uint8], int, int]]:
            with span("read"):
                return [self._by_pil(i) if by_pil else self._encoded(i) for i in images]

        number, index = task
        self._store.ahead(index.tolist())
        parts = [index[i : i + _PART].tolist() for i in range(0, len(index), _PART)]
        found = [image for part in self._readers.map(read, parts) for image in part]
        encoded, size = [data for data, *_ in found], np.array([size for _, *size in found])
        cuts, extra = cut(number, size) if cut else ((), None)
        return _Batch(number, index, encoded, cuts, extra)

    def _encoded(self, index: int) -> tuple[NDArray[np.uint8], int, int]:
        """Return bytes that DALI decodes to Pillow's pixels, and the height and width."""
        data = self._store.read(index)
        try:
            head = self._store.header(index, data)
        except ImageError:  # Pillow may read headers that ``probe`` refuses
            return self._by_pil(index)
        rules = self._store.rules_of(index)
        height, width = rules.size(head)
        if self._dimensions is not None and (height, width) != tuple(self._dimensions[index]):
            return self._by_pil(index)  # it may refuse the image for that
        if self._store.raw_size(index) is not None:
            return _ppm(data, height, width), height, width
        # Pillow refuses truncated or damaged images; DALI's decoders may fill in pixels.
        odd = rules.needs_pillow(head) or width * height > MOST_PIXELS
        if not odd and is_all_code(data, head):
            return np.frombuffer(data, np.uint8), height, width
        return self._by_pil(index)

    def _by_pil(self, index: int) -> tuple[NDArray[np.uint8], int, int]:
        image = self._store.decode(index)
        return _ppm(image.tobytes(), image.height, image.width), image.height, image.width

    def _send(self, batch: _Batch) -> None:
        """Send a batch to DALI."""
        self._dali.feed_input("encoded", batch.encoded)
        if batch.cuts:
            for name, data in cut_arguments(batch.cuts, self._shapes).items():
                self._dali.feed_input(name, data)
        self._dali.schedule_run()

    def _outputs(self, flight: deque[_Batch], cut: Cut | None) -> Any:
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
        flight[0] = self._read(cut, (flight[0].number, flight[0].index), by_pil=True)
        for batch in flight:
            self._send(batch)
        return self._dali.outputs(cuda_stream=stream)


def _ppm(pixels: Bytes, height: int, width: int) -> NDArray[np.uint8]:
    """Encode pixels as PPM, which DALI decodes without loss."""
    return np.frombuffer(b"".join((b"P6 %d %d 255\n" % (width, height), pixels)), np.uint8)


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
