"""The CPU's kernels at work, stage by stage, in one thread."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastsiam.bench.contest import Work
from fastsiam.bench.contestants.decode import by_our_own
from fastsiam.config import AugmentConfig
from fastsiam.kernels import library
from fastsiam.pipelines import Store, open_store
from fastsiam.pipelines.cuts import Cuts, cut_views
from fastsiam.pipelines.job import Images, Job
from fastsiam.views.draws import BRIGHTNESS, CONTRAST, HUE, NO_LEVEL, SATURATION, draw_views
from fastsiam.views.photometric.cpu import Stage
from fastsiam.views.photometric.operations import NOTHING, Operations, operations
from fastsiam.views.photometric.reference import box_weights

_SIGMAS = (0.4, 0.8, 1.2, 1.6, 2.0)
_JITTER = {"brightness": BRIGHTNESS, "contrast": CONTRAST, "saturation": SATURATION, "hue": HUE}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SHAPES = {
    "as large": (1.0, 1.0),
    "from twice as wide": (1.0, 2.0),
    "from twice as high": (2.0, 1.0),
    "from twice as large": (2.0, 2.0),
    "from four times as large": (4.0, 4.0),
    "from half as large": (0.5, 0.5),
}
"""Boxes beside the crop that is made of them: height and width."""
_FACTORS = (1.2, 1.2, 1.2, 0.05)
"""Of the jitter's operations, in torchvision's order."""


def build_cycles(*, path: str, augment: AugmentConfig, images: int, kind: str) -> dict[str, Work]:
    """Return each stage as a piece of work of its own, with what a pixel of it takes as facts.

    Args:
        path: class folders of JPEGs.
        augment: for the boxes, and the side of the first view.
        images: how many of them are decoded; as many crops go through the photometric stage.
        kind: of the library.
    """
    os.environ[library.CHOICE] = kind
    torch.set_num_threads(1)
    store = open_store(Path(path), "train")
    pixels = [np.ascontiguousarray(store.decode(i)) for i in range(images)]
    crop_work, crops = _crops(pixels, augment)
    work = _decoding(store, pixels) | crop_work | _photometric(crops, augment)
    return {name: _watched(*what) for name, what in work.items()}


_Stage = tuple[Callable[[], object], int]
"""What does it once, and of how many pixels."""


def _watched(run: Callable[[], object], pixels: int) -> Work:
    """Return a piece of work that takes its own time: the contest's clock of CPU time is coarse."""
    spent: list[float] = []

    def timed() -> None:
        began = time.thread_time()
        run()
        spent.append(time.thread_time() - began)

    def facts() -> dict[str, Any]:
        of_a_pixel = statistics.median(spent[1:] or spent) / pixels  # the first warms up
        rate = ticks_a_second()
        cycles = {"cycles": of_a_pixel * rate, "clock": f"{rate / 1e9:.2f} GHz"} if rate else {}
        return {"ns": 1e9 * of_a_pixel, "pixels": pixels} | cycles

    return Work(timed, 0, facts)


def _decoding(store: Store, pixels: list[NDArray[np.uint8]]) -> dict[str, _Stage]:
    """Decode the JPEGs among the images; a pixel is one that is decoded."""
    data = [bytes(store.read(i)) for i in range(len(pixels))]
    if library.jpeg() is None:
        return {}
    work: dict[str, _Stage] = {}
    for name, part in (("decode, the whole", False), ("decode, the boxes' part", True)):
        one, box = by_our_own(store, data, 1, part=part)

        def run(one: Callable[[int, int], object] = one) -> None:
            for index in range(len(data)):
                one(0, index)

        count = int((box[:, 2:] - box[:, :2]).prod(1).sum())
        try:
            run()
        except RuntimeError:  # one of them is no JPEG
            continue
        work[name] = run, count
    return work


