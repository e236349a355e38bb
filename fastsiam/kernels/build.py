"""Build script for the compiled kernels: one library per CPU kind, and a JPEG decoder library.

``setup.py`` calls this at installation; in a clone, run ``python -m fastsiam.kernels.build``. It
imports only the standard library, because nothing else is available while a package is built.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("source")
KINDS = {"x86-64-v4": ("avx512vbmi", "avx512vnni"), "x86-64-v3": (), "x86-64-v2": ()}
"""CPU kinds for x86, newest first, with the CPU features each needs beyond its x86-64 level."""
OTHER = "generic"
"""CPU kind for all other processors."""
_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-ffp-contract=off"]
_FLAGS += ["-fvisibility=hidden", "-Wall", "-Wextra", "-fno-exceptions", "-fno-rtti"]
# The "uninitialized" warnings come from GCC 12's own headers. Clang does not know one of the flags.
_FLAGS += ["-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
_FLAGS += ["-Wno-unknown-warning-option"]
_IS_X86 = platform.machine() == "x86_64"
_MACHINE = "" if _IS_X86 else f"-{platform.machine()}"
"""Part of the file names, because processors of several architectures may share the folder."""


def library(kind: str) -> str:
    """Return the file name of the library for a CPU kind."""
    return f"kernels-{kind}{_MACHINE}.so"


FOLDER = "FASTSIAM_KERNELS"
"""Environment variable with another folder for the libraries, such as builds with sanitizers."""
JPEG = library("jpeg")
JPEG_LICENCE = "LICENSE.libjpeg-turbo"
"""Licence of the libjpeg-turbo linked into ``JPEG``; absent if the system's library is used."""
_STATIC = ["-DSTATIC_LIBJPEG", "-Wl,--exclude-libs,ALL", "-l:libjpeg.a"]
"""Linker options for a static libjpeg-turbo, with symbols hidden from any other libjpeg loaded."""
_DYNAMIC = ["-ljpeg"]
_LICENCES = "share/doc/libjpeg*turbo*-dev/copyright"  # in Debian's and Ubuntu's packages
STAMP = f"kernels{_MACHINE}.stamp"
"""File with the hash of the sources that the libraries next to it were built from."""


def own_folder() -> Path:
    """Return the folder for the libraries: ``$FASTSIAM_KERNELS``, or the folder of this module."""
    return Path(os.environ.get(FOLDER) or Path(__file__).parent)


def cache_folder() -> Path:
    """Return the folder for the libraries if ``own_folder`` is not writable.

    Raises:
        RuntimeError: the user has no home directory, as in some containers.
    """
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise RuntimeError(f"{error} Set XDG_CACHE_HOME to a folder of your own") from None
    return Path(base) / "fastsiam" / "kernels" / stamp()[:16]


def target_folder() -> Path:
    """Return the folder to compile into: ``own_folder`` if it is writable or does not exist yet."""
    own = own_folder()
    return own if os.access(own, os.W_OK) or not own.exists() else cache_folder()


