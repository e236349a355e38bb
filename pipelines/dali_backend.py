"""NVIDIA DALI: an image is decoded once, on the GPU where there is one, and cropped twice.

DALI decodes, crops, resizes and flips; which images, which boxes and which flips is fed to it batch
by batch. It reads no file and draws no number itself, so its epochs are those of every pipeline,
and any step can be the first. Evaluation's central crops are made by the same graph.

On a GPU the resize is PIL's triangle filter in floating point and rounded once, so a pixel of a
crop is within one level of PIL's. Where a box is shrunk, its outermost pixels can be further off:
beyond the box DALI repeats its edge, where PIL does with fewer pixels. On a CPU, where DALI's
resize is slow, our own kernels cut and resize what DALI decodes, to the last bit as PIL does.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import weakref
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

from fastsiam.config import AugmentConfig
from fastsiam.errors import DataError
from fastsiam.trace import span
from fastsiam.views.batch import TwoViewBatch, to_device
from fastsiam.views.draws import ViewParams, draw_views
from fastsiam.views.photometric import photometric

from .geometric import Cuts, cut_centres, cut_views
from .geometric.cpu import crop_images
from .order import Order
from .store import Store
from .store.probe import Flags, ends, header
from .workers import count

log = logging.getLogger(__name__)

_BY_PIL = int(Flags.NOT_JPEG | Flags.CMYK | Flags.UNUSUAL)
"""Images that PIL decodes: what DALI makes of them depends on the device, or differs from PIL's."""
_PART = 16
"""Images that one thread reads in one go."""

_Encoded = list[tuple[NDArray[np.uint8], int, int]]
"""Of each image: encoded bytes, height, width."""


Plan = TypeVar("Plan")
"""What a task's crops were made by, for whoever gets them."""


@dataclass(frozen=True, slots=True)
class _Task(Generic[Plan]):
    """A batch to be made."""

    name: str
    """Of the batch, for messages."""
    index: NDArray[np.int64]
    cut: Callable[[NDArray[np.int64]], tuple[Cuts, Plan]]
    """Says what is to be cut out of images of some sizes (N, 2)."""


@dataclass(frozen=True, slots=True)
class _Batch(Generic[Plan]):
    """A batch on its way through DALI."""

    task: _Task[Plan]
    cuts: Cuts
    plan: Plan
    encoded: list[NDArray[np.uint8]]
    by_pil: bool
    """All of its images were decoded by PIL."""


