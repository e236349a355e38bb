"""DALI's graph: encoded images and boxes in, crops out."""

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
    """Build a graph that takes encoded images and cuts, and makes a list of crops for each view.

    Args:
        shapes: (V, N, S, S, 3) of a batch's crops, one for each side.
        threads: DALI's.
        device: number of the GPU, None for the CPU.
        hw_decoder_load: share of the images that goes to the GPU's JPEG engine.
        resizes: whether it cuts and resizes; else it makes decoded images, and takes no cuts.
    """
    # What DALI's decoders find wrong with an image is said by our error, with its name.
    os.environ.setdefault("DALI_NVIMGCODEC_LOG_LEVEL", "1")
    from nvidia.dali import Pipeline, types

    dali = Pipeline(
        batch_size=shapes[0][1],
        num_threads=threads,
        device_id=device,
        seed=0,
        # Each schedule_run starts one batch, however many are in the air.
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
    """Add an input: one array of one axis for each image, used where it lies."""
    from nvidia.dali import fn

    return fn.external_source(name=name, dtype=kind, ndim=1, no_copy=True)


def _view(image: Any, view: str, side: int) -> Any:
    """Cut a box out of an image, flip it perhaps, and make a square of it or of its middle."""
    from nvidia.dali import fn, types

    def argument(name: str) -> Any:
        return _fed(name + view, types.FLOAT)

    # The box apart: PIL's filter sees nothing beside it. Taking the nearest pixels at their own
    # scale copies them; DALI's slice does that too, at half the speed.
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
    """Return a name in DALI's graph for each view, and its side."""
    sides = [side for views, _, side, *_ in shapes for _ in range(views)]
    return [(str(number), side) for number, side in enumerate(sides)]


def cut_arguments(cuts: Sequence[Cuts], shapes: Sequence[Shape]) -> dict[str, NDArray[Any]]:
    """Return what the graph asks for: boxes in pixels; flips as boxes from right to left."""
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
