"""Runs batches of images through DALI; Pillow decodes the images that DALI refuses."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from fastsiam.errors import BackendError, DataError, ImageError
from fastsiam.trace import span
from fastsiam.views.batch import Shape

from .dali_graph import (
    build_graph,
    cut_arguments,
    no_memory,
    reason,
    refuses_an_image,
    say_what_decodes,
)
from .job import Cuts, Images
from .store import Store
from .store.decode import MOST_PIXELS
from .store.probe import Bytes, is_all_code
from .survey import decoded_bytes
from .workers import count, made_ahead

log = logging.getLogger(__name__)

_PART = 16
"""Images that a reader thread reads per call."""
_DECODED_AHEAD = 2**30
"""Bytes of decoded images on a CPU above which no further batch is started."""

Plan = TypeVar("Plan")
"""Data of the caller that is yielded with the crops of its task."""
Make = Callable[[NDArray[np.int64], Images, Plan], tuple[Tensor, ...]]
"""Returns the crops or views of decoded images, given their positions in the store."""


@dataclass(frozen=True, slots=True)
class Task(Generic[Plan]):
    """A batch that the cropper is asked for."""

    name: str
    """Name of the batch, for messages."""
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
    decoded: int
    """Bytes of the decoded images if DALI only decodes; else 0."""
    by_pil: bool
    """Whether Pillow decoded all of its images."""


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
        self._dali_resizes = dali_resizes
        assert self._dali_resizes or device.type == "cpu"
        self._warned = False
        self._dimensions = store.dimensions()
        if not self._dali_resizes:
            taken, _ = decoded_bytes(store)
            if shapes[0][1] * taken > len(store) * _DECODED_AHEAD:
                # DALI's pool never shrinks, and grows with each batch that is larger than the last.
                os.environ.setdefault("DALI_MALLOC_POOL_THRESHOLD", "0")
        self._dali: Any = None
        """DALI's graph; None if it must be built again."""
        self._build()
        if device.type == "cuda":
            say_what_decodes(_number(device), hw_decoder_load)
        self._readers = ThreadPoolExecutor(self._threads, "fastsiam-reader")

    def run(
        self, tasks: Iterator[Task[Plan]], make: Make[Plan] | None = None
    ) -> Generator[tuple[NDArray[np.int64], Plan, tuple[Tensor, ...]]]:
        """Yield the index, the plan and the crops of each task; the next crops overwrite them.

        End or close a generator before the next one is begun.

        Args:
            tasks: the batches, in order.
            make: returns the crops of decoded images; required if DALI only decodes.

        Raises:
            BackendError: DALI runs out of memory.
            DataError: an image cannot be read or decoded; the message names it.
            RuntimeError: CUDA fails.
        """
        self._land()
        if self._dali is None:
            self._build()
        assert (make is None) == self._dali_resizes
        shapes = self._shapes if make is None else ()
        crops = [torch.empty(shape, dtype=torch.uint8, device=self._device) for shape in shapes]
        flight: deque[_Batch[Plan]] = deque()
        ahead = self._prefetch + 1
        batches = made_ahead(self._read, tasks, count=ahead, threads=ahead)
        with contextlib.closing(batches):
            failed = self._fill(flight, batches)
            while flight:
                batch, made = self._receive(flight, crops, make)
                failed = failed or self._fill(flight, batches)
                yield batch.task.index, batch.plan, made
        if failed:
            raise failed

    def close(self) -> None:
        """End all threads and free the memory."""
        self._land()
        self._dali = None
        self._readers.shutdown(cancel_futures=True)
        backend: Any = import_module("nvidia.dali.backend")
        backend.ReleaseUnusedMemory()

    def _build(self) -> None:
        """Build DALI's graph."""
        gpu = self._device.type == "cuda"
        with self._calling("the start"):
            self._dali = build_graph(
                self._shapes,
                threads=self._threads,
                device=_number(self._device) if gpu else None,
                hw_decoder_load=self._hw_decoder_load,
                resizes=self._dali_resizes,
            )

    @contextlib.contextmanager
    def _calling(self, where: str) -> Iterator[None]:
        """Guard a call of DALI: after an error or Ctrl-C, the graph is built again.

        A graph that got only some of its inputs would combine images with others' boxes.

        Args:
            where: name of the batch, for messages.

        Raises:
            BackendError: DALI runs out of memory.
        """
        try:
            yield
        except BaseException as error:
            self._dali = None
            if isinstance(error, RuntimeError):
                line = no_memory(error, where, gpu=self._device.type == "cuda")
                if line is not None:
                    raise BackendError(line) from error
            raise

    def _read(self, task: Task[Plan], *, by_pil: bool = False) -> _Batch[Plan] | DataError:
        """Read the images of a batch and compute its cuts.

        An error is returned, and raised after the batches before it were yielded.
        """

        def read(images: list[int]) -> list[tuple[NDArray[np.uint8], int, int]]:
            with span("read"):
                return [self._encoded(i, by_pil) for i in images]

        index = task.index
        self._store.ahead(index.tolist())
        parts = [index[i : i + _PART].tolist() for i in range(0, len(index), _PART)]
        try:
            found = [image for part in self._readers.map(read, parts) for image in part]
        except DataError as error:
            return error
        size = np.array([(height, width) for _, height, width in found])
        cuts, plan = task.cut(size)
        decoded = 0 if self._dali_resizes else 3 * int(size.prod(1).sum())
        return _Batch(task, cuts, plan, [data for data, _, _ in found], decoded, by_pil)

    def _encoded(self, index: int, by_pil: bool) -> tuple[NDArray[np.uint8], int, int]:
        """Return bytes that DALI decodes to Pillow's pixels, and the height and width."""
        data = self._store.read(index)
        try:
            head = self._store.header(index, data)
        except ImageError:  # Pillow may read headers that ``probe`` refuses
            return self._by_pil(index)
        height, width = self._store.rules.size(head)
        if self._dimensions is not None and (height, width) != tuple(self._dimensions[index]):
            return self._by_pil(index)  # it may refuse the image for that
        if self._store.raw_size(index) is None:
            # Pillow refuses truncated or damaged images; DALI's decoders may fill in pixels.
            odd = self._store.rules.needs_pillow(head) or width * height > MOST_PIXELS
            if not (by_pil or odd) and is_all_code(data, head):
                return np.frombuffer(data, np.uint8), height, width
            return self._by_pil(index)
        return _ppm(data, height, width), height, width

    def _by_pil(self, index: int) -> tuple[NDArray[np.uint8], int, int]:
        image = self._store.decode(index)
        return _ppm(image.tobytes(), image.height, image.width), image.height, image.width

    def _fill(
        self, flight: deque[_Batch[Plan]], batches: Iterator[_Batch[Plan] | DataError]
    ) -> DataError | None:
        """Send batches to DALI while few of them, and few bytes, are in flight.

        Returns:
            The error of the next batch, if it has one.
        """
        while len(flight) < self._prefetch and sum(own.decoded for own in flight) < _DECODED_AHEAD:
            batch = next(batches, None)
            if not isinstance(batch, _Batch):
                return batch
            self._send(batch)
            flight.append(batch)
        return None

    def _send(self, batch: _Batch[Plan]) -> None:
        """Send a batch to DALI."""
        arguments: dict[str, Any] = {"encoded": batch.encoded}
        if self._dali_resizes:
            arguments |= cut_arguments(batch.cuts, self._shapes)
        with self._calling(batch.task.name):
            for name, data in arguments.items():
                self._dali.feed_input(name, data)
            self._dali.schedule_run()

    def _receive(
        self, flight: deque[_Batch[Plan]], crops: Sequence[Tensor], make: Make[Plan] | None
    ) -> tuple[_Batch[Plan], tuple[Tensor, ...]]:
        """Wait for the first batch in flight.

        Args:
            flight: the batches that DALI works on.
            crops: output, for each side.
            make: as for ``run``.

        Returns:
            The batch, and its crops or what ``make`` returned.
        """
        gpu = self._device.type == "cuda"
        while True:
            batch = flight[0]
            stream = torch.cuda.current_stream(self._device) if gpu else None
            try:
                with span("decode"), self._calling(batch.task.name):
                    made = self._dali.outputs(cuda_stream=stream)
                break
            except RuntimeError as error:
                if batch.by_pil or not refuses_an_image(error):
                    raise
                self._begin_again(flight, batch, error)
        flight.popleft()
        if make is None:
            sides = tuple(own[:, : len(batch.encoded)] for own in crops)
            # Shared without a copy. When torch releases the memory, a thread of DALI waits for the
            # device before DALI reuses it.
            views = (from_dlpack(view.as_tensor()) for view in made)
            for own in sides:
                torch.stack(list(islice(views, len(own))), out=own)
            return batch, sides
        # Views of DALI's memory, valid while ``made`` lives; DALI's ``at`` would copy.
        decoded = [np.asarray(made[0][row]) for row in range(len(batch.encoded))]
        return batch, make(batch.task.index, Images.of_arrays(decoded), batch.plan)

    def _begin_again(
        self, flight: deque[_Batch[Plan]], batch: _Batch[Plan], error: RuntimeError
    ) -> None:
        """Decode a batch that DALI refused by Pillow, and send all batches in flight again.

        DALI does not report which image it refused.

        Raises:
            DataError: Pillow cannot decode one of the images either.
        """
        _, *others = flight
        flight.clear()
        self._build()
        decoded = self._read(batch.task, by_pil=True)
        if isinstance(decoded, DataError):
            raise decoded
        if not self._warned:
            self._warned = True
            log.warning(
                f"DALI cannot decode an image of {batch.task.name} ({reason(error)}), "
                "but PIL can: such batches are decoded by PIL, which is slower"
            )
        for own in (decoded, *others):
            self._send(own)
            flight.append(own)

    def _land(self) -> None:
        """Wait for the batches that an abandoned run left in flight, and drop them.

        Not at the end of the run, where Ctrl-C might skip it.
        """
        try:
            while self._dali is not None:
                self._dali.outputs()
        except StopIteration:
            pass  # none is left
        except RuntimeError:
            self._dali = None


def _ppm(pixels: Bytes, height: int, width: int) -> NDArray[np.uint8]:
    """Encode pixels as PPM, which DALI decodes without loss."""
    return np.frombuffer(b"".join((b"P6 %d %d 255\n" % (width, height), pixels)), np.uint8)


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
