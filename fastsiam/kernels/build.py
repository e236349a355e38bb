"""Compiles the kernels: one library for each kind of processor, and one that decodes JPEGs.

``setup.py`` calls this when the package is installed; ``python -m fastsiam.kernels.build`` does the
same in a clone. Standard library only, because nothing else is there when a package is built.
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
"""Kinds of x86 processors, the newest first, and what each is to have beyond its level."""
OTHER = "generic"
"""What is compiled for other processors."""
_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-ffp-contract=off"]
_FLAGS += ["-fvisibility=hidden", "-Wall", "-Wextra", "-fno-exceptions", "-fno-rtti"]
# Two are for GCC 12's own headers, and Clang does not know one of them.
_FLAGS += ["-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
_FLAGS += ["-Wno-unknown-warning-option"]


def library(kind: str) -> str:
    """Return the file name of a kind's library."""
    return f"kernels-{kind}.so"


FOLDER = "FASTSIAM_KERNELS"
"""The variable that names another folder of libraries than the package, as for sanitized ones."""
JPEG = "kernels-jpeg.so"
JPEG_LICENCE = "LICENSE.libjpeg-turbo"
"""The licence of the libjpeg-turbo inside ``JPEG``; missing where the system's is used."""
_STATIC = ["-DSTATIC_LIBJPEG", "-Wl,--exclude-libs,ALL", "-l:libjpeg.a"]
"""Links libjpeg-turbo so that no other libjpeg in the process can see or replace its symbols."""
_DYNAMIC = ["-ljpeg"]
_LICENCES = "share/doc/libjpeg*turbo*-dev/copyright"  # of Debian's and Ubuntu's packages
STAMP = "kernels.stamp"
"""The file that says which sources the libraries beside it were made of."""


def own_folder() -> Path:
    """Return where libraries belong: ``$FASTSIAM_KERNELS``, or beside this file."""
    return Path(os.environ.get(FOLDER) or Path(__file__).parent)


def cache_folder() -> Path:
    """Return where libraries go if their own folder cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fastsiam" / "kernels" / stamp()[:16]


def stamp() -> str:
    """Return a text that changes with the sources."""
    whole = hashlib.sha256()
    for path in sorted([Path(__file__), *SOURCE.glob("*.h"), *SOURCE.glob("*.cpp")]):
        whole.update(path.read_bytes())
    return whole.hexdigest()


def is_current(folder: Path) -> bool:
    """Tell whether a folder's libraries were made of these sources, if there are sources."""
    if not SOURCE.exists():
        return (folder / STAMP).exists()
    try:
        return (folder / STAMP).read_text() == stamp()
    except OSError:
        return False


def compiler() -> list[str] | None:
    """Return the command that compiles C++: ``$CXX``, the system's, or the one of ziglang."""
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name) and _is_new_enough([name]):
            return [name]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    return None


def _is_new_enough(command: list[str]) -> bool:
    """Tell whether a compiler knows the kinds of processors: GCC from 11 on, Clang from 12 on."""
    kind = next(iter(KINDS)) if _is_x86() else OTHER
    tried = [*command, "-std=c++17", *_processor(kind), "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(tried, input="#include <string.h>\n", capture_output=True, text=True)
    return done.returncode == 0


def _is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def build(folder: Path) -> list[Path]:
    """Compile what can be compiled here.

    Args:
        folder: where the libraries shall lie.

    Returns:
        The libraries.

    Raises:
        RuntimeError: there is no compiler, or it fails.
    """
    command = compiler()
    if command is None:
        raise RuntimeError("no C++ compiler found: install g++ 11 or newer, or pip install ziglang")
    folder.mkdir(parents=True, exist_ok=True)
    zig = "ziglang" in command
    flags = [*command, *_FLAGS, *_linked(zig=zig)]
    sources = sorted(str(path) for path in SOURCE.glob("*.cpp"))
    jpeg = [path for path in sources if Path(path).name.startswith(("jpeg", "thread_exit"))]
    kernels = [path for path in sources if not Path(path).name.startswith("jpeg")]
    made = []
    for kind in KINDS if _is_x86() else [OTHER]:
        own = [*flags, *_processor(kind, zig=zig)]
        made.append(_compile([*own, *kernels], folder / library(kind)))
    for old in (JPEG, JPEG_LICENCE):
        (folder / old).unlink(missing_ok=True)
    any_processor = [*flags, *_processor(OTHER, zig=zig)]
    linked = next((way for way in (_STATIC, _DYNAMIC) if _links(any_processor, way)), None)
    if linked:
        made.append(_compile([*any_processor, *jpeg, *linked], folder / JPEG))
    if linked == _STATIC:
        for licence in sorted(Path("/usr").glob(_LICENCES))[:1]:
            shutil.copyfile(licence, folder / JPEG_LICENCE)
    (folder / STAMP).write_text(stamp())
    return made


def _linked(*, zig: bool) -> list[str]:
    """Return options that leave out libraries of C++: see ``source/thread_exit.cpp``."""
    if sys.platform != "linux":
        return []
    return ["-nostdlib++", "-s"] if zig else ["-Wl,--as-needed,-z,defs", "-static-libgcc"]


def _processor(kind: str, *, zig: bool = False) -> list[str]:
    """Return the compiler's options for a kind of processor; Zig has names of its own for them."""
    if kind == OTHER:
        return ["-mcpu=baseline"] if zig else []  # else it takes this machine's
    if zig:
        return ["-mcpu=" + "+".join([kind.replace("-", "_"), *KINDS[kind]])]
    return [f"-march={kind}", *(f"-m{own}" for own in KINDS[kind]), "-mprefer-vector-width=512"]


def _compile(command: list[str], target: Path) -> Path:
    """Compile into a file of another folder first: who uses the old one keeps it."""
    with tempfile.TemporaryDirectory(prefix="new-", dir=target.parent) as folder:
        new = Path(folder) / target.name
        done = _run([*command, "-o", str(new)])
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr}")
        sys.stderr.write(done.stderr)
        return new.replace(target)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a compiler that leaves nothing behind: Zig would keep half a gigabyte at home."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **own})


def _links(command: list[str], libjpeg: list[str]) -> bool:
    """Tell whether libjpeg-turbo and its header are here, and can be linked this way."""
    with tempfile.TemporaryDirectory() as folder:
        source = str(SOURCE / "jpeg_library.cpp")
        return _run([*command, source, *libjpeg, "-o", str(Path(folder, "has"))]).returncode == 0


if __name__ == "__main__":
    try:
        for path in build(own_folder()):
            print(path)
    except RuntimeError as error:
        sys.exit(str(error))
