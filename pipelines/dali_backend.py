"""The DALI pipeline: NVIDIA DALI decodes each image once, on the GPU if there is one.

DALI decodes, crops, resizes and flips. Threads feed it the images, boxes and flips of each batch.
DALI itself reads no files and draws no random numbers. So its epochs have the same order and views
as those of other pipelines, and can start at any step. The same graph makes central crops for
evaluation. Pillow decodes the images that DALI rejects.

On a GPU, DALI resizes with PIL's triangle filter in floating point and rounds once, so a pixel of a
crop differs from PIL's by at most one level. The outermost pixels of a box that is shrunk can
differ more: DALI repeats the edge of the box where PIL uses fewer pixels. On a CPU, DALI resizes
slowly, so it only decodes, and the engine makes crops that are bit-identical to PIL's.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
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
from nvidia.dali import Pipeline, backend, fn, types
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from fastsiam.config import DataConfig
from fastsiam.errors import BackendError, DataError, ImageError, lacks_memory
from fastsiam.files import why
from fastsiam.trace import span
from fastsiam.views.batch import Crops, Shape
from fastsiam.views.draws import ViewParams

from .cuts import Cuts, cut_centres, cut_views
from .job import Images
from .loaders import Augmented, CropLoader, LoaderSpec
from .native_backend import NativeLoader
from .store import Store
from .store.base import warn_once
from .store.decode import MOST_PIXELS
from .store.probe import Bytes, has_only_entropy_data
from .workers import count, prefetch_map

# No warnings of the decoders, which do not name the image. Their errors cannot be turned off.
os.environ.setdefault("DALI_NVIMGCODEC_LOG_LEVEL", "1")
# DALI shuts down its pipelines at exit, which crashes in a forked process that inherited them, and
# when they are garbage-collected, which takes forever there.
os.register_at_fork(after_in_child=lambda: Pipeline._pipes.clear())
os.register_at_fork(after_in_child=gc.freeze)

_PART = 16
"""Images that a reader thread reads per call."""
_DECODER_ERROR = re.compile(
    # nvImageCodec's status codes for bad or unsupported code streams, also of its extensions.
    r"`nvidia\.dali\.fn\.decoders\.image`.*encountered:.*"
    r"(Failed to decode sample #\d|nvImageCodec failure: '#(3|4|9|13|14|18|19)')",
    re.DOTALL,
)
"""Error of DALI 2.4 when its decoder rejects an image: the executor names the operator."""

Result = TypeVar("Result")

Cut = Callable[[NDArray[np.int64]], tuple[tuple[Cuts, ...], Any]]
"""Function that takes the sizes (N, 2) of a batch's images. It returns the cuts for each view size,
or () if DALI only decodes, and a value to yield together with the crops."""
Task = tuple[NDArray[np.int64], Cut]
"""Positions of a batch's images, and the function that cuts them."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch that was read and may be in progress in DALI."""

    task: Task
    encoded: list[NDArray[np.uint8]]
    cuts: tuple[Cuts, ...]
    extra: Any
    """Value that ``Cut`` returned with the cuts."""


