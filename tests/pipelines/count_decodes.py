"""Prints how many JPEGs libjpeg-turbo decodes in an epoch of the ffcv pipeline: by five views.

Run as a module, the data as its argument, with a cache folder of numba's own: compiled code finds a
function that counts in the place of libjpeg-turbo's, and no other process is to find that.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from llvmlite import binding

from fastsiam.config import DataConfig
from fastsiam.pipelines import build_loader, ffcv_library
from tests.views.cases import UNEQUAL

POINTER, INT = ctypes.c_void_p, ctypes.c_int
ARGUMENTS = POINTER, POINTER, ctypes.c_uint64, POINTER, *[INT] * 5


def main(data: str) -> int:
    decoded: list[int] = []
    decompress: Any = ctypes.CDLL(ffcv_library.PATH).tjDecompress2
    decompress.argtypes, decompress.restype = ARGUMENTS, INT

    def count(*arguments: Any) -> int:
        decoded.append(arguments[2])
        return int(decompress(*arguments))

    counted = ctypes.CFUNCTYPE(INT, *ARGUMENTS)(count)
    binding.add_symbol("tjDecompress2", ctypes.cast(counted, POINTER).value)
    loader = build_loader(DataConfig(data=data, pipeline="ffcv", workers=2), UNEQUAL, batch=8)
    for _ in loader.epoch(0):
        pass
    loader.close()
    return len(decoded)


if __name__ == "__main__":
    print(main(sys.argv[1]))
