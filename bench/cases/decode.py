"""Speed of image decoders on bytes in memory: the ceiling of a loader."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastsiam.bench.bench_images import Images
from fastsiam.bench.config import CONTAINERS, ORIGINAL, Stored, with_form
from fastsiam.bench.measurements import Record, Row
from fastsiam.bench.runner import Loading, Task, compare
from fastsiam.bench.session import Session
from fastsiam.config import DataConfig
from fastsiam.files import why
from fastsiam.kernels import library
from fastsiam.pipelines import open_store
from fastsiam.pipelines.backends import BASELINE
from fastsiam.pipelines.store.decode import decode
from fastsiam.views.draws import draw_views

_DALI = {"cpu": "DALI", "cuda": "DALI on the GPU"}
OURS, OUR_PART = "fastsiam", "fastsiam: the boxes' part"
"""fastsiam's decoder: entire images, and only the part that the boxes of all views need."""
TURBO, TURBO_PART = "libjpeg-turbo", "libjpeg-turbo with crop and skip"
"""libjpeg-turbo through its public functions: entire images, and the same part."""
_LIBRARY_DECODERS = ("PIL", "torchvision.io", TURBO, *_DALI.values())
"""Decoders of entire images, except fastsiam's."""
_CROP_AND_SKIP = Path(__file__).with_name("crop_and_skip.cpp")
_POINTER, _INT32, _INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_ARGUMENTS: Any = (_POINTER, _INT64, _INT32, _INT32, _POINTER, _POINTER, _POINTER)
"""Arguments of the C functions: bytes and their number, height, width, box, pixels, placement."""
_BEHIND = 64
"""Bytes that may be written past the pixels; their placement in the image takes fewer."""


def measure(session: Session) -> list[Record]:
    """Measure decoders on each encoded form of the images."""
    images = session.images(session.loaded_batch)
    return log_left_out(session, compare(session, rows(session, images)))


def rows(session: Session, images: Images) -> list[Row]:
    """Return a row for each decoder and each encoded form of the images."""
    return [
        Row(
            case="decode",
            name=with_form(name, form),
            runner=f"decode, {form}",
            build=partial(build_decoding, session.loading(images, BASELINE, form), form),
            facts={"stored": form},
            in_the_clock="encoded bytes in memory to pixels, in as many threads as workers",
            config=session.settings(images, batch=0),
        )
        for form in dict.fromkeys((ORIGINAL, *session.config.stored))  # always the baseline's
        # Other forms have the original images' bytes, or nothing to decode.
        if form not in (*CONTAINERS, "pixels256")
        for name in (*_LIBRARY_DECODERS, OURS, OUR_PART, TURBO_PART)
    ]


def log_left_out(session: Session, records: list[Record]) -> list[Record]:
    """Log which decoders were left out and why; return the records."""
    for one in records:
        for decoder, reason in one.facts.pop("left_out", {}).items():
            session.console.say(f"decode, {one.facts['stored']}: {decoder} is left out: {reason}")
    return records


def bare_decoding(form: Stored, *, on_gpu: bool) -> list[str]:
    """Return the rows of bare decoding, which is the ceiling of loaders.

    fastsiam's decoder is left out, because its savings are part of its pipelines' gain.
    """
    return [
        with_form(name, form) for name in _LIBRARY_DECODERS if (name == _DALI["cuda"]) == on_gpu
    ]


def build_decoding(loading: Loading, form: Stored) -> dict[str, Task]:
    """Build tasks that decode all images, for each installed decoder that accepts them all."""
    store, workers = open_store(Path(loading.data.data), "train"), loading.workers
    data = [bytes(store.read(i)) for i in range(len(store))]
    heads = [store.header(index, one) for index, one in enumerate(data)]
    size = np.array([(head.height, head.width) for head in heads])
    tensors = [torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in data]
    pool = ThreadPoolExecutor(workers)
    torch.set_num_threads(1)

    def in_threads(decode_one: Callable[[int, int], object]) -> Callable[[], object]:
        def decode_share(worker: int) -> None:
            for index in range(worker, len(data), workers):
                decode_one(worker, index)

        return lambda: list(pool.map(decode_share, range(workers)))

    def by_torchvision(_: int, index: int) -> object:
        from torchvision.io import ImageReadMode, decode_image

        return decode_image(tensors[index], ImageReadMode.RGB)

    by_function = partial(_by_function, size=size, data=data, loading=loading)
    makers: dict[str, Callable[[], Callable[[], object]]] = {
        "PIL": lambda: in_threads(lambda _, index: decode(data[index])),
        "torchvision.io": lambda: in_threads(by_torchvision),
        TURBO: lambda: in_threads(by_function(crop_and_skip(), part=False)),
        TURBO_PART: lambda: in_threads(by_function(crop_and_skip(), part=True)),
        OURS: lambda: in_threads(by_function(_fastsiam_decode(), part=False)),
        OUR_PART: lambda: in_threads(by_function(_fastsiam_decode(), part=True)),
    }
    makers[_DALI[loading.device]] = lambda: _by_dali(data, loading)
    tasks: dict[str, Task] = {}
    left_out: dict[str, str] = {}
    for name, make in makers.items():
        try:
            run = make()
            run()
        except (ImportError, OSError, RuntimeError) as error:  # not installed, or rejects an image
            left_out[name] = why(error)
        else:
            tasks[with_form(name, form)] = Task(run, len(data))
    if first := next(iter(tasks), None):
        tasks[first] = replace(tasks[first], facts=lambda: {"left_out": left_out})
    return tasks