class Cropper:
    """DALI's graph, the threads that read images for it, and the batches in flight.

    It yields crops on a GPU, or decoded images on a CPU. Finish or close one generator before you
    start the next. Generators raise a DataError that names the image if one cannot be read or
    decoded, and a RuntimeError if CUDA fails or DALI runs out of memory.

    Args:
        data: number of threads, batches to prepare ahead, and load of the GPU's JPEG engine.
        store: the images.
        shapes: shape (V, N, S, S, 3) of a batch's crops, for each view size; the last batch may
            have fewer images.
        device: device of the crops.
        dali_resizes: whether DALI crops and resizes too, or only decodes.

    Raises:
        BackendError: DALI cannot use the device; the message says what to install.
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
        self._hw_decoder_load, self._resizes = data.dali_hw_decoder_load, dali_resizes
        self._threads = max(1, count(data.workers))
        # If DALI only decodes, the engine crops one of the batches.
        self._prefetch = data.prefetch if dali_resizes else max(1, data.prefetch - 1)
        self._dimensions = store.dimensions()
        try:
            self._dali: Any = self._build()
            """The graph while no batch is in flight; None otherwise, and after an error."""
        except RuntimeError as error:
            if lacks_memory(error):
                raise
            raise BackendError(
                f"DALI cannot start on {device} ({why(error)}): install the DALI package for this "
                "driver's CUDA version, or pass --pipeline native"
            ) from error
        self._readers = ThreadPoolExecutor(self._threads, "fastsiam-reader")

    def _build(self) -> Any:
        """Build a graph that takes encoded images and cuts, and returns the crops of each view.

        If DALI only decodes, the graph takes no cuts and returns complete images.
        """
        gpu = self._device.type == "cuda"
        dali = Pipeline(
            batch_size=self._shapes[0][1],
            num_threads=self._threads,
            device_id=self._device.index or 0 if gpu else None,
            seed=0,
            # Each schedule_run starts one batch, however many are in flight.
            exec_dynamic=True,
            prefetch_queue_depth=1,
        )
        with dali:
            encoded = _add_input("encoded", types.UINT8)
            outputs = [decoded(encoded, gpu=gpu, hw_decoder_load=self._hw_decoder_load)]
            if self._resizes:
                sides = [side for views, _, side, *_ in self._shapes for _ in range(views)]
                outputs = [_view(outputs[0], view, side) for view, side in enumerate(sides)]
            dali.set_outputs(*outputs)
        dali.build()
        return dali

    def crops(self, tasks: Iterable[Task]) -> Generator[tuple[NDArray[np.int64], Any, Crops]]:
        """Yield each batch's positions, value of ``Cut`` and crops, which the next overwrites."""
        crops = [
            torch.empty(shape, dtype=torch.uint8, device=self._device) for shape in self._shapes
        ]

        def copy_outputs(batch: _Batch, outputs: Any) -> tuple[NDArray[np.int64], Any, Crops]:
            index, _ = batch.task
            sides = tuple(out[:, : len(index)] for out in crops)
            # DLPack shares the memory without a copy. When torch releases it, a thread of DALI
            # waits for the device before DALI reuses it.
            views = (from_dlpack(view.as_tensor()) for view in outputs)
            for out in sides:
                torch.stack(list(islice(views, len(out))), out=out)
            return index, batch.extra, sides

        return self._run(tasks, copy_outputs)

    def decoded(self, indices: Iterable[NDArray[np.int64]]) -> Generator[Images]:
        """Yield each batch's images, in buffers that DALI does not reuse while the images live."""

        def images(batch: _Batch, outputs: Any) -> Images:
            rows = range(len(batch.encoded))  # DALI's ``at`` would copy
            return Images.of_arrays([np.asarray(outputs[0][row]) for row in rows], owner=outputs)

        return self._run(((index, lambda size: ((), None)) for index in indices), images)

    def _run(
        self, tasks: Iterable[Task], finish: Callable[[_Batch, Any], Result]
    ) -> Generator[Result]:
        """Run DALI on each task; yield ``finish(batch, outputs)`` for each, in order."""
        dali, self._dali = self._dali or self._build(), None
        in_flight, errors = deque[_Batch](), list[DataError]()
        ahead = self._prefetch + 1
        batches = prefetch_map(self._read, tasks, count=ahead, threads=ahead)

        def fill() -> None:
            """Keep ``prefetch`` batches in flight; record the error of one that cannot be read."""
            while len(in_flight) < self._prefetch and not errors:
                try:
                    batch = next(batches, None)
                except DataError as error:
                    errors.append(error)
                    return
                if batch is None:
                    return
                self._send(dali, batch)
                in_flight.append(batch)

        with contextlib.closing(batches):
            fill()
            while in_flight:
                try:
                    outputs = self._outputs(dali)
                except RuntimeError as error:
                    if not _DECODER_ERROR.search(str(error)):
                        raise
                    warn_once(
                        "DALI cannot decode some images: batches with such images are decoded by "
                        "PIL, which is slower"
                    )
                    # DALI does not report which image it rejects, and loses the batches in flight.
                    dali, in_flight[0] = self._build(), self._read(in_flight[0].task, by_pil=True)
                    for batch in in_flight:
                        self._send(dali, batch)
                    outputs = self._outputs(dali)
                result = finish(in_flight.popleft(), outputs)
                fill()
                try:
                    yield result
                except GeneratorExit:
                    with contextlib.suppress(RuntimeError):
                        for _ in in_flight:
                            dali.outputs()
                        self._dali = dali
                    raise
        self._dali = dali
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End all threads and free the memory."""
        self._dali = None
        self._readers.shutdown(cancel_futures=True)
        backend.ReleaseUnusedMemory()  # type: ignore[attr-defined]

    def _read(self, task: Task, *, by_pil: bool = False) -> _Batch:

        def read(images: list[int]) -> list[tuple[NDArray[np.uint8], int, int]]:
            with span("read"):
                return [self._by_pil(i) if by_pil else self._encoded(i) for i in images]

        index, cut = task
        self._store.prefetch(index.tolist())
        parts = [index[i : i + _PART].tolist() for i in range(0, len(index), _PART)]
        records = [image for part in self._readers.map(read, parts) for image in part]
        encoded, size = [data for data, *_ in records], np.array([size for _, *size in records])
        return _Batch(task, encoded, *cut(size))

    def _encoded(self, index: int) -> tuple[NDArray[np.uint8], int, int]:
        """Return bytes that DALI decodes like Pillow, and the image's height and width."""
        data = self._store.read(index)
        try:
            head = self._store.header(index, data)
        except ImageError:  # Pillow may read headers that ``probe`` rejects
            return self._by_pil(index)
        rules = self._store.rules_of(index)
        height, width = rules.size(head)
        if self._dimensions is not None and (height, width) != tuple(self._dimensions[index]):
            return self._by_pil(index)  # the store may reject the image for that
        if self._store.raw_size(index) is not None:
            return _ppm(data, height, width), height, width
        # Pillow rejects truncated or corrupt images; DALI's decoders may fill in pixels.
        is_unusual = rules.needs_pillow(head) or width * height > MOST_PIXELS
        if not is_unusual and has_only_entropy_data(data, head):
            return np.frombuffer(data, np.uint8), height, width
        return self._by_pil(index)

    def _by_pil(self, index: int) -> tuple[NDArray[np.uint8], int, int]:
        image = self._store.decode(index)
        return _ppm(image.tobytes(), image.height, image.width), image.height, image.width

    def _send(self, dali: Any, batch: _Batch) -> None:
        inputs = cut_arguments(batch.cuts, self._shapes) if batch.cuts else {}
        for name, data in {"encoded": batch.encoded, **inputs}.items():
            dali.feed_input(name, data)
        dali.schedule_run()

    def _outputs(self, dali: Any) -> Any:
        """Wait for DALI's outputs of the oldest batch in flight."""
        gpu = self._device.type == "cuda"
        stream = torch.cuda.current_stream(self._device) if gpu else None
        with span("decode"):
            return dali.outputs(cuda_stream=stream)


