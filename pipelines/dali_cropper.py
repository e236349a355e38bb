"""DALI's graph: encoded images and boxes in, crops out; PIL decodes the images it refuses."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from fastsiam.errors import DataError
from fastsiam.trace import span
from fastsiam.views.batch import Crops, Shape

from .geometric import Cuts
from .geometric.cpu import crop_images
from .store import Store
from .store.probe import Flags, ends, header
from .workers import closes_at_exit, count

log = logging.getLogger(__name__)

_BY_PIL = int(Flags.NOT_JPEG | Flags.CMYK | Flags.UNUSUAL)
"""Images that PIL decodes: what DALI makes of them depends on the device, or differs from PIL's."""
_PART = 16
"""Images that one thread reads in one go."""

_Encoded = list[tuple[NDArray[np.uint8], int, int]]
"""Of each image: encoded bytes, height, width."""

Plan = TypeVar("Plan")
"""Data that travels with a task and is yielded with its crops."""


@dataclass(frozen=True, slots=True)
class Task(Generic[Plan]):
    """A batch to be made."""

    name: str
    """Of the batch, for messages."""
    index: NDArray[np.int64]
    cut: Callable[[NDArray[np.int64]], tuple[tuple[Cuts, ...], Plan]]
    """Says what is to be cut out of images of some sizes (N, 2), for each side of the crops."""


@dataclass(frozen=True, slots=True)
class _Batch(Generic[Plan]):
    """A batch on its way through DALI."""

    task: Task[Plan]
    cuts: tuple[Cuts, ...]
    plan: Plan
    encoded: list[NDArray[np.uint8]]
    by_pil: bool
    """All of its images were decoded by PIL."""