def _by_function(
    function: Any, size: NDArray[np.int64], data: Sequence[bytes], loading: Loading, *, part: bool
) -> Callable[[int, int], object]:
    """Return a function that decodes by a C function, given the numbers of a thread and an image.

    ``size`` is (N, 2), height and width. With ``part``, it decodes only what the boxes of all views
    need.
    """
    workers, box = loading.workers, np.concatenate([np.zeros_like(size), size], 1)
    if part:
        index = np.arange(len(size))
        boxes = draw_views(loading.augment, seed=0, epoch=0, index=index, size=size).box
        first, last = boxes[..., :2], boxes[..., :2] + boxes[..., 2:]
        box = np.concatenate([first.min(0), last.max(0)], 1)
    box = np.ascontiguousarray(box, np.int32)
    pixels = [np.empty(3 * int(size.prod(1).max()) + _BEHIND, np.uint8) for _ in range(workers)]
    placements = [np.empty(_BEHIND, np.uint8) for _ in range(workers)]

    def decode_one(worker: int, index: int) -> None:
        image = data[index], len(data[index]), *size[index].tolist(), library.at(box[index])
        if function(*image, library.at(pixels[worker]), library.at(placements[worker])):
            raise RuntimeError(f"it rejects image {index}")

    return decode_one


@cache
def crop_and_skip() -> Any:
    """Compile ``crop_and_skip.cpp`` against the system's libjpeg-turbo and return its function.

    Raises:
        OSError: g++ is not installed.
        RuntimeError: libjpeg-turbo's header is missing, or the system has another libjpeg.
    """
    with tempfile.TemporaryDirectory() as folder:
        shared_object = f"{folder}/crop_and_skip.so"
        command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", "-Wl,-z,defs"]
        command += [str(_CROP_AND_SKIP), "-ljpeg", "-o", shared_object]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"g++ cannot compile {_CROP_AND_SKIP}: {result.stderr}")
        function = ctypes.CDLL(shared_object).crop_and_skip  # stays loaded without its file
    function.argtypes = _ARGUMENTS
    return function


def _fastsiam_decode() -> Any:
    """Return fastsiam's decoder.

    Raises:
        RuntimeError: fastsiam was compiled without libjpeg-turbo.
    """
    function: Any = getattr(library.jpeg(), "fastsiam_decode", None)
    if function is None:
        raise RuntimeError("compiled without libjpeg-turbo")
    function.argtypes = _ARGUMENTS
    return function


def _by_dali(data: Sequence[bytes], loading: Loading) -> Callable[[], object]:
    from nvidia.dali import Pipeline, fn, types

    from fastsiam.pipelines.dali_backend import decoded

    gpu, batch = loading.device == "cuda", loading.batch
    images = [np.frombuffer(one, np.uint8) for one in data]
    batches = [images[i : i + batch] for i in range(0, len(images), batch)]
    turns = cycle(batches)
    # A prefetched batch would be decoded outside the timed region.
    dali = Pipeline(
        batch, loading.workers, 0 if gpu else None, exec_dynamic=True, prefetch_queue_depth=1
    )
    with dali:
        encoded = fn.external_source(lambda: next(turns), dtype=types.UINT8, ndim=1)
        load = DataConfig().dali_hw_decoder_load
        dali.set_outputs(decoded(encoded, gpu=gpu, hw_decoder_load=load))
    dali.build()

    def run() -> None:
        for _ in batches:
            dali.run()

    return run
