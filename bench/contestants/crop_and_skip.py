"""Compiles and loads ``crop_and_skip.cpp``: how libjpeg-turbo decodes a part of an image."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).with_name("crop_and_skip.cpp")


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