class Cropper:
    """DALI's graph, the threads that read for it, and the batches on their way through it.

    Args:
        store: the images.
        shapes: (V, N, S, S, 3) of a batch's crops, one for each side; the last batch may have fewer
            images.
        workers: as for ``DaliLoader``, as are the rest.
        device: where the crops shall lie.
        prefetch: batches in the making while the caller works on one.
        hw_decoder_load: share of the images that goes to the GPU's JPEG engine.
        dali_resizes: whether DALI cuts and resizes too.
        pads: whether crops can reach beyond what the boxes become.
    """

    def __init__(
        self,
        store: Store,
        shapes: Sequence[Shape],
        *,
        workers: int,
        device: torch.device,
        prefetch: int,
        hw_decoder_load: float,
        dali_resizes: bool | None,
        pads: bool = False,
    ) -> None:
        self._store, self._shapes, self._device, self._prefetch = store, shapes, device, prefetch
        self._threads, self._hw_decoder_load = max(1, count(workers)), hw_decoder_load
        self._dali_resizes = device.type == "cuda" if dali_resizes is None else dali_resizes
        assert self._dali_resizes or device.type == "cpu"
        self._pads, self._warned = pads, False
        self._dali: Any = self._build()
        self._readers = ThreadPoolExecutor(self._threads, "fastsiam-reader")
        self._flight: deque[_Batch[Any] | DataError] = deque()
        closes_at_exit(self)

    def run(self, tasks: Iterator[Task[Plan]]) -> Iterator[tuple[NDArray[np.int64], Plan, Crops]]:
        """Yield of each task its images, its plan, and its crops, which the next overwrite.

        Raises:
            DataError: an image cannot be read or decoded; names it.
            RuntimeError: it is closed, or was run anew meanwhile.
        """
        if self._dali is None:
            raise RuntimeError("this loader is closed")
        self._land()
        crops = [
            torch.empty(shape, dtype=torch.uint8, device=self._device) for shape in self._shapes
        ]
        flight: deque[_Batch[Plan] | DataError] = deque()
        self._flight = flight
        batches = self._read_ahead(tasks)
        flight.extend(map(self._send, islice(batches, self._prefetch)))
        while flight:
            batch = self._receive(flight, crops)
            flight.extend(map(self._send, islice(batches, 1)))
            count = len(batch.task.index)
            yield batch.task.index, batch.plan, tuple(own[:, :count] for own in crops)
            if flight is not self._flight and self._dali is not None:
                raise RuntimeError("another epoch of this loader was begun; it makes one at a time")

    def close(self) -> None:
        """End DALI's threads and ours, and free the memory."""
        if self._dali is None:
            return
        self._land()
        self._dali = None
        self._readers.shutdown(cancel_futures=True)
        backend: Any = import_module("nvidia.dali.backend")
        backend.ReleaseUnusedMemory()

    def _build(self) -> Any:
        """Build DALI's graph: encoded images and cuts in, uint8 crops out, a list for each view."""
        # What DALI's decoders find wrong with an image is said by our error, with its name.
        os.environ.setdefault("DALI_NVIMGCODEC_LOG_LEVEL", "1")
        from nvidia.dali import Pipeline, fn, types

        gpu = self._device.type == "cuda"
        dali = Pipeline(
            batch_size=self._shapes[0][1],
            num_threads=self._threads,
            device_id=_number(self._device) if gpu else None,
            seed=0,
            # Each schedule_run starts one batch, however many are in the air.
            exec_dynamic=True,
            prefetch_queue_depth=1,
        )
        with dali:
            encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1, no_copy=True)
            image = fn.decoders.image(
                encoded,
                device="mixed" if gpu else "cpu",
                output_type=types.RGB,
                adjust_orientation=False,
                jpeg_fancy_upsampling=True,  # as PIL, not nvJPEG's own way
                hw_decoder_load=self._hw_decoder_load,
            )
            if self._dali_resizes:
                dali.set_outputs(
                    *(self._view(image, name, side) for name, side in _names(self._shapes))
                )
            else:
                dali.set_outputs(image)
        dali.build()
        return dali

    def _view(self, image: Any, view: str, side: int) -> Any:
        """Cut a box out of an image, flip it perhaps, and make a square of it or of its middle."""
        from nvidia.dali import fn, types

        def argument(name: str, kind: Any = types.FLOAT) -> Any:
            return fn.external_source(name=name + view, dtype=kind, ndim=1, no_copy=True)

        # The box apart: PIL's filter sees nothing beside it. Taking the nearest pixels at their own
        # scale copies them; DALI's slice does that too, at half the speed.
        box = fn.resize(
            image,
            size=argument("size"),
            roi_start=argument("start"),
            roi_end=argument("end"),
            interp_type=types.INTERP_NN,
        )
        square = [side, side]
        crop = fn.resize(
            box,
            size=argument("extent") if self._pads else square,
            roi_start=argument("from"),
            roi_end=argument("to"),
            roi_relative=True,
        )
        if not self._pads:
            return crop
        return fn.slice(
            crop,
            start=argument("corner", types.INT32),
            shape=square,
            axes=[0, 1],
            out_of_bounds_policy="pad",
        )

    def _read_ahead(self, tasks: Iterator[Task[Plan]]) -> Iterator[_Batch[Plan] | DataError]:
        """Yield the batches, reading some ahead; an error is the last."""
        reading: deque[tuple[Task[Plan], list[Future[_Encoded]]]] = deque()
        try:
            while True:
                for task in islice(tasks, self._prefetch + 1 - len(reading)):
                    reading.append((task, self._read(task.index)))
                if not reading:
                    return
                batch = self._batch(*reading.popleft())
                yield batch
                if isinstance(batch, DataError):
                    return
        finally:
            for _, parts in reading:
                for part in parts:
                    part.cancel()

    def _read(self, index: NDArray[np.int64], *, by_pil: bool = False) -> list[Future[_Encoded]]:
        """Begin to read images in our threads."""

        def read(images: list[int]) -> _Encoded:
            with span("read"):
                return [self._encoded(i, by_pil) for i in images]

        parts = [index[i : i + _PART].tolist() for i in range(0, len(index), _PART)]
        return [self._readers.submit(read, part) for part in parts]

    def _encoded(self, index: int, by_pil: bool) -> tuple[NDArray[np.uint8], int, int]:
        """Read an image as bytes of which DALI makes the pixels that PIL makes, and its size."""
        data = self._store.read(index)
        head = header(self._store, index, data)
        width, height = head.width, head.height
        if self._store.raw_size(index) is None:
            # PIL refuses a JPEG without an end; other decoders may make up what is missing.
            if not (by_pil or head.flags & _BY_PIL) and ends(data, head.scan):
                return np.frombuffer(data, np.uint8), height, width
            image = self._store.decode(index)
            data, (width, height) = image.tobytes(), image.size
        ppm = b"".join((b"P6 %d %d 255\n" % (width, height), data))
        return np.frombuffer(ppm, np.uint8), height, width

    def _batch(
        self, task: Task[Plan], parts: list[Future[_Encoded]], *, by_pil: bool = False
    ) -> _Batch[Plan] | DataError:
        """Wait for a batch to be read and settle its cuts.

        An error travels as a value: it belongs to its batch, and those before it go first.
        """
        try:
            found = [image for part in parts for image in part.result()]
        except DataError as error:
            return error
        cuts, plan = task.cut(np.array([(height, width) for _, height, width in found]))
        return _Batch(task, cuts, plan, [data for data, _, _ in found], by_pil)

    def _send(self, batch: _Batch[Plan] | DataError) -> _Batch[Plan] | DataError:
        """Let DALI begin with a batch."""
        if isinstance(batch, _Batch):
            arguments: dict[str, Any] = {"encoded": batch.encoded}
            if self._dali_resizes:
                arguments |= _arguments(batch.cuts, self._shapes, pads=self._pads)
            try:
                for name, data in arguments.items():
                    self._dali.feed_input(name, data)
                self._dali.schedule_run()
            except BaseException:  # Ctrl-C, say: fed in part, images would meet others' boxes
                self._dali = self._build()
                raise
        return batch

    def _receive(
        self, flight: deque[_Batch[Plan] | DataError], crops: Sequence[Tensor]
    ) -> _Batch[Plan]:
        """Wait for DALI to finish the first batch in flight, and put its crops where told."""
        gpu = self._device.type == "cuda"
        while isinstance(batch := flight[0], _Batch):
            stream = torch.cuda.current_stream(self._device) if gpu else None
            try:
                with span("decode"):  # what is left of it to wait for
                    made = self._dali.outputs(cuda_stream=stream)
            except RuntimeError as error:
                if batch.by_pil:
                    raise
                self._begin_again(flight, batch, error)
                continue
            flight.popleft()
            sides = [own[:, : len(batch.encoded)] for own in crops]
            if self._dali_resizes:
                # Without a copy into torch's hands; when torch lets go of its memory, DALI waits
                # for the device, in a thread of its own, before it uses that again.
                views = (from_dlpack(view.as_tensor()) for view in made)
                for own in sides:
                    torch.stack(list(islice(views, len(own))), out=own)
            else:
                images = [np.asarray(made[0].at(row)) for row in range(len(batch.encoded))]
                with span("crop"):
                    for cuts, own in zip(batch.cuts, sides, strict=True):
                        crop_images(images, cuts, own)
            return batch
        raise batch

    def _begin_again(
        self, flight: deque[_Batch[Plan] | DataError], batch: _Batch[Plan], error: RuntimeError
    ) -> None:
        """Put the images of a batch that DALI refused into the pixels that PIL decodes.

        DALI does not say which file it is, and its graph is not to be used after an error.

        Raises:
            DataError: PIL cannot decode one of the images either.
        """
        _, *others = flight
        flight.clear()
        self._dali = self._build()
        parts = self._read(batch.task.index, by_pil=True)
        decoded = self._batch(batch.task, parts, by_pil=True)
        if isinstance(decoded, DataError):
            raise decoded
        if not self._warned:
            self._warned = True
            log.warning(
                f"DALI cannot decode an image of {batch.task.name} ({_reason(error)}), "
                "but PIL can: such batches are decoded by PIL, which is slower"
            )
        flight.extend(map(self._send, (decoded, *others)))

    def _land(self) -> None:
        """Wait for what an abandoned run left in flight, and let it go."""
        self._flight.clear()
        try:
            while self._dali is not None:
                self._dali.outputs()
        except StopIteration:
            pass  # all have landed
        except RuntimeError:
            self._dali = self._build()


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _names(shapes: Sequence[Shape]) -> list[tuple[str, int]]:
    """Return a name in DALI's graph for each view, and its side."""
    sides = [side for views, _, side, *_ in shapes for _ in range(views)]
    return [(str(number), side) for number, side in enumerate(sides)]


