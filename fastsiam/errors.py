"""Errors of the user's world. The command line prints each as one line and exits with 1."""

from __future__ import annotations

ERROR = 1
"""Exit code after an error, of the user's world or of ours."""
RANK_LOST = 75
"""Exit code of a rank that leaves because another is gone or late, and of a launcher all of whose
ranks do: what is to be done is to start again (EX_TEMPFAIL of sysexits.h)."""
SIGNALLED = 128
"""Added to a signal's number: the exit code of a command that a signal ended. 2, of wrong usage, is
the command line's own."""


class FastSiamError(Exception):
    """Something outside the program is wrong; the message says what, and what to do."""


class DataError(FastSiamError):
    """A data set cannot be found, listed or read."""


class ImageError(DataError):
    """One image of a data set is bad: what is there of it cannot be decoded.

    Args:
        message: one line that names the image and says what to do.
        index: its position in the data set.
        name: its name within the data set.
        reason: what is wrong with it.
    """

    def __init__(self, message: str, *, index: int = -1, name: str = "", reason: str = "") -> None:
        super().__init__(message)  # the rest has defaults, as an error between processes needs
        self.index, self.name, self.reason = index, name, reason


class NoSplitError(DataError):
    """A data set has no such split."""


class NoLabelsError(NoSplitError):
    """A split's labels lie in a list of their own, which is not there."""


class BackendError(FastSiamError):
    """The package that a pipeline needs is missing, or does not work."""


class DeviceError(FastSiamError):
    """The devices or ranks that were asked for are not there."""


class FileLostError(FastSiamError):
    """A file of images lost bytes while it was read; no image of it is bad by itself."""


class WorkerError(FastSiamError):
    """A process that makes batches was killed, or found no memory."""


class CheckpointError(FastSiamError):
    """A checkpoint cannot be read, or belongs to another run."""


class DamagedError(CheckpointError):
    """A checkpoint's file does not hold what was written into it."""


class TrainingError(FastSiamError):
    """Training cannot continue: the loss is not finite, or the representation collapsed."""


NOT_FINITE = "the loss is not finite"
"""What the message of a run that diverged begins with."""


class OtherRankError(FastSiamError):
    """Another rank cannot continue, and says why; all ranks leave together."""


class Interrupted(FastSiamError):
    """A signal ended the run after its state was saved; ``exit_code`` is 128 + the signal."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


_NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
"""What libraries say in errors of other types: torch's allocators, CUDA's libraries, the system."""


def in_a_line(name: object) -> str:
    """Return a name out of a file as messages show it: escaped where it would break their line."""
    text = str(name)
    return text if text.isprintable() else repr(text)


def lacks_memory(error: BaseException) -> bool:
    """Tell whether memory is what an error is about: the host's or a GPU's."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    of_a_library = isinstance(error, (RuntimeError, OSError))
    return of_a_library and any(text in str(error) for text in _NO_MEMORY)
