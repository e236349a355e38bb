"""Loader of the compiled kernels: selects the library for this CPU and declares its functions.

The structures mirror ``source/job.h``. Libraries that are missing or out of date, as in a new or
updated clone, are compiled first.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import re
import tempfile
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import BackendError
from fastsiam.files import check_private_folder, create_private_folder, quote
from fastsiam.kernels import build
from fastsiam.kernels.cores import cpu_info

if TYPE_CHECKING:
    from filelock import FileLock

log = logging.getLogger(__name__)

CHOICE = "FASTSIAM_CPU"
"""Environment variable that selects a CPU kind instead of the newest supported one."""
_NEEDS = {
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl avx512vbmi avx512_vnni",
    "x86-64-v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe",
    "x86-64-v2": "",
}
"""CPU flags, as in /proc/cpuinfo, that each kind needs in addition to those of older kinds."""
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""A JPEG marker; does not match escaped bytes, restart markers or fill bytes."""


class FinishOf(Structure):
    """Photometric parameters of M crops of one size: ``photometric.operations.Operations``."""

    _fields_ = [
        *((name, c_void_p) for name in ("order", "factor", "gray", "blur", "solarise")),
        *((name, c_void_p) for name in ("scale", "shift", "out")),
        ("type", c_int32),
    ]


class SideOf(Structure):
    """V crops of one size from each of N images: ``fastsiam.pipelines.cuts.Cuts``."""

    _fields_ = [
        ("side", c_int32),
        ("views", c_int32),
        *((name, c_void_p) for name in ("box", "flip", "resized", "corner", "crops")),
        ("finish", POINTER(FinishOf)),
    ]


class JobOf(Structure):
    """A batch of images from which to make crops and views."""

    _fields_ = [
        ("count", c_int64),
        *((name, c_void_p) for name in ("taken", "turn", "address", "bytes", "height", "width")),
        *((name, c_void_p) for name in ("form", "decode")),
        ("sides", c_int32),
        ("side", POINTER(SideOf)),
        *((name, c_void_p) for name in ("refused", "time", "thread")),
    ]


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "make": (c_int64, [POINTER(JobOf)]),
    "make_pixels": (c_int64, [POINTER(JobOf), c_int64, c_void_p]),
    "finish": (c_int64, [c_void_p, c_int64, c_int32, c_int32, POINTER(FinishOf), c_void_p]),
    "normalize": (None, [c_void_p, c_int64, c_int64, c_void_p, c_int32, c_void_p, c_void_p]),
    "read_files": (
        c_int64,
        [c_char_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_void_p],
    ),
    "list_images": (c_int64, [c_char_p, c_char_p, c_void_p, c_int64]),
    "next_marker": (c_int64, [c_void_p, c_int64, c_int64]),
}
"""Result and argument types of the compiled functions, by name without ``fastsiam_``."""


def at(array: NDArray[Any], kind: Any = None) -> int:
    """Return the address of an array's first element.

    Args:
        array: contiguous; the caller must keep it alive while the address is used.
        kind: dtype that the compiled code expects; None skips the check.

    Raises:
        ValueError: the array is not contiguous, or has another dtype.
    """
    if not array.flags.c_contiguous:
        raise ValueError(f"an array of shape {array.shape} is not contiguous; copy it first")
    if kind not in (None, array.dtype):
        raise ValueError(f"an array is {array.dtype}; compiled code expects {np.dtype(kind)}")
    return array.ctypes.data


def address(function: Any) -> int:
    """Return the address of a compiled function.

    Raises:
        ValueError: the function is a null pointer.
    """
    pointer = ctypes.cast(function, c_void_p).value
    if pointer is None:
        raise ValueError(f"{function} is a null pointer")
    return pointer


@cache
def kinds() -> tuple[str, ...]:
    """Return the CPU kinds whose libraries run on this processor, newest first."""
    if platform.machine() != "x86_64":
        return (build.OTHER,)
    flags = set(cpu_info("flags").split())
    supported_kinds: list[str] = []
    for kind, needs in reversed(_NEEDS.items()):
        if not flags.issuperset(needs.split()):
            break
        supported_kinds.insert(0, kind)
    return tuple(supported_kinds)


def kind() -> str:
    """Return the CPU kind in use: ``$FASTSIAM_CPU``, or the newest supported one.

    Raises:
        BackendError: this processor does not support the selected kind.
    """
    choice = os.environ.get(CHOICE) or kinds()[0]
    if choice not in kinds():
        raise BackendError(
            f"{CHOICE}={choice} is not supported by this processor; set it to one of "
            f"{', '.join(kinds())}"
        )
    return choice


