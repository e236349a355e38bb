"""Decoders at work on encoded images in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fastsiam.bench.contest import Work
from fastsiam.config import DataConfig
from fastsiam.pipelines import open_store
from fastsiam.pipelines.store.beton import BetonStore

_DALI = {"cpu": "DALI", "cuda": "DALI on the GPU"}
ON_GPU = ("nvJPEG", _DALI["cuda"])
"""Those that decode on a GPU."""


def build_decoding(
    *, path: str, beton: str, workers: int, batch: int, device: str
) -> dict[str, Work]:
    """Decode the images of a folder with each decoder that is there and takes them all."""
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

    def by_turbo() -> Callable[[], object]:
        from fastsiam.pipelines.ffcv_decoder import Decompressor

        converted = BetonStore(Path(beton) / "train.beton")
        largest = int((converted.height.astype(int) * converted.width).max())
        own = [Decompressor(largest) for _ in range(workers)]

        def one(worker: int, index: int) -> None:
            if not own[worker].decode(converted, index):
                raise RuntimeError(f"libjpeg-turbo refuses image {index}")

        return in_threads(one)

    makers = {
        "PIL": lambda: in_threads(lambda _, index: store.decode(index)),
        "torchvision.io": lambda: in_threads(by_torchvision),
        "libjpeg-turbo": by_turbo,
    }
    if device == "cuda":
        makers |= {"nvJPEG": lambda: _by_nvjpeg(tensors, batch)}
    makers[_DALI[device]] = lambda: _by_dali(data, store.dimensions(), workers, device, batch)
    work = {}
    for name, make in makers.items():
        with contextlib.suppress(ImportError, RuntimeError):  # not there, or refuses one of them
            run = make()
            run()
            work[name] = Work(run, len(data))
    return work


def _by_nvjpeg(tensors: list[torch.Tensor], batch: int) -> Callable[[], object]:
    from torchvision.io import decode_jpeg

    def run() -> None:
        for start in range(0, len(tensors), batch):
            decode_jpeg(tensors[start : start + batch], device="cuda")

    return run


def _by_dali(
    data: Sequence[bytes],
    dimensions: NDArray[np.int64] | None,
    workers: int,
    device: str,
    batch: int,
) -> Callable[[], object]:
    from nvidia.dali import Pipeline, fn, types

    from fastsiam.pipelines.dali_decoder import decoded

    images = [np.frombuffer(one, np.uint8) for one in data]
    batches = [images[i : i + batch] for i in range(0, len(images), batch)]
    turns = cycle(batches)
    # No batch is to be made ahead: that would happen outside of the clock.
    dali = Pipeline(
        batch, workers, 0 if device == "cuda" else None, exec_dynamic=True, prefetch_queue_depth=1
    )
    with dali:
        encoded = fn.external_source(lambda: next(turns), dtype=types.UINT8, ndim=1)
        image = decoded(
            encoded,
            gpu=device == "cuda",
            batch=batch,
            hw_decoder_load=DataConfig().dali_hw_decoder_load,
            dimensions=dimensions,
        )
        dali.set_outputs(image)
    dali.build()

    def run() -> None:
        for _ in batches:
            dali.run()

    return run
