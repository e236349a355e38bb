"""DALI's decoder: its settings, whether it uses a JPEG engine, and what its errors mean.

All errors of DALI are a ``RuntimeError`` with a text of many lines. The texts here are those of
DALI 2.4: its executor names the operator, and what that said follows "encountered:".
"""

from __future__ import annotations

import logging
import os
import re
from functools import cache
from io import BytesIO
from typing import Any

from PIL import Image

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
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")  # what it misses is said by our line
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
