"""DALI's graph, from encoded images and boxes to crops, and what its errors mean.

All errors of DALI are a ``RuntimeError`` with a text of many lines. The texts here are those of
DALI 2.4: its executor names the operator, and what that said follows "encountered:".
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from functools import cache
from io import BytesIO
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fastsiam.views.batch import Shape

from .job import Cuts

log = logging.getLogger(__name__)

_REFUSED = re.compile(
    # nvImageCodec's numbers: bad or unsupported code streams, of its own and of its extensions.
    r"`nvidia\.dali\.fn\.decoders\.image`.*encountered:.*"
    r"(Failed to decode sample #\d|nvImageCodec failure: '#(3|4|9|13|14|18|19)')",
    re.DOTALL,
)
_NO_MEMORY = re.compile(
    r"Can't allocate \d+ bytes on (?:host|device \d+)|CUDA allocation failed|std::bad_alloc"
    r"|out of memory|nvImageCodec failure: '#(?:5|15)'"
)
_OF_THE_HOST = re.compile(r"on host|std::bad_alloc")


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


def decoded(encoded: Any, *, gpu: bool, hw_decoder_load: float) -> Any:
    """Add the decoder to a graph: encoded images in, pixels as PIL's out.

    Args:
        encoded: the graph's node of the images' bytes.
        gpu: decode there, within the rounding of another transform; on a CPU pixels are PIL's.
        hw_decoder_load: share of the images that goes to the GPU's JPEG engine.
    """
    from nvidia.dali import fn, types

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


@cache
def say_what_decodes(device: int, hw_decoder_load: float) -> None:
    """Log once, in a machine's first rank, whether a GPU's JPEG engine is in use."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    if hw_decoder_load == 0:
        log.info("DALI leaves the GPU's JPEG engine idle: --set dali_hw_decoder_load=0")
    elif reason := without_engine(device):
        log.info(f"DALI decodes without a JPEG engine of the GPU, on its cores: {reason}")
    else:
        log.info(f"DALI decodes {hw_decoder_load:.0%} of the JPEGs on the GPU's JPEG engine")


def without_engine(device: int) -> str:
    """Ask nvImageCodec, by which DALI decodes, to decode a JPEG on a GPU's JPEG engine alone.

    Returns:
        Why it does not, "" if it does.
    """
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")  # our own log line reports what it lacks
    try:
        from nvidia import nvimgcodec
    except ImportError as error:
        return f"nvImageCodec cannot be asked ({error})"
    jpeg = BytesIO()
    Image.new("RGB", (256, 256)).save(jpeg, "JPEG")
    try:
        decoder = nvimgcodec.Decoder(
            device_id=device,
            max_num_cpu_threads=1,
            backends=[nvimgcodec.Backend(nvimgcodec.HW_GPU_ONLY)],
            options=":fancy_upsampling=1",
        )
        image = decoder.decode(nvimgcodec.CodeStream(jpeg.getvalue()))
    except RuntimeError as error:
        return f"nvImageCodec says: {error}"
    return "" if image is not None else "nvImageCodec finds none"


def refuses_an_image(error: RuntimeError) -> bool:
    """Tell whether DALI's decoder refuses an image, and memory is not what it lacks."""
    return bool(_REFUSED.search(str(error))) and not _NO_MEMORY.search(str(error))


def reason(error: RuntimeError) -> str:
    """Return the line of DALI's text that says what happened."""
    lines = [line.strip(" :") for line in str(error).splitlines()]
    return next((line for line in lines if "sample" in line or "failure" in line), lines[0])


def no_memory(error: RuntimeError, where: str, *, gpu: bool) -> str | None:
    """Return a message if an error means that memory ran out, else None.

    Args:
        error: DALI's.
        where: what DALI was working on.
        gpu: whether it works on a GPU.
    """
    if not (found := _NO_MEMORY.search(str(error))):
        return None
    kind = "GPU memory" if gpu and not _OF_THE_HOST.search(str(error)) else "memory"
    return (
        f"DALI ran out of {kind} at {where} ({found[0]}): lower --batch, --prefetch or --workers, "
        "or choose --pipeline native, which decodes on the CPU"
    )
