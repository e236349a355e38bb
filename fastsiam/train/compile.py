"""Setup of torch.compile: a check that it works, its cache folder and its errors."""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from fastsiam.config import TrainConfig
from fastsiam.distributed import Place, from_all
from fastsiam.errors import BackendError
from fastsiam.files import check_private_folder, create_private_folder
from fastsiam.kernels.cores import local_ranks, own_cores

_CACHE = Path("~/.cache/fastsiam/torchinductor")
_EMPTY_LIBRARY_AGE = 60.0
"""Age, in seconds, at which an empty library counts as abandoned by its compiler."""
_LONGEST_CAUSE = 200
"""Maximum number of characters of an error that a message quotes."""


class CompilationError(BackendError):
    """Compiling the training step fails; raised on every rank.

    Args:
        reason: one line of text.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"torch.compile does not work on this machine ({reason}); training continues "
            "without it, more slowly; pass --compile off to hide this warning"
        )


def without_compilation(config: TrainConfig) -> TrainConfig:
    """Return the settings with compilation disabled, and with it the settings that depend on it.

    CUDA graphs need a compiled step. Without the compiler, only fastsiam's ResNets recompute
    activations.
    """
    memory_budget = config.step.activation_memory if config.model.is_own else 1.0
    step = replace(config.step, compile="off", cuda_graphs=False, activation_memory=memory_budget)
    return replace(config, step=step)


@contextlib.contextmanager
def compile_settings(config: TrainConfig) -> Iterator[None]:
    """Configure torch.compile inside the block: cache, log level, activation memory budget.

    Raises:
        BackendError: another user could write code into the cache folder.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):  # an unknown user, in a container; torch 2.11 asks at import
        os.environ["USER"] = f"uid_{os.getuid()}"
    from torch._functorch import config as functorch

    _choose_cache()
    check_private_folder(
        Path(cache_folder()),
        what="compiled code",
        instead="set TORCHINDUCTOR_CACHE_DIR to a folder of your own",
    )
    _remove_empty_libraries(Path(cache_folder()))
    _divide_compilers()
    with contextlib.ExitStack() as stack:
        for name in ("torch.utils.cpp_extension", "torch._logging"):
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        budget = config.step.activation_memory
        stack.enter_context(functorch.patch(activation_memory_budget=budget))
        yield


def _remove_empty_libraries(cache: Path) -> None:
    """Remove empty libraries of killed compilers, which inductor would fail to load every time."""
    for library in cache.glob("*/*.so"):
        with contextlib.suppress(OSError):  # another rank removes them too
            status = library.stat()
            if not status.st_size and status.st_mtime < time.time() - _EMPTY_LIBRARY_AGE:
                library.unlink()


def cache_folder() -> str:
    """Return inductor's cache folder."""
    return os.environ["TORCHINDUCTOR_CACHE_DIR"]


def compile_failure(place: Place) -> str:
    """Compile a small function on every rank; return why that failed, or "" if it worked."""
    reason = ""
    try:
        x = torch.zeros(8, device=place.device, requires_grad=True)
        torch.compile(lambda x: (x.sin() + 1).relu().sum(), fullgraph=True)(x).backward()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a missing compiler may raise anything
        if place.world == 1 and os.environ.get("FASTSIAM_DEBUG"):
            raise
        reason = cause_line(error)
    reasons = from_all(reason)
    failures = [f"{reason} on rank {rank}" for rank, reason in enumerate(reasons) if reason]
    return reason if place.world == 1 else next(iter(failures), "")


def cause_line(error: BaseException) -> str:
    """Return the type of a compilation error, and the line of its message that names the cause.

    This is the first line of the innermost error, unless that line is only a heading: of a C++
    compiler's output, of a traceback from a compiler process, or of dynamo's explanation.
    """
    while inner := getattr(error, "inner_exception", None) or error.__cause__:
        if isinstance(inner, subprocess.CalledProcessError):  # it names only the command
            break
        error = inner
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    reasons = [line for line in lines if line.startswith("Explanation: ")]
    line = ": ".join([lines[0], *(line.removeprefix("Explanation: ") for line in reasons[:1])])
    line = next((line for line in lines if re.search(r"\berror: ", line)), line)
    if any(line.startswith("Traceback (most recent call last)") for line in lines):
        line = lines[-1]
    return f"{type(error).__name__}: {line[:_LONGEST_CAUSE]}"


def _divide_compilers() -> None:
    """Divide the compiler processes among the ranks of this machine.

    By default inductor starts one per core on each rank.
    """
    from torch._inductor import config as inductor

    if local_ranks() > 1 and "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        inductor.compile_threads = min(inductor.decide_compile_threads(), own_cores())


def _choose_cache() -> None:
    """Use a cache folder in the user's home directory, if it is writable."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # At import torch sets the variable to a folder under /tmp, which is not permanent.
    default = default_cache_dir()
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default) != default:
        return
    with contextlib.suppress(OSError, RuntimeError):
        # inductor's keys do not name the vector width, and a home directory may serve several CPUs.
        folder = _CACHE.expanduser() / torch.backends.cpu.get_cpu_capability().lower()
        create_private_folder(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"can be written")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