class DaliLoader:
    """Two-view batches by DALI; see ``fastsiam.views.batch.Loader``.

    Args:
        store: the images.
        order: of the epochs.
        augment: ranges and probabilities.
        workers: DALI's threads, and as many that read; -1 is one for each core of this rank, and
            there is at least one.
        device: where the views shall lie; on a GPU the images are decoded there too.
        dtype: floating type of the views.
        prefetch: batches in the making while the caller works on one.
        hw_decoder_load: share of the images, 0 to 1, that goes to the GPU's JPEG engine.
        dali_resizes: whether DALI cuts and resizes too, or the decoded images come to our own
            kernels. The first is for GPUs, where it is the default; on a CPU these are three times
            as fast as DALI, and equal PIL's to the last bit.
    """

    def __init__(
        self,
        store: Store,
        order: Order,
        augment: AugmentConfig,
        *,
        workers: int,
        device: torch.device,
        dtype: torch.dtype,
        prefetch: int = 2,
        hw_decoder_load: float = 0.65,
        dali_resizes: bool | None = None,
    ) -> None:
        self.source, self.images, self.steps = str(store), order.images, order.steps
        self._order, self._augment, self._labels = order, augment, store.labels
        self._device, self._dtype = device, dtype
        self._cropper = Cropper(
            store,
            (2, order.batch // order.world, augment.crop, augment.crop, 3),
            workers=workers,
            device=device,
            prefetch=prefetch,
            hw_decoder_load=hw_decoder_load,
            dali_resizes=dali_resizes,
        )

    def epoch(self, number: int, *, skip: int = 0) -> Iterator[TwoViewBatch]:
        """Yield the batches of an epoch from step ``skip`` on; it ends when another begins."""
        for index, params, crops in self.crops(number, skip=skip):
            view1, view2 = photometric(crops, params, self._augment, dtype=self._dtype)
            yield TwoViewBatch(
                view1=view1,
                view2=view2,
                index=to_device(index, self._device),
                label=to_device(self._labels[index], self._device),
            )

    def crops(
        self, number: int, *, skip: int = 0
    ) -> Iterator[tuple[NDArray[np.int64], ViewParams, Tensor]]:
        """Yield what ``epoch`` makes its batches of; see ``fastsiam.views.batch.CropLoader``.

        The crops are ready on the device's current stream. The next step overwrites them: fresh
        memory for every batch would cost a tenth of all.

        Raises:
            DataError: an image cannot be read or decoded; names it.
        """
        return self._cropper.run(self._task(number, step) for step in range(skip, self.steps))

    def close(self) -> None:
        """End DALI's threads and ours, and free the memory."""
        self._cropper.close()

    def _task(self, epoch: int, step: int) -> _Task[ViewParams]:
        index = self._order.indices(epoch, step)

        def cut(size: NDArray[np.int64]) -> tuple[Cuts, ViewParams]:
            params = draw_views(
                self._augment, seed=self._order.seed, epoch=epoch, index=index, size=size
            )
            return cut_views(params, self._augment.crop), params

        return _Task(f"step {step} of epoch {epoch}", index, cut)


def central_crops(
    store: Store,
    batches: Sequence[NDArray[np.int64]],
    *,
    resize: int,
    side: int,
    workers: int,
    prefetch: int,
    hw_decoder_load: float,
    device: torch.device,
    dali_resizes: bool | None = None,
) -> Iterator[Tensor]:
    """Yield batches of central crops on the device; see ``fastsiam.pipelines.evaluation.Crops``.

    Args:
        store: the images.
        batches: the images of each.
        resize: shorter side before the crop is taken.
        side: of the crops.
        workers: as for ``DaliLoader``, as are the rest.
        prefetch: batches in the making while the caller works on one.
        hw_decoder_load: share of the images that goes to the GPU's JPEG engine.
        device: where the crops shall lie.
        dali_resizes: whether DALI resizes too.
    """

    def cut(size: NDArray[np.int64]) -> tuple[Cuts, None]:
        return cut_centres(size, resize=resize, side=side), None

    cropper = Cropper(
        store,
        (1, max(map(len, batches)), side, side, 3),
        workers=workers,
        device=device,
        prefetch=prefetch,
        hw_decoder_load=hw_decoder_load,
        dali_resizes=dali_resizes,
        pads=resize < side,
    )
    tasks = (_Task(f"images {index[0]} to {index[-1]}", index, cut) for index in batches)
    with contextlib.closing(cropper):
        for _, _, crops in cropper.run(tasks):
            yield crops[0]


class Cropper:
    """DALI's graph, the threads that read for it, and the batches on their way through it.

    Args:
        store: the images.
        shape: (V, N, S, S, 3) of a batch's crops; the last batch may have fewer images.
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
        shape: tuple[int, int, int, int, int],
        *,
        workers: int,
        device: torch.device,
        prefetch: int,
        hw_decoder_load: float,
        dali_resizes: bool | None,
        pads: bool = False,
    ) -> None:
        self._store, self._shape, self._device, self._prefetch = store, shape, device, prefetch
        self._threads, self._hw_decoder_load = max(1, count(workers)), hw_decoder_load
        self._dali_resizes = device.type == "cuda" if dali_resizes is None else dali_resizes
        assert self._dali_resizes or device.type == "cpu"
        self._pads, self._warned = pads, False
        self._dali: Any = self._build()
        self._readers = ThreadPoolExecutor(self._threads, "fastsiam-reader")
        self._flight: deque[_Batch[Any] | DataError] = deque()
        atexit.register(_close_at_exit, weakref.ref(self))

    def run(self, tasks: Iterator[_Task[Plan]]) -> Iterator[tuple[NDArray[np.int64], Plan, Tensor]]:
        """Yield of each task its images, its plan, and its crops, which the next overwrite.

        Raises:
            DataError: an image cannot be read or decoded; names it.
            RuntimeError: it is closed, or was run anew meanwhile.
        """
        if self._dali is None:
            raise RuntimeError("this loader is closed")
        self._land()
        crops = torch.empty(self._shape, dtype=torch.uint8, device=self._device)
        flight: deque[_Batch[Plan] | DataError] = deque()
        self._flight = flight
        batches = self._read_ahead(tasks)
        flight.extend(map(self._send, islice(batches, self._prefetch)))
        while flight:
            batch = self._receive(flight, crops)
            flight.extend(map(self._send, islice(batches, 1)))
            yield batch.task.index, batch.plan, crops[:, : len(batch.task.index)]
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
            batch_size=self._shape[1],
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
                dali.set_outputs(*(self._view(image, str(view)) for view in range(self._shape[0])))
            else:
                dali.set_outputs(image)
        dali.build()
        return dali

    def _view(self, image: Any, number: str) -> Any:
        """Cut a box out of an image, flip it perhaps, and make a square of it or of its middle."""
        from nvidia.dali import fn, types

        def argument(name: str, kind: Any = types.FLOAT) -> Any:
            return fn.external_source(name=name + number, dtype=kind, ndim=1, no_copy=True)

        # The box apart: PIL's filter sees nothing beside it. Taking the nearest pixels at their own
        # scale copies them; DALI's slice does that too, at half the speed.
        box = fn.resize(
            image,
            size=argument("size"),
            roi_start=argument("start"),
            roi_end=argument("end"),
            interp_type=types.INTERP_NN,
        )
        side = [self._shape[2]] * 2
        crop = fn.resize(
            box,
            size=argument("extent") if self._pads else side,
            roi_start=argument("from"),
            roi_end=argument("to"),
            roi_relative=True,
        )
        if not self._pads:
            return crop
        return fn.slice(
            crop,
            start=argument("corner", types.INT32),
            shape=side,
            axes=[0, 1],
            out_of_bounds_policy="pad",
        )

    def _read_ahead(self, tasks: Iterator[_Task[Plan]]) -> Iterator[_Batch[Plan] | DataError]:
        """Yield the batches, reading some ahead; an error is the last."""
        reading: deque[tuple[_Task[Plan], list[Future[_Encoded]]]] = deque()
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
        self, task: _Task[Plan], parts: list[Future[_Encoded]], *, by_pil: bool = False
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
                arguments |= _arguments(batch.cuts, self._shape[2], pads=self._pads)
            try:
                for name, data in arguments.items():
                    self._dali.feed_input(name, data)
                self._dali.schedule_run()
            except BaseException:  # Ctrl-C, say: fed in part, images would meet others' boxes
                self._dali = self._build()
                raise
        return batch

    def _receive(self, flight: deque[_Batch[Plan] | DataError], crops: Tensor) -> _Batch[Plan]:
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
            own = crops[:, : len(batch.encoded)]
            if self._dali_resizes:
                # Without a copy into torch's hands; when torch lets go of its memory, DALI waits
                # for the device, in a thread of its own, before it uses that again.
                torch.stack([from_dlpack(view.as_tensor()) for view in made], out=own)
            else:
                images = [np.asarray(made[0].at(row)) for row in range(len(batch.encoded))]
                with span("crop"):
                    crop_images(images, batch.cuts, own)
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


def _arguments(cuts: Cuts, side: int, *, pads: bool) -> dict[str, NDArray[Any]]:
    """Return what ``_view`` asks for: boxes in pixels; flips as boxes from right to left."""
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
    return {
        f"{name}{view}": array[view].astype(np.int32 if name == "corner" else np.float32)
        for name, array in arrays.items()
        for view in range(len(cuts.box))
    }


def _reason(error: RuntimeError) -> str:
    """Return the line of DALI's message that says what happened."""
    lines = [line.strip(" :") for line in str(error).splitlines()]
    return next((line for line in lines if "sample" in line or "failure" in line), lines[0])


def _close_at_exit(reference: weakref.ref[Cropper]) -> None:
    """Close what its user left open, before the interpreter takes its modules apart."""
    cropper = reference()
    if cropper is not None:
        cropper.close()
