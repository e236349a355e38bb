"""Errors of the user's world. The command line prints each as one line and exits with 1."""

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


class NoSplitError(DataError):
    """A data set has no such split."""


class NoLabelsError(NoSplitError):
    """A split's labels lie in a list of their own, which is not there."""


class BackendError(FastSiamError):
    """The package that a pipeline needs is missing, or does not work."""


class DeviceError(FastSiamError):
    """The devices or ranks that were asked for are not there."""


class CheckpointError(FastSiamError):
    """A checkpoint cannot be read, or belongs to another run."""


class DamagedError(CheckpointError):
    """A checkpoint's file does not hold what was written into it."""


class TrainingError(FastSiamError):
    """Training cannot go on: the loss is not finite, or the representation collapsed."""


NOT_FINITE = "the loss is not finite"
"""What the message of a run that diverged begins with."""


class OtherRankError(FastSiamError):
    """Another rank cannot go on, and says why; all ranks leave together."""


class Interrupted(FastSiamError):
    """A signal ended the run after its state was saved; ``exit_code`` is 128 + the signal."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


RANK_LOST = 75
"""Exit code of a rank that leaves because another is gone or cannot go on: that one says why."""
