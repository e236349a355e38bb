"""The compiled kernels: which library fits this processor, and what its functions take.

The structures mirror ``source/job.h``. Where the libraries are missing or older than their sources,
as in a clone that was never installed or has just been updated, they are compiled first.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import tempfile
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastsiam.errors import BackendError
from fastsiam.files import require_own
from fastsiam.kernels import build

if TYPE_CHECKING:
    from filelock import FileLock

log = logging.getLogger(__name__)

CHOICE = "FASTSIAM_CPU"
"""The variable that names another kind of library than the newest one that can run here."""
_BUILD = "python -m fastsiam.kernels.build"
_NEEDS = {
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl avx512vbmi avx512_vnni",
    "x86-64-v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe",
    "x86-64-v2": "",
}
"""What each kind needs beyond those below it, as Linux names it."""


class CutsOf(Structure):
    """V crops of each of N images; ``fastsiam.pipelines.job.Cuts``."""

    _fields_ = [(name, c_void_p) for name in ("box", "flip", "resized", "corner")]


class FinishOf(Structure):
    """The photometric stage of M crops of one side; ``photometric.operations.Operations``."""

    _fields_ = [
        *((name, c_void_p) for name in ("order", "factor", "gray", "blur", "solarise")),
        *((name, c_void_p) for name in ("scale", "shift", "out")),
        ("type", c_int32),
    ]


class SideOf(Structure):
    """The crops of one side."""

    _fields_ = [
        ("side", c_int32),
        ("views", c_int32),
        ("cuts", CutsOf),
        ("crops", c_void_p),
        ("finish", POINTER(FinishOf)),
    ]


class JobOf(Structure):
    """A batch to be made."""

    _fields_ = [
        ("count", c_int64),
        *((name, c_void_p) for name in ("taken", "turn", "address", "bytes", "height", "width")),
        ("form", c_void_p),
        ("decode", c_void_p),
        ("sides", c_int32),
        ("side", POINTER(SideOf)),
        ("refused", c_void_p),
        ("time", c_void_p),
        ("thread", c_void_p),
    ]


def at(array: NDArray[Any] | None, kind: Any = None) -> int | None:
    """Return the address of an array's first element.

    Args:
        array: contiguous; its owner has to keep it as long as the address is used.
        kind: the numpy type that compiled code takes it for.

    Raises:
        ValueError: it is not contiguous, or of another type.
    """
    if array is None:
        return None
    if not array.flags.c_contiguous:
        raise ValueError(f"an array of shape {array.shape} is not contiguous: copy it first")
    if kind not in (None, array.dtype):
        raise ValueError(f"an array is {array.dtype}: compiled code takes {np.dtype(kind)}")
    return array.ctypes.data


def address(function: Any) -> int:
    """Return where a library's function is.

    Raises:
        ValueError: it is a null pointer.
    """
    place = ctypes.cast(function, c_void_p).value
    if place is None:
        raise ValueError(f"{function} is a null pointer")
    return place


@cache
def kinds() -> tuple[str, ...]:
    """Return the kinds of libraries that this processor can run, the newest first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return (build.OTHER,)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    run: list[str] = []
    for kind, needs in reversed(_NEEDS.items()):
        if not flags.issuperset(needs.split()):
            break
        run.insert(0, kind)
    return tuple(run)


def kind() -> str:
    """Return the kind of library in use: ``$FASTSIAM_CPU``, or the newest that can run here.

    Raises:
        BackendError: this processor cannot run the one that is asked for.
    """
    chosen = os.environ.get(CHOICE) or kinds()[0]
    if chosen not in kinds():
        raise BackendError(f"${CHOICE} is {chosen}; this processor can run {', '.join(kinds())}")
    return chosen


def writes_halves() -> bool:
    """Tell whether the library in use writes bfloat16 and float16; others write float32 alone.

    Raises:
        BackendError: as ``kind``.
    """
    return kind() in ("x86-64-v4", "x86-64-v3")


def kernels() -> Any:
    """Return the library of this processor's kind.

    Raises:
        BackendError: it is not there and cannot be compiled.
    """
    return _load(kind())