def _ppm(pixels: Bytes, height: int, width: int) -> NDArray[np.uint8]:
    """Encode pixels as PPM, which DALI decodes without loss."""
    return np.frombuffer(b"".join((b"P6 %d %d 255\n" % (width, height), pixels)), np.uint8)


def decoded(encoded: Any, *, gpu: bool, hw_decoder_load: float) -> Any:
    """Add the decoder to a graph: encoded images in, pixels out.

    On a CPU, pixels equal PIL's. On a GPU, they differ by the rounding of another transform.
    """
    load: dict[str, Any] = {"hw_decoder_load": hw_decoder_load} if gpu else {}
    return fn.decoders.image(
        encoded,
        **load,
        device="mixed" if gpu else "cpu",
        output_type=types.RGB,
        adjust_orientation=False,
        jpeg_fancy_upsampling=True,  # like PIL, unlike nvJPEG's default
    )


def _add_input(name: str, kind: Any) -> Any:
    """Add an input to the graph: a one-dimensional array for each image, used without a copy."""
    return fn.external_source(name=name, dtype=kind, ndim=1, no_copy=True)


def _view(image: Any, view: int, side: int) -> Any:
    """Crop a box of an image, resize it or its centre to a square, and flip it if requested."""
    size, start, end, first, last = (
        _add_input(f"{name}{view}", types.FLOAT) for name in ("size", "start", "end", "from", "to")
    )
    # The box is copied first, because PIL's filter uses no pixels outside it. A nearest-neighbour
    # resize to the same size copies it twice as fast as DALI's slice.
    box = fn.resize(image, size=size, roi_start=start, roi_end=end, interp_type=types.INTERP_NN)
    return fn.resize(box, size=[side, side], roi_start=first, roi_end=last, roi_relative=True)


