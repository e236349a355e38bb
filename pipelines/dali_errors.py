"""What DALI's errors mean: an image that it refuses, too little memory, or something else.

All of them are a ``RuntimeError`` with a text of many lines. The texts are those of DALI 2.4: its
executor names the operator, and after "encountered:" stands what that said.
"""

from __future__ import annotations

import re

_REFUSED = re.compile(
    # nvImageCodec's numbers: bad or unsupported code streams, of its own and of its extensions.
    r"`nvidia\.dali\.fn\.decoders\.image(?:_slice)?`.*encountered:.*"
    r"(Failed to decode sample #\d|nvImageCodec failure: '#(3|4|9|13|14|18|19)')",
    re.DOTALL,
)
_NO_MEMORY = re.compile(
    r"Can't allocate \d+ bytes on (?:host|device \d+)|CUDA allocation failed|std::bad_alloc"
    r"|out of memory|nvImageCodec failure: '#(?:5|15)'"
)
_OF_THE_HOST = re.compile(r"on host|std::bad_alloc")


def refuses_an_image(error: RuntimeError) -> bool:
    """Tell whether DALI's decoder complains of an image, and of nothing else."""
    return bool(_REFUSED.search(str(error))) and not _NO_MEMORY.search(str(error))


def reason(error: RuntimeError) -> str:
    """Return the line of DALI's text that says what happened."""
    lines = [line.strip(" :") for line in str(error).splitlines()]
    return next((line for line in lines if "sample" in line or "failure" in line), lines[0])


def no_memory(error: RuntimeError, where: str, *, gpu: bool) -> str | None:
    """Return what to say of an error if memory is what it lacks, else None.

    Args:
        error: DALI's.
        where: what it was at.
        gpu: whether it works on one.
    """
    if not (found := _NO_MEMORY.search(str(error))):
        return None
    kind = "GPU memory" if gpu and not _OF_THE_HOST.search(str(error)) else "memory"
    return (
        f"DALI ran out of {kind} at {where} ({found[0]}): lower --batch, --prefetch or --workers, "
        "or choose --pipeline ffcv or torchvision, which decode on the CPU"
    )
