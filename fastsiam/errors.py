"""Errors of the user's world. The command line prints each as one line and exits with 1."""

from __future__ import annotations


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

    def at(self, index: int) -> ImageError:
        """Return the same error of a data set in which the image has another position."""
        return ImageError(str(self), index=index, name=self.name, reason=self.reason)


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


class TrainingError(FastSiamError):
    """Training cannot go on: the loss is not finite, or the representation collapsed."""


NOT_FINITE = "the loss is not finite"
"""What the message of a run that diverged begins with."""


class Interrupted(FastSiamError):
    """A signal ended the run after its state was saved; ``exit_code`` is 128 + the signal."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
