"""DALI's graph, from encoded images and boxes to crops."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.views.batch import Shape

from .cuts import Cuts

# The decoders' own messages do not name the image; fastsiam's error does.
os.environ.setdefault("DALI_NVIMGCODEC_LOG_LEVEL", "1")
from nvidia.dali import Pipeline, fn, types

_REFUSED = re.compile(
    # nvImageCodec's numbers: bad or unsupported code streams, of its own and of its extensions.
    r"`nvidia\.dali\.fn\.decoders\.image`.*encountered:.*"
    r"(Failed to decode sample #\d|nvImageCodec failure: '#(3|4|9|13|14|18|19)')",
    re.DOTALL,
)
"""DALI 2.4's text where its decoder refuses an image: its executor names the operator."""


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
        image = decoded(
            _fed("encoded", types.UINT8), gpu=device is not None, hw_decoder_load=hw_decoder_load
        )
        if resizes:
            sides = [side for views, _, side, *_ in shapes for _ in range(views)]
            dali.set_outputs(*(_view(image, view, side) for view, side in enumerate(sides)))
        else:
            dali.set_outputs(image)
    dali.build()
    return dali


def decoded(encoded: Any, *, gpu: bool, hw_decoder_load: float) -> Any:
    """Add the decoder to a graph: encoded images in, pixels as PIL's out.

    Args:
        encoded: the graph's node of the images' bytes.
        gpu: decode there, within the rounding of another transform; on a CPU pixels are PIL's.
        hw_decoder_load: share of the images that goes to the GPU's JPEG engine.
    """
    own: dict[str, Any] = {"device": "cpu"}
    if gpu:
        own = {"device": "mixed", "hw_decoder_load": hw_decoder_load}
    return fn.decoders.image(
        encoded,
        **own,
        output_type=types.RGB,
        adjust_orientation=False,
        jpeg_fancy_upsampling=True,  # as PIL, not nvJPEG's own way
    )


def _fed(name: str, kind: Any) -> Any:
    """Add an input: a one-dimensional array for each image, used without a copy."""
    return fn.external_source(name=name, dtype=kind, ndim=1, no_copy=True)


def _view(image: Any, view: int, side: int) -> Any:
    """Crop a box of an image, resize it or its middle to a square, and flip it if asked."""
    size, start, end, first, last = (
        _fed(f"{name}{view}", types.FLOAT) for name in ("size", "start", "end", "from", "to")
    )
    # The box is copied first, because PIL's filter sees no pixels outside of it. A resize to the
    # same size by nearest neighbours copies it twice as fast as DALI's slice.
    box = fn.resize(image, size=size, roi_start=start, roi_end=end, interp_type=types.INTERP_NN)
    return fn.resize(box, size=[side, side], roi_start=first, roi_end=last, roi_relative=True)


def cut_arguments(cuts: Sequence[Cuts], shapes: Sequence[Shape]) -> dict[str, NDArray[Any]]:
    """Return the graph's inputs: boxes in pixels; flips are boxes from right to left."""
    arguments, view = dict[str, NDArray[Any]](), 0
    for own, (_, _, side, *_) in zip(cuts, shapes, strict=True):
        start, size = own.box[..., :2], own.box[..., 2:]
        first, last = own.corner, own.corner + side
        flip = np.stack([np.zeros_like(own.flip), own.flip], -1)
        boxes = {
            "size": size,
            "start": start,
            "end": start + size,
            "from": np.where(flip, last, first) / own.resized,
            "to": np.where(flip, first, last) / own.resized,
        }
        for row in range(len(flip)):
            for name, array in boxes.items():
                arguments[f"{name}{view}"] = array[row].astype(np.float32)
            view += 1
    return arguments


def refuses_an_image(error: RuntimeError) -> bool:
    """Tell whether DALI's decoder refuses an image."""
    return bool(_REFUSED.search(str(error)))
