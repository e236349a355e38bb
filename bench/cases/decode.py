"""How fast decoders are on the bytes alone: the ceiling of a loader."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes.util import find_library
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastsiam.bench.config import CONTAINERS
from fastsiam.bench.contest import Contest, Work
from fastsiam.bench.images import FORMS, Images
from fastsiam.bench.records import Record, record
from fastsiam.bench.session import Session
from fastsiam.bench.timing import Timing
from fastsiam.config import AugmentConfig, DataConfig
from fastsiam.kernels import library
from fastsiam.pipelines import Store, open_store
from fastsiam.views.draws import draw_views

_DECODE = "decode"
_DALI = {"cpu": "DALI", "cuda": "DALI on the GPU"}
ON_GPU = ("nvJPEG", _DALI["cuda"])
"""Those that decode on a GPU."""
OURS, OUR_PART = "fastsiam", "fastsiam: the boxes' part"
"""fastsiam's decoder: of whole images, and of what a step's boxes need."""
TURBO_PART = "libjpeg-turbo with crop and skip"
"""libjpeg-turbo, of what the same boxes need, by its public functions."""
OPTIONAL = {
    "libjpeg-turbo": "libturbojpeg, a package of the system",
    TURBO_PART: "g++ and libjpeg-turbo's header (libjpeg-dev), packages of the system",
    "DALI": "pip install fastsiam[dali]",
    "SPDL": "pip install spdl-io, beside FFmpeg's libraries",
    OURS: "python -m fastsiam.kernels.build, beside libjpeg-turbo's header",
}
"""Those of the CPU that need not be there, and how to get them."""
_BEHIND = 64  # bytes that may be written behind the pixels; what tells where they lie needs fewer
_SOURCE = Path(__file__).with_name("crop_and_skip.cpp")


def measure(session: Session) -> list[Record]:
    """Measure decoders on each form of the images that is encoded."""
    images = session.images(session.loaded_batch)
    with session.contest() as contest:
        enter_decoders(contest, session, images)
        timings = contest.run(session.config.repeats)
    return decode_records(session, images, timings)


def enter_decoders(contest: Contest, session: Session, images: Images) -> None:
    """Have decoders take part, a contender for each form of the images that is encoded."""
    for form in session.config.forms:
        if form in CONTAINERS or FORMS[form].raw:
            continue  # the bytes are the original images', or nothing is to be decoded
        contest.enter(
            f"{_DECODE}, {form}",
            build_decoding,
            path=str(images.folder if form == "original" else images.stored(form)),
            workers=session.workers,
            batch=session.loaded_batch,
            device=session.device,
        )


def decode_records(
    session: Session, images: Images, timings: Mapping[tuple[str, str], Timing]
) -> list[Record]:
    """Return the records of the decoders that took part, and say which did not."""
    for name, install in OPTIONAL.items():
        if not any(work == name for _, work in timings) and not (session.gpu and name == "DALI"):
            session.console.say(f"{name}: left out: it refuses an image, or is missing: {install}")
    return [
        record(
            "decode",
            work if form == "original" else f"{work}, {form}",
            timing,
            facts={"stored": form},
            in_the_clock="encoded bytes in memory to pixels, in as many threads as workers",
            config=session.settings(batch=0, workers=session.workers, data=images.about),
        )
        for (name, work), timing in timings.items()
        if name.startswith(_DECODE)
        for form in [name.partition(", ")[2]]
    ]


def fastest(timings: Mapping[tuple[str, str], Timing], form: str, *, on_gpu: bool) -> Timing | None:
    """Return the timing of bare decoding: of the fastest of others' decoders of whole images.

    What decodes a part only is left out, and so is our own decoder: what they save is part of what
    the pipelines have gained.
    """
    found = [
        timing
        for (name, work), timing in timings.items()
        if name == f"{_DECODE}, {form}" and work not in (OURS, OUR_PART, TURBO_PART)
        if (work in ON_GPU) == on_gpu
    ]
    return max(found, key=lambda timing: timing.rate, default=None)


def build_decoding(*, path: str, workers: int, batch: int, device: str) -> dict[str, Work]:
    """Decode a data set's images with each decoder that is there and takes them all."""
    store = open_store(Path(path), "train")
    data = [bytes(store.read(i)) for i in range(len(store))]
    tensors = [torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in data]
    pool = ThreadPoolExecutor(workers)
    torch.set_num_threads(1)

    def in_threads(one: Callable[[int, int], object]) -> Callable[[], object]:
        def stretch(worker: int) -> None:
            for index in range(worker, len(data), workers):
                one(worker, index)

        return lambda: list(pool.map(stretch, range(workers)))

    def by_torchvision(_: int, index: int) -> object:
        from torchvision.io import ImageReadMode, decode_image

        return decode_image(tensors[index], ImageReadMode.RGB)

    def by_spdl() -> Callable[[], object]:
        from spdl.io import load_image

        return in_threads(lambda _, index: load_image(data[index]))

    makers: dict[str, Callable[[], Callable[[], object]]] = {
        "PIL": lambda: in_threads(lambda _, index: store.decode(index)),
        "torchvision.io": lambda: in_threads(by_torchvision),
        "libjpeg-turbo": lambda: in_threads(_by_turbo(store, data, workers)),
        TURBO_PART: lambda: in_threads(_by_crop_and_skip(store, data, workers)),
        "SPDL": by_spdl,
        OURS: lambda: in_threads(_by_our_own(store, data, workers, part=False)),
        OUR_PART: lambda: in_threads(_by_our_own(store, data, workers, part=True)),
    }
    if device == "cuda":
        makers |= {"nvJPEG": lambda: _by_nvjpeg(tensors, batch)}
    makers[_DALI[device]] = lambda: _by_dali(data, workers, device, batch)
    work: dict[str, Work] = {}
    for name, make in makers.items():
        with contextlib.suppress(ImportError, RuntimeError):  # not there, or refuses one of them
            run = make()
            run()
            work[name] = Work(run, len(data))
    return work