def writes_halves() -> bool:
    """Return whether the library in use can output bfloat16 and float16, not only float32.

    Raises:
        BackendError: see ``kind``.
    """
    return kind() in ("x86-64-v4", "x86-64-v3")


def kernels() -> Any:
    """Return the library for this processor.

    Raises:
        BackendError: it cannot be compiled or loaded, or ``kind`` raises.
    """
    return _load(kind())


@cache
def _load(kind: str) -> Any:
    path = _folder() / build.library(kind)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendError(
            f"cannot load the kernels ({error}): they are corrupt or built for another system; run "
            f"`rm {quote(path.parent / build.STAMP)}` and start again to compile them"
        ) from error
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, f"fastsiam_{name}")
        function.restype, function.argtypes = result, arguments
    return library


@cache
def kernels_if_any() -> Any:
    """Return the library for this processor; None if it cannot be compiled or loaded."""
    try:
        return kernels()
    except BackendError:
        return None


def compiled_kernels() -> Any:
    """Return the library for this processor; None if it would have to be compiled first."""
    return kernels_if_any() if _compiled() is not None else None


def next_marker(data: bytes | memoryview, begin: int) -> int:
    """Find the first JPEG marker from ``begin`` on that ends entropy-coded data.

    Returns the offset of its second byte (the one after 0xFF), or -1. With compiled kernels this
    takes 0.01 ms for an ImageNet image and releases the GIL; without, it takes ten times as long.
    """
    if (compiled := kernels_if_any()) is None:
        match = _MARKER.search(data, begin)
        return match.end() - 1 if match else -1
    offset: int = compiled.fastsiam_next_marker(at(np.frombuffer(data, np.uint8)), begin, len(data))
    return offset


@cache
def jpeg() -> Any:
    """Return the JPEG decoder library; None without a suitable libjpeg-turbo.

    A dynamically linked libjpeg-turbo may be missing, or older than at compile time.
    """
    path = _folder() / build.JPEG
    problem = "fastsiam was compiled without libjpeg-turbo's header"
    if path.exists():
        try:
            library = ctypes.CDLL(str(path))
            if library.fastsiam_jpeg_fits():
                return library
            problem = f"libjpeg-turbo is older than {path} needs"
        except OSError as error:
            problem = str(error)
    log.warning(
        f"{problem}: Pillow decodes JPEGs, which is slower; install libjpeg-dev and run "
        "`python -m fastsiam.kernels.build`"
    )
    return None


def decoder_name() -> str:
    """Return a description of the JPEG decoder in use, for ``fastsiam info``."""
    if _compiled() is None:
        return "kernels not compiled yet; the first run compiles them"
    if jpeg() is None:
        return "Pillow (no suitable libjpeg-turbo)"
    version = jpeg().fastsiam_jpeg_version()
    number = f"{version // 1000000}.{version // 1000 % 1000}.{version % 1000}"
    decoder = f"built-in libjpeg-turbo {number}" if version else "the system's libjpeg-turbo"
    return f"{decoder}, which decodes only the parts that crops need"


def _compiled() -> Path | None:
    """Return the folder of the libraries; None if they are missing or out of date."""
    with contextlib.suppress(RuntimeError):  # no home directory, so no cache
        for find in (build.own_folder, build.cache_folder):
            folder = find()
            if build.is_current(folder) and (folder / build.library(kinds()[0])).exists():
                return folder
    return None


@cache
def _folder() -> Path:
    """Return the folder of the libraries, compiling them first if necessary."""
    try:
        folder = _compiled() or build.target_folder()
        create_private_folder(folder)
        if folder != Path(__file__).parent:
            instead = "set XDG_CACHE_HOME to a folder of your own"
            check_private_folder(folder, what="fastsiam's kernels", instead=instead)
        if _compiled() != folder:
            with _build_lock():
                if _compiled() != folder:  # another process may have compiled them meanwhile
                    log.warning("compiling fastsiam's kernels (once, about half a minute)")
                    build.build(folder)
    except (RuntimeError, OSError) as error:  # also RuntimeError: no home directory
        raise BackendError(f"cannot compile fastsiam's kernels: {error}") from error
    return folder


def _build_lock() -> FileLock:
    """Return the lock that this user's processes hold while they compile.

    It is in the system's temporary folder, because not every file system supports locks. filelock
    does not follow symlinks, so other users cannot redirect it.
    """
    from filelock import FileLock  # slow to import, and few processes compile

    path = Path(tempfile.gettempdir()) / f"fastsiam-build-{os.getuid()}"
    return FileLock(path, mode=0o600)