def cut_arguments(cuts: Sequence[Cuts], shapes: Sequence[Shape]) -> dict[str, NDArray[Any]]:
    """Return the graph's inputs by name; a flip is a box that runs from right to left."""
    arguments, view = dict[str, NDArray[Any]](), 0
    for cut, (_, _, side, *_) in zip(cuts, shapes, strict=True):
        start, size = cut.box[..., :2], cut.box[..., 2:]
        first, last = cut.corner, cut.corner + side
        flip = np.stack([np.zeros_like(cut.flip), cut.flip], -1)
        boxes = {
            "size": size,
            "start": start,
            "end": start + size,
            "from": np.where(flip, last, first) / cut.resized,
            "to": np.where(flip, first, last) / cut.resized,
        }
        for row in range(len(flip)):
            for name, array in boxes.items():
                arguments[f"{name}{view}"] = array[row].astype(np.float32)
            view += 1
    return arguments


def dali_loader(spec: LoaderSpec) -> CropLoader:
    """Open the loader of the DALI pipeline, which has as many reader threads as DALI has threads.

    On a CPU the engine crops, because it is three times as fast as DALI and bit-identical to PIL.
    """
    return (GraphLoader if spec.device.type == "cuda" else DecodingLoader)(spec)


class GraphLoader(CropLoader):
    """The loader on a GPU: DALI decodes, crops and resizes."""

    def __init__(self, spec: LoaderSpec) -> None:
        super().__init__(spec)
        self._cropper = Cropper(
            spec.data, self._store, self._shapes, device=self._device, dali_resizes=True
        )
        self._owned.append(self._cropper)

    def _crops(self, epoch: int, skip: int) -> Generator[Augmented]:
        def cut(step: int, size: NDArray[np.int64]) -> tuple[tuple[Cuts, ...], ViewParams]:
            params = self._draw(epoch, step, size)
            return cut_views(params, self._augment), params

        steps = range(skip, self.steps)
        return self._cropper.crops(
            (self._order.indices(epoch, step), partial(cut, step)) for step in steps
        )


class DecodingLoader(NativeLoader):
    """The loader on a CPU: DALI decodes, and the engine crops."""

    def __init__(self, spec: LoaderSpec) -> None:
        super().__init__(spec)
        self._cropper = Cropper(
            spec.data, self._store, self._shapes, device=self._device, dali_resizes=False
        )
        self._owned.append(self._cropper)

    def _views_or_crops(self, epoch: int, skip: int, *, as_views: bool) -> Generator[Augmented]:
        indices = (self._order.indices(epoch, step) for step in range(skip, self.steps))
        with (
            contextlib.closing(self._cropper.decoded(indices)) as images,
            contextlib.closing(super()._views_or_crops(epoch, skip, as_views=as_views)) as batches,
        ):
            self._read = lambda _: next(images)
            yield from batches


def central_crops(
    data: DataConfig,
    store: Store,
    batches: Sequence[NDArray[np.int64]],
    *,
    resize: int,
    side: int,
    device: torch.device,
) -> Generator[Tensor]:
    """Yield batches of central crops on the device, like ``native_backend.central_crops``.

    ``resize`` must be at least ``side``: DALI adds no black border.
    """

    def cut(size: NDArray[np.int64]) -> tuple[tuple[Cuts], None]:
        return (cut_centres(size, resize=resize, side=side),), None

    shapes = [(1, max(map(len, batches)), side, side, 3)]
    cropper = Cropper(data, store, shapes, device=device, dali_resizes=True)
    tasks = ((index, cut) for index in batches)
    with contextlib.closing(cropper), contextlib.closing(cropper.crops(tasks)) as results:
        for _, _, (crops,) in results:
            yield crops[0]