def _by_turbo(store: Store, data: Sequence[bytes], workers: int) -> Callable[[int, int], object]:
    """Return what decodes an image by libjpeg-turbo, by the number of the thread."""
    found = find_library("turbojpeg")
    if found is None:
        raise ImportError("no libturbojpeg")
    turbo: Any = ctypes.CDLL(found)
    pointer, number = ctypes.c_void_p, ctypes.c_int
    turbo.tjInitDecompress.restype = pointer
    turbo.tjDecompress2.argtypes = [pointer, pointer, ctypes.c_ulong, pointer, *[number] * 5]
    size = _sizes(store, data)
    rooms = [np.empty(3 * int(size.prod(1).max()), np.uint8) for _ in range(workers)]
    handles = [turbo.tjInitDecompress() for _ in range(workers)]

    def one(worker: int, index: int) -> None:
        height, width = size[index].tolist()
        into, rgb, accurate = library.at(rooms[worker]), 0, 4096  # TJPF_RGB, TJFLAG_ACCURATEDCT
        encoded = data[index], len(data[index])
        how = width, 0, height, rgb, accurate
        if turbo.tjDecompress2(handles[worker], *encoded, into, *how):
            raise RuntimeError(f"libjpeg-turbo refuses image {index}")

    return one


def _by_crop_and_skip(
    store: Store, data: Sequence[bytes], workers: int
) -> Callable[[int, int], object]:
    """Return what decodes the part that two boxes need by libjpeg-turbo's crop and skip."""
    decode = load_crop_and_skip()
    size = _sizes(store, data)
    box = _parts(size)
    rooms = [np.empty(3 * int(size.prod(1).max()), np.uint8) for _ in range(workers)]
    columns = [np.empty(2, np.uint32) for _ in range(workers)]

    def one(worker: int, index: int) -> None:
        into = library.at(rooms[worker]), library.at(columns[worker])
        if decode(data[index], len(data[index]), library.at(box[index]), *into):
            raise RuntimeError(f"libjpeg-turbo refuses image {index}")

    return one