def stamp() -> str:
    """Return a hash of the C++ sources and this module."""
    digest = hashlib.sha256()
    for path in sorted([Path(__file__), *SOURCE.glob("*.h"), *SOURCE.glob("*.cpp")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_current(folder: Path) -> bool:
    """Return whether a folder's libraries are up to date; without sources, any stamp counts."""
    if not SOURCE.exists():
        return (folder / STAMP).exists()
    try:
        return (folder / STAMP).read_text() == stamp()
    except OSError:
        return False


def compiler() -> list[str] | None:
    """Return the C++ compiler command: ``$CXX``, a system compiler or ziglang's; None if absent.

    Raises:
        RuntimeError: ``$CXX`` is not a command.
    """
    command = os.environ.get("CXX")
    if command:
        try:
            return shlex.split(command)
        except ValueError as error:  # unbalanced quotes
            raise RuntimeError(f"CXX={command} is not a command: {error}") from error
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name) and _is_new_enough([name]):
            return [name]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    return None


def _is_new_enough(command: list[str]) -> bool:
    """Return whether a compiler supports the newest CPU kind: GCC 11 or Clang 12, or newer."""
    kind = next(iter(KINDS)) if _IS_X86 else OTHER
    check = [*command, "-std=c++17", *_cpu_options(kind), "-fsyntax-only", "-x", "c++", "-"]
    result = subprocess.run(check, input="#include <string.h>\n", capture_output=True, text=True)
    return result.returncode == 0


def build(folder: Path) -> list[Path]:
    """Compile the kernels for this architecture, and the JPEG decoder if libjpeg-turbo is found.

    Args:
        folder: where to put the libraries.

    Returns:
        The paths of the libraries.

    Raises:
        RuntimeError: no compiler was found, ``$CXX`` is not a command, or it failed.
    """
    command = compiler()
    if command is None:
        raise RuntimeError("no C++ compiler found: install g++ 11 or newer, or pip install ziglang")
    folder.mkdir(parents=True, exist_ok=True)
    zig = "ziglang" in command
    flags = [*command, *_FLAGS, *_linker_options(zig=zig)]
    sources = sorted(str(path) for path in SOURCE.glob("*.cpp"))
    jpeg = [path for path in sources if Path(path).name.startswith(("jpeg", "thread_exit"))]
    kernels = [path for path in sources if not Path(path).name.startswith("jpeg")]
    libraries = []
    for kind in KINDS if _IS_X86 else [OTHER]:
        kind_flags = [*flags, *_cpu_options(kind, zig=zig)]
        libraries.append(_compile([*kind_flags, *kernels], folder / library(kind)))
    any_processor = [*flags, *_cpu_options(OTHER, zig=zig)]
    libjpeg = next(
        (options for options in (_STATIC, _DYNAMIC) if _can_link(any_processor, options)), None
    )
    if libjpeg:
        libraries.append(_compile([*any_processor, *jpeg, *libjpeg], folder / JPEG))
    else:
        (folder / JPEG).unlink(missing_ok=True)
    (folder / JPEG_LICENCE).unlink(missing_ok=True)
    if libjpeg == _STATIC:
        for licence in sorted(Path("/usr").glob(_LICENCES))[:1]:
            shutil.copyfile(licence, folder / JPEG_LICENCE)
    (folder / STAMP).write_text(stamp())
    return libraries


def _linker_options(*, zig: bool) -> list[str]:
    """Return linker options that avoid a C++ runtime library; see ``source/thread_exit.cpp``."""
    return ["-nostdlib++", "-s"] if zig else ["-Wl,--as-needed,-z,defs", "-static-libgcc"]


def _cpu_options(kind: str, *, zig: bool = False) -> list[str]:
    """Return the compiler options for a CPU kind; Zig uses different names for CPUs."""
    if kind == OTHER:
        return ["-mcpu=baseline"] if zig else []  # Zig's default is the CPU of this machine
    if zig:
        return ["-mcpu=" + "+".join([kind.replace("-", "_"), *KINDS[kind]])]
    return [
        f"-march={kind}",
        *(f"-m{feature}" for feature in KINDS[kind]),
        "-mprefer-vector-width=512",
    ]


def _compile(command: list[str], target: Path) -> Path:
    """Compile to a temporary folder, then move: processes that use the old library keep it."""
    with tempfile.TemporaryDirectory(prefix="new-", dir=target.parent) as folder:
        new = Path(folder) / target.name
        result = _run([*command, "-o", str(new)])
        if result.returncode:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{result.stderr}")
        sys.stderr.write(result.stderr)
        return new.replace(target)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a compiler with a temporary cache: Zig would leave 0.5 GB in the home directory."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **caches})


def _can_link(command: list[str], libjpeg: list[str]) -> bool:
    """Return whether libjpeg-turbo and its header are installed and link with these options."""
    with tempfile.TemporaryDirectory() as folder:
        source = str(SOURCE / "jpeg_library.cpp")
        return _run([*command, source, *libjpeg, "-o", str(Path(folder, "has"))]).returncode == 0


if __name__ == "__main__":
    try:
        for path in build(target_folder()):
            print(path)
    except (RuntimeError, OSError) as error:
        sys.exit(str(error))