def _crops(
    pixels: list[NDArray[np.uint8]], augment: AugmentConfig
) -> tuple[dict[str, _Stage], NDArray[np.uint8]]:
    """Cut crops as they are drawn, and of boxes of a few shapes; a pixel is one of a crop.

    Returns:
        The work, and the crops (V * N, S, S, 3) of the first side.
    """
    side, count = next(iter(augment.by_side)), len(pixels)
    size = np.array([image.shape[:2] for image in pixels])
    params = draw_views(augment, seed=0, epoch=0, index=np.arange(count), size=size)
    drawn = cut_views(params, augment)[0]
    out = torch.empty((*drawn.flip.shape, side, side, 3), dtype=torch.uint8)

    def cutting(images: list[NDArray[np.uint8]], cuts: Cuts) -> _Stage:
        own = out[: len(cuts.flip)]

        def run() -> None:
            Job(Images.of_arrays(images), [cuts], [side], (own,)).run()

        return run, cuts.flip.size * side * side

    work = {"crop, boxes as drawn": cutting(pixels, drawn)}
    for name, (tall, wide) in _SHAPES.items():
        box = np.array([0, 0, round(side * tall), round(side * wide)], np.int32)
        image = np.random.default_rng(0).integers(0, 256, (*box[2:], 3), np.uint8)
        boxes = np.tile(box, (1, count, 1))
        resized = np.full((1, count, 2), side, np.int32)
        flip = np.arange(count)[None] % 2 == 1
        cuts = Cuts(boxes, flip, resized, np.zeros_like(resized))
        work[f"crop, {name}"] = cutting([image] * count, cuts)
    work["crop, boxes as drawn"][0]()
    return work, out.flatten(0, 1).numpy().copy()


def _photometric(crops: NDArray[np.uint8], augment: AugmentConfig) -> dict[str, _Stage]:
    """Take crops through one operation each, and the normalisation, which is never left out."""
    count, side = crops.shape[:2]
    finish, taken = library.kernels().fastsiam_finish, np.zeros(1, np.int64)

    def through(what: Operations, dtype: torch.dtype = torch.float32) -> _Stage:
        stage = Stage(what, augment, side, side, dtype)

        def run() -> None:
            taken[0] = 0
            finish(library.at(crops), count, side, side, stage.compiled, library.at(taken))

        return run, count * side * side

    def alone(**what: Any) -> Operations:
        neutral: Mapping[str, Any] = {
            "order": np.full((count, 4), NOTHING, np.int8),
            "factor": np.tile(np.array(_FACTORS, np.float32), (count, 1)),
            "gray": np.zeros(count, np.bool_),
            "blur": np.zeros(count, np.float32),
            "solarise": np.full(count, NO_LEVEL, np.int16),
        }
        return Operations(**{**neutral, **what})

    work = {f"normalise, {str(d).partition('.')[2]}": through(alone(), d) for d in _DTYPES}
    for name, number in _JITTER.items():
        order = np.full((count, 4), NOTHING, np.int8)
        order[:, 0] = number
        work[name] = through(alone(order=order))
    everything = np.tile(np.array([BRIGHTNESS, CONTRAST, SATURATION, HUE], np.int8), (count, 1))
    work["all four of the jitter"] = through(alone(order=everything))
    work["gray"] = through(alone(gray=np.ones(count, np.bool_)))
    work["solarise"] = through(alone(solarise=np.full(count, 128, np.int16)))
    for sigma in _SIGMAS:
        blur = np.full(count, sigma, np.float32)
        radius = int(box_weights(blur[:1])[2][0])
        work[f"blur, sigma {sigma:g} (radius {radius})"] = through(alone(blur=blur))
    index, size = np.arange(count // len(augment.views) or 1), [(400, 400)]
    drawn = draw_views(augment, seed=0, epoch=0, index=index, size=size * len(index))
    own = operations(drawn, augment)[0]
    if len(own.order) == count:
        work["photometric stage as drawn"] = through(own)
    return work


def ticks_a_second() -> float | None:
    """Return the rate of the processor's time-stamp counter in Hz; None where there is none.

    It counts at one rate, whatever the rate at which the cores run at the time.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    code = bytes.fromhex("0f31 48c1e220 4809d0 c3")  # rdtsc; shl rdx, 32; or rax, rdx; ret
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # a hardened system
        return None
    page.write(code)
    counter = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    ticks, began = counter(), time.perf_counter()
    time.sleep(0.05)
    return float((counter() - ticks) / (time.perf_counter() - began))