def _parts(size: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return (N, 4) top, left, bottom, right of what the boxes of two views need.

    Args:
        size: (N, 2) height and width of images; the boxes are drawn with the default settings.
    """
    index = np.arange(len(size))
    boxes = draw_views(AugmentConfig(), seed=0, epoch=0, index=index, size=size).box
    first, last = boxes[..., :2], boxes[..., :2] + boxes[..., 2:]
    return np.ascontiguousarray(np.concatenate([first.min(0), last.max(0)], 1), np.int32)


def _sizes(store: Store, data: Sequence[bytes]) -> NDArray[np.int64]:
    """Return (images, 2) height and width."""
    heads = [store.header(index, one) for index, one in enumerate(data)]
    return np.array([(head.height, head.width) for head in heads])


def _by_our_own(
    store: Store, data: Sequence[bytes], workers: int, *, part: bool
) -> Callable[[int, int], object]:
    """Return what decodes an image as a thread of our pipelines does, by the number of the thread.

    Args:
        store: the images.
        data: their bytes.
        workers: threads.
        part: decode what the boxes of two views need, drawn with the default settings; else all.

    Raises:
        RuntimeError: fastsiam was compiled without libjpeg-turbo.
    """
    decode: Any = getattr(library.jpeg(), "fastsiam_decode", None)
    if decode is None:
        raise RuntimeError("compiled without libjpeg-turbo")
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    decode.argtypes = [pointer, ctypes.c_int64, number, number, pointer, pointer, pointer]
    size = _sizes(store, data)
    whole = np.concatenate([np.zeros_like(size), size], 1)
    box = _parts(size) if part else np.ascontiguousarray(whole, np.int32)
    rooms = [np.empty(3 * int(size.prod(1).max()) + _BEHIND, np.uint8) for _ in range(workers)]
    made = [np.empty(_BEHIND, np.uint8) for _ in range(workers)]  # where the part lies

    def one(worker: int, index: int) -> None:
        height, width = size[index].tolist()
        where = box.ctypes.data + box.strides[0] * index
        into = library.at(rooms[worker]), library.at(made[worker])
        if decode(data[index], len(data[index]), height, width, where, *into):
            raise RuntimeError(f"our decoder refuses image {index}")

    return one


def _by_nvjpeg(tensors: list[torch.Tensor], batch: int) -> Callable[[], object]:
    from torchvision.io import decode_jpeg

    def run() -> None:
        for start in range(0, len(tensors), batch):
            # torchvision decodes on a stream that does not wait for others, so that it overwrites
            # freed memory that is still in use on them (pytorch/vision pull request 9606).
            torch.cuda.synchronize()
            decode_jpeg(tensors[start : start + batch], device="cuda")

    return run


def _by_dali(data: Sequence[bytes], workers: int, device: str, batch: int) -> Callable[[], object]:
    from nvidia.dali import Pipeline, fn, types

    from fastsiam.pipelines.dali_graph import decoded

    images = [np.frombuffer(one, np.uint8) for one in data]
    batches = [images[i : i + batch] for i in range(0, len(images), batch)]
    turns = cycle(batches)
    # No batch is to be made ahead: that would happen outside of the clock.
    dali = Pipeline(
        batch, workers, 0 if device == "cuda" else None, exec_dynamic=True, prefetch_queue_depth=1
    )
    with dali:
        encoded = fn.external_source(lambda: next(turns), dtype=types.UINT8, ndim=1)
        load = DataConfig().dali_hw_decoder_load
        image = decoded(encoded, gpu=device == "cuda", hw_decoder_load=load)
        dali.set_outputs(image)
    dali.build()

    def run() -> None:
        for _ in batches:
            dali.run()

    return run


def load_crop_and_skip() -> Any:
    """Compile the source against the system's libjpeg-turbo and return its function.

    Raises:
        RuntimeError: g++ or libjpeg-turbo's header is missing, or the system's libjpeg is another.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise RuntimeError("no g++ to compile crop_and_skip.cpp: install g++")
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/crop_and_skip.so"
        command = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", "-Wl,-z,defs"]
        command += [str(_SOURCE), "-ljpeg", "-o", library]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"g++ cannot compile {_SOURCE}: {done.stderr}")
        function = ctypes.CDLL(library).crop_and_skip  # it stays loaded without its file
    pointer = ctypes.c_void_p
    function.argtypes = [pointer, ctypes.c_uint64, pointer, pointer, pointer]
    return function
