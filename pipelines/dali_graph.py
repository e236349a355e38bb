"""DALI's graph, from encoded images and boxes to crops."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.views.batch import Shape

from .cuts import Cuts
from .dali_decoder import decoded


def build_graph(
    shapes: Sequence[Shape],
    *,
    threads: int,
    device: int | None,
    hw_decoder_load: float,
    resizes: bool,
) -> Any:
    """Build a graph that takes encoded images and cuts, and returns the crops of each view.

    Args:
        shapes: shape (V, N, S, S, 3) of a batch's crops, for each side.
        threads: number of DALI's threads.
        device: number of the GPU, None for the CPU.
        hw_decoder_load: share of the images that the GPU's JPEG engine decodes.
        resizes: whether it crops and resizes; otherwise it takes no cuts and returns whole images.
    """
    # The decoders' own messages do not name the image; fastsiam's error does.
    os.environ.setdefault("DALI_NVIMGCODEC_LOG_LEVEL", "1")
    from nvidia.dali import Pipeline, types

    dali = Pipeline(
        batch_size=shapes[0][1],
        num_threads=threads,
        device_id=device,
        seed=0,
        # Each schedule_run starts one batch, however many are in flight.
        exec_dynamic=True,
        prefetch_queue_depth=1,
    )
    with dali:
        encoded = _fed("encoded", types.UINT8)
        image = decoded(encoded, gpu=device is not None, hw_decoder_load=hw_decoder_load)
        if resizes:
            dali.set_outputs(*(_view(image, *view) for view in _names(shapes)))
        else:
            dali.set_outputs(image)
    dali.build()
    return dali


def _fed(name: str, kind: Any) -> Any:
    """Add an input: a one-dimensional array for each image, used without a copy."""
    from nvidia.dali import fn

    return fn.external_source(name=name, dtype=kind, ndim=1, no_copy=True)


def _view(image: Any, view: str, side: int) -> Any:
    """Crop a box of an image, resize it or its middle to a square, and flip it if asked."""
    from nvidia.dali import fn, types

    def argument(name: str) -> Any:
        return _fed(name + view, types.FLOAT)

    # The box is copied first, because PIL's filter sees no pixels outside of it. A resize to the
    # same size by nearest neighbours copies it twice as fast as DALI's slice.
    box = fn.resize(
        image,
        size=argument("size"),
        roi_start=argument("start"),
        roi_end=argument("end"),
        interp_type=types.INTERP_NN,
    )
    return fn.resize(
        box,
        size=[side, side],
        roi_start=argument("from"),
        roi_end=argument("to"),
        roi_relative=True,
    )


def _names(shapes: Sequence[Shape]) -> list[tuple[str, int]]:
    """Return the name in DALI's graph and the side of each view."""
    sides = [side for views, _, side, *_ in shapes for _ in range(views)]
    return [(str(number), side) for number, side in enumerate(sides)]


def cut_arguments(cuts: Sequence[Cuts], shapes: Sequence[Shape]) -> dict[str, NDArray[Any]]:
    """Return the graph's inputs: boxes in pixels; flips are boxes from right to left."""
    names, arguments = iter(_names(shapes)), dict[str, NDArray[Any]]()
    for own, shape in zip(cuts, shapes, strict=True):
        boxes = _boxes(own, shape[2])
        for row, (view, _) in enumerate(islice(names, shape[0])):
            for name, array in boxes.items():
                arguments[name + view] = array[row].astype(np.float32)
    return arguments


def _boxes(cuts: Cuts, side: int) -> dict[str, NDArray[Any]]:
    """Return the arguments (V, N, 2) of the views of one side."""
    start, size = cuts.box[..., :2], cuts.box[..., 2:]
    first, last = cuts.corner, cuts.corner + side
    flip = np.stack([np.zeros_like(cuts.flip), cuts.flip], -1)
    return {
        "size": size,
        "start": start,
        "end": start + size,
        "from": np.where(flip, last, first) / cuts.resized,
        "to": np.where(flip, first, last) / cuts.resized,
    }
