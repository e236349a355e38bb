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
# The last two are for GCC 12's own headers.
_FLAGS += ["-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]


def library(kind: str) -> str:
    """Return the file name of a kind's library."""
    return f"kernels-{kind}.so"


JPEG = "kernels-jpeg.so"
_STAMP = "kernels.stamp"
"""The file that says which sources the libraries beside it were made of."""


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
    """Tell whether a folder's libraries were made of these sources."""
    try:
        return (folder / _STAMP).read_text() == stamp()
    except OSError:
        return False


def compiler() -> list[str] | None:
    """Return the command that compiles C++: ``$CXX``, the system's, or the one of ziglang."""
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    return None


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
        raise RuntimeError("no C++ compiler found: install g++, or pip install ziglang")
    folder.mkdir(parents=True, exist_ok=True)
    x86 = platform.machine() in ("x86_64", "AMD64")
    sources = sorted(str(path) for path in SOURCE.glob("*.cpp"))
    kernels = [path for path in sources if not Path(path).name.startswith("jpeg")]
    made = []
    for kind in KINDS if x86 else [OTHER]:
        flags = [*_FLAGS, *_processor(kind, zig="ziglang" in command)]
        made.append(_compile([*command, *flags, *kernels], folder / library(kind)))
    (folder / JPEG).unlink(missing_ok=True)
    if _has_libjpeg(command):
        jpeg = [path for path in sources if path not in kernels]
        made.append(_compile([*command, *_FLAGS, *jpeg, "-ljpeg"], folder / JPEG))
    (folder / _STAMP).write_text(stamp())
    return made


def _processor(kind: str, *, zig: bool) -> list[str]:
    """Return the compiler's options for a kind of processor; Zig has names of its own for them."""
    if kind == OTHER:
        return []
    if zig:
        return ["-mcpu=" + "+".join([kind.replace("-", "_"), *KINDS[kind]])]
    return [f"-march={kind}", *(f"-m{own}" for own in KINDS[kind]), "-mprefer-vector-width=512"]


def _compile(command: list[str], target: Path) -> Path:
    """Compile into a file of another folder first: who uses the old one keeps it."""
    with tempfile.TemporaryDirectory(prefix="new-", dir=target.parent) as folder:
        new = Path(folder) / target.name
        done = subprocess.run([*command, "-o", str(new)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr}")
        sys.stderr.write(done.stderr)
        return new.replace(target)


def _has_libjpeg(command: list[str]) -> bool:
    """Tell whether libjpeg-turbo and its header are here."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "has.cpp")
        source.write_text(
            "#include <stdio.h>\n#include <jpeglib.h>\n"
            "int main() { return jpeg_skip_scanlines == 0 || LIBJPEG_TURBO_VERSION_NUMBER < 1; }\n"
        )
        tried = [*command, str(source), "-ljpeg", "-o", str(Path(folder, "has"))]
        return subprocess.run(tried, capture_output=True).returncode == 0


if __name__ == "__main__":
    try:
        for path in build(Path(__file__).parent):
            print(path)
    except RuntimeError as error:
        sys.exit(str(error))
