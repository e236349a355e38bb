"""Compiling the model: whether it works here, where the result is kept, and what failed."""

from __future__ import annotations

import contextlib
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
from fastsiam.files import require_own
from fastsiam.kernels.cores import local_ranks, own_cores

_CACHE = Path("~/.cache/fastsiam/torchinductor")
_LINKED = 60.0
"""Seconds after which an empty library is not being written any more."""
_LONGEST_CAUSE = 200
"""Characters of an error that a message quotes."""


class CompilationError(BackendError):
    """The step cannot be compiled here, or not be recorded as CUDA graphs, on any rank.

    Args:
        reason: in a line.
        graphs: whether only recording may fail.
    """

    def __init__(self, reason: str, *, graphs: bool) -> None:
        self.graphs = graphs
        super().__init__(
            f"CUDA graphs cannot be recorded here ({reason}); training continues without them"
            if graphs
            else f"torch.compile cannot be used here ({reason}); training continues without it, "
            "more slowly; --compile off leaves this line out"
        )


def without_compilation(config: TrainConfig) -> TrainConfig:
    """Return the settings of a step that is not compiled, without what the compiler alone can do.

    CUDA graphs are of compiled steps; other networks than our ResNets cannot compute activations
    again without the compiler.
    """
    kept = config.step.activation_memory if config.model.is_own else 1.0
    step = replace(config.step, compile="off", cuda_graphs=False, activation_memory=kept)
    return replace(config, step=step)


@contextlib.contextmanager
def compiling(config: TrainConfig) -> Iterator[None]:
    """Keep what is compiled, quietly, and trade memory for computing as the settings say.

    Raises:
        BackendError: another user could put code into the folder where it is kept.
    """
    from torch._functorch import config as functorch

    _choose_cache()
    require_own(
        Path(kept_in()),
        what="what torch.compile makes",
        instead="name a folder that is, by TORCHINDUCTOR_CACHE_DIR",
    )
    _remove_empty_libraries(Path(kept_in()))
    _divide_compilers()
    noisy = [logging.getLogger(name) for name in ("torch.utils.cpp_extension", "torch._logging")]
    levels = [logger.level for logger in noisy]
    try:
        for logger in noisy:
            logger.setLevel(logging.ERROR)
        with functorch.patch(activation_memory_budget=config.step.activation_memory):
            yield
    finally:
        for logger, level in zip(noisy, levels, strict=True):
            logger.setLevel(level)


def _remove_empty_libraries(cache: Path) -> None:
    """Remove what a compiler leaves that is killed: inductor would try to load it in every run."""
    for library in cache.glob("*/*.so"):
        with contextlib.suppress(OSError):  # another rank removes them too
            found = library.stat()
            if not found.st_size and found.st_mtime < time.time() - _LINKED:
                library.unlink()


def kept_in() -> str:
    """Return the folder that holds what was compiled."""
    return os.environ["TORCHINDUCTOR_CACHE_DIR"]


def why_not(place: Place) -> str:
    """Compile something small, forward and backward; return why not all ranks can, if so."""
    reason = ""
    try:
        x = torch.zeros(8, device=place.device, requires_grad=True)
        torch.compile(lambda x: (x.sin() + 1).relu().sum(), fullgraph=True)(x).backward()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler that is missing may raise anything
        if place.world == 1 and os.environ.get("FASTSIAM_DEBUG"):
            raise
        reason = cause_line(error)
    reasons = from_all(reason)
    failed = [f"{reason} on rank {rank}" for rank, reason in enumerate(reasons) if reason]
    return reason if place.world == 1 else next(iter(failed), "")


def cause_line(error: BaseException) -> str:
    """Return the line that names the cause of a failed compilation, after the error's type.

    That is the first line of the innermost error, unless that line is a mere heading: of what a C++
    compiler prints, of a traceback from a compiler process, or of dynamo's explanation.
    """
    while inner := getattr(error, "inner_exception", None) or error.__cause__:
        if isinstance(inner, subprocess.CalledProcessError):  # it names only the command
            break
        error = inner
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    explained = [line for line in lines if line.startswith("Explanation: ")]
    line = ": ".join([lines[0], *(line.removeprefix("Explanation: ") for line in explained[:1])])
    line = next((line for line in lines if re.search(r"\berror: ", line)), line)
    if any(line.startswith("Traceback (most recent call last)") for line in lines):
        line = lines[-1]
    return f"{type(error).__name__}: {line[:_LONGEST_CAUSE]}"


def _divide_compilers() -> None:
    """Have the ranks of this machine together start as many compilers as one alone would.

    inductor's processes are one for each core, of each rank.
    """
    from torch._inductor import config as inductor

    if local_ranks() > 1 and "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        inductor.compile_threads = min(inductor.decide_compile_threads(), own_cores())


def _choose_cache() -> None:
    """Keep what is compiled in the user's cache folder, if it can be written."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch sets the variable itself when it is imported, to a folder that is lost with /tmp.
    default = default_cache_dir()
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default) != default:
        return
    with contextlib.suppress(OSError, RuntimeError):
        folder = _CACHE.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"can be written")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
