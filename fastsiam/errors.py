"""Errors for users. The command line prints each as one line; most exit with code 1."""

from __future__ import annotations

ERROR = 1
"""Exit code after an error or a bug."""
RANK_LOST = 75
"""Exit code of a rank that exits because another rank died or timed out, and of a launcher if all
its ranks exit with it (EX_TEMPFAIL in sysexits.h). Start the command again."""
SIGNALLED = 128
"""A command that was ended by a signal exits with this plus the signal's number. Code 2 means wrong
usage."""


class FastSiamError(Exception):
    """Base class of errors with a cause outside the program; the message says what to do."""


class DataError(FastSiamError):
    """A data set cannot be found, listed or read."""


class ImageError(DataError):
    """An image of a data set cannot be decoded.

    ``index`` is its position in the data set, ``name`` its name there, ``reason`` says why.
    """

    def __init__(self, message: str, *, index: int = -1, name: str = "", reason: str = "") -> None:
        super().__init__(message)  # other arguments have defaults, so that it can be pickled
        self.index, self.name, self.reason = index, name, reason


class NoImagesError(DataError):
    """A folder has no image files that can be read in place."""


class NoSplitError(DataError):
    """A data set does not have the requested split."""


class NoLabelsError(NoSplitError):
    """The separate file with a split's labels is missing."""


class BackendError(FastSiamError):
    """A package, compiled code or a network is missing, or does not work as required."""


class DeviceError(FastSiamError):
    """Requested devices or ranks do not exist, or do not fit the settings."""


class FileLostError(FastSiamError):
    """An image file was truncated or deleted while it was being read."""


class WorkerError(FastSiamError):
    """A loader process was killed or ran out of memory."""


class CheckpointError(FastSiamError):
    """A checkpoint cannot be read, or belongs to another run."""


class DamagedError(CheckpointError):
    """A checkpoint file is corrupt."""


class TrainingError(FastSiamError):
    """Training cannot continue: a non-finite loss, a collapsed representation or no memory left."""


NOT_FINITE = "the loss is not finite"
"""Start of the error message of a run that diverged."""


class OtherRankError(FastSiamError):
    """Another rank cannot continue and prints the reason; all ranks exit together."""


class Interrupted(FastSiamError):
    """A signal ended the run after its state was saved; the message says how to resume."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = SIGNALLED + number


_NO_GPU_MEMORY = (
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "bytes on device",
)
"""Substrings of messages of torch's compiler, CUDA's libraries and DALI that GPU memory ran out."""
_NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "std::bad_alloc",
    "Can't allocate",
    "CUDA allocation failed",
    *_NO_GPU_MEMORY,
)
"""Substrings of out-of-memory messages from torch's allocators, CUDA's libraries, the operating
system and DALI."""


def as_one_line(name: object) -> str:
    """Return a name for a message, escaped if it has line breaks or unprintable characters."""
    text = str(name)
    return text if text.isprintable() else repr(text)


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on the host or a GPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    is_library_error = isinstance(error, (RuntimeError, OSError))
    return is_library_error and any(text in str(error) for text in _NO_MEMORY)


def lacks_gpu_memory(error: BaseException) -> bool:
    """Return whether an error of ``lacks_memory`` is known to be about a GPU's memory."""
    is_from_torch = type(error).__name__ == "OutOfMemoryError"
    return is_from_torch or any(text in str(error) for text in _NO_GPU_MEMORY)