def _arguments(
    cuts: Sequence[Cuts], shapes: Sequence[Shape], *, pads: bool
) -> dict[str, NDArray[Any]]:
    """Return what ``_view`` asks for: boxes in pixels; flips as boxes from right to left."""
    of_sides = [_boxes(own, shape[2], pads=pads) for own, shape in zip(cuts, shapes, strict=True)]
    of_each = (
        {name: array[view] for name, array in boxes.items()}
        for boxes in of_sides
        for view in range(len(boxes["size"]))
    )
    return {
        name + view: array.astype(np.int32 if name == "corner" else np.float32)
        for (view, _), arrays in zip(_names(shapes), of_each, strict=True)
        for name, array in arrays.items()
    }


def _boxes(cuts: Cuts, side: int, *, pads: bool) -> dict[str, NDArray[Any]]:
    """Return the arguments (V, N, 2) of the views of one side."""
    start, size = cuts.box[..., :2], cuts.box[..., 2:]
    first = np.maximum(cuts.corner, 0)
    last = np.minimum(cuts.corner + side, cuts.resized)
    flip = np.stack([np.zeros_like(cuts.flip), cuts.flip], -1)
    arrays = {
        "size": size,
        "start": start,
        "end": start + size,
        "from": np.where(flip, last, first) / cuts.resized,
        "to": np.where(flip, first, last) / cuts.resized,
    }
    if pads:
        arrays |= {"extent": last - first, "corner": np.minimum(cuts.corner, 0)}
    return arrays


def _reason(error: RuntimeError) -> str:
    """Return the line of DALI's message that says what happened."""
    lines = [line.strip(" :") for line in str(error).splitlines()]
    return next((line for line in lines if "sample" in line or "failure" in line), lines[0])