@cache
def _load(kind: str) -> Any:
    path = _folder() / build.library(kind)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendError(
            f"the kernels cannot be loaded ({error}): they are damaged, or another system's; "
            f"remove {path.parent / build.STAMP} to have them compiled again"
        ) from error
    library.fastsiam_make.argtypes = [POINTER(JobOf)]
    library.fastsiam_make.restype = c_int64
    library.fastsiam_make_pixels.argtypes = [POINTER(JobOf), c_int64, c_void_p]
    library.fastsiam_make_pixels.restype = c_int64
    library.fastsiam_finish.argtypes = [c_void_p, c_int64, c_int32, c_int32]
    library.fastsiam_finish.argtypes += [POINTER(FinishOf), c_void_p]
    library.fastsiam_finish.restype = c_int64
    library.fastsiam_normalize.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_int32]
    library.fastsiam_normalize.argtypes += [c_void_p, c_void_p]
    library.fastsiam_normalize.restype = None
    library.fastsiam_read_files.argtypes = [c_char_p, c_void_p, c_int64, c_void_p, c_int64]
    library.fastsiam_read_files.argtypes += [c_void_p, c_int64, c_void_p]
    library.fastsiam_read_files.restype = c_int64
    return library


@cache
def jpeg() -> Any:
    """Return the library that decodes JPEGs, None if it lacks libjpeg-turbo.

    Where libjpeg-turbo is not inside, the system's can be older than at compile time, or missing.
    """
    path = _folder() / build.JPEG
    if not path.exists():
        return None
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        log.warning(f"{error}; to compile it anew: {_BUILD}")
        return None
    if not library.fastsiam_jpeg_fits():
        log.warning(f"libjpeg-turbo is older than the one that {path} is for; {_BUILD}")
        return None
    return library


def decoder_name() -> str:
    """Return what decodes JPEGs for the kernels; says so if these are not compiled yet."""
    try:
        if _compiled() is None:
            return "not compiled yet: the first run does, or fastsiam info --warm"
    except RuntimeError as error:
        return f"not compiled: {error}"
    if jpeg() is None:
        return "Pillow (no libjpeg-turbo that fits)"
    version = jpeg().fastsiam_jpeg_version()
    inside = f"{version // 1000000}.{version // 1000 % 1000}.{version % 1000} inside"
    which = f"libjpeg-turbo {inside}" if version else "the system's libjpeg-turbo"
    return f"{which}, no more of each than its crops need"


def _compiled() -> Path | None:
    """Return where the libraries are, None if they are not there or older than their sources.

    Raises:
        RuntimeError: they are not in the package, and nobody has a home to look in.
    """
    own = build.own_folder()
    if _is_ready(own):
        return own
    kept = build.cache_folder()
    return kept if _is_ready(kept) else None


@cache
def _folder() -> Path:
    """Return where the libraries are, which are compiled if need be.

    Raises:
        BackendError: they are not there and cannot be compiled.
    """
    try:
        found = _compiled()
        if found:
            _require_own(found)
            return found
        own = build.own_folder()
        folder = own if os.access(own, os.W_OK) else build.cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        _require_own(folder)
        with _build_lock():
            if not _is_ready(folder):  # another process may have compiled them meanwhile
                log.warning("compiling fastsiam's kernels, once (half a minute)")
                build.build(folder)
    except (RuntimeError, OSError) as error:  # the first also where nobody has a home
        raise BackendError(f"fastsiam's kernels are not compiled: {error}") from error
    return folder


def _require_own(folder: Path) -> None:
    """Refuse libraries of the user's cache that somebody else could have put there."""
    if folder != Path(__file__).parent:
        instead = "name another cache, by XDG_CACHE_HOME"
        require_own(folder, what="fastsiam's kernels", instead=instead)


def _build_lock() -> FileLock:
    """Return the lock that this user's processes hold while they compile.

    It is in a folder of the system's, because not every file system has locks. filelock follows no
    link, by which another user could have this process open a file of its own.
    """
    from filelock import FileLock  # its import is slow, and few processes compile

    path = Path(tempfile.gettempdir()) / f"fastsiam-build-{os.getuid()}"
    return FileLock(path, mode=0o600)


def _is_ready(folder: Path) -> bool:
    """Tell whether a folder has the libraries of these sources, and for such a processor."""
    return build.is_current(folder) and (folder / build.library(kinds()[0])).exists()
