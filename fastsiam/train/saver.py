"""Checkpoints of a run, and what is known to be saved."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastsiam.distributed import sum_across_ranks
from fastsiam.errors import DataError, FastSiamError, OtherRankError
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.checkpoint import Checkpoint
from fastsiam.run.run_folder import RunFolder
from fastsiam.train.clock import Clock
from fastsiam.train.metrics import StepMetrics
from fastsiam.train.step import TrainingStep
from fastsiam.views.batch import Loader


class Saver:
    """Saves a run's state; rank 0 writes it, and every rank calls the same methods.

    Args:
        before_saving: called on every rank before each checkpoint, for example to exchange data.
    """

    def __init__(
        self,
        step: TrainingStep,
        loader: Loader,
        clock: Clock,
        metrics: StepMetrics,
        *,
        folder: RunFolder,
        start: Checkpoint | None,
        before_saving: Callable[[], None],
    ) -> None:
        self._step, self._loader, self._clock, self._metrics = step, loader, clock, metrics
        self._before_saving, self._console = before_saving, folder.console
        self._previous = checkpoints.previous(folder.path)
        self.path = checkpoints.last(folder.path)
        """Path of the last checkpoint."""
        self.saved = None if start is None else start.step
        """Number of steps in the last checkpoint; None without one."""
        self._branch = {} if start is None else start.branch
        self._extensions = [] if start is None else start.extensions

    def save(self, done: int, *, may_fail: bool) -> None:
        """Save the state after ``done`` steps unless it is saved already; keep the one before.

        Args:
            may_fail: whether to continue with a warning if the file cannot be written. Ending the
                run would lose all steps since the last checkpoint. The next save may succeed.

        Raises:
            CheckpointError: the file cannot be written; the existing checkpoint is unchanged.
            OtherRankError: rank 0 cannot write the file; raised on the other ranks.
            DataError: all ranks together have too many bad images; the state is saved.
        """
        try:
            self._before_saving()
        except DataError:
            self._write(done, may_fail)
            raise
        self._write(done, may_fail)

    def _write(self, done: int, may_fail: bool) -> None:
        if self.saved == done:
            return
        self._metrics.digest.share()
        failure: FastSiamError | None = None
        if self._step.place.is_leader:
            state = Checkpoint(
                config=self._step.config,
                step=done,
                seconds=self._clock.seconds,
                images=self._loader.images,
                steps_per_epoch=self._step.steps_per_epoch,
                seen=self._metrics.digest.state(),
                branch=self._branch,
                extensions=self._extensions,
                **self._step.state(),
            )
            self._metrics.sync()
            try:
                checkpoints.save(self.path, state, keep=self._previous)
            except FastSiamError as error:
                failure = error
        # All ranks wait for the file: when one rank exits, a launcher kills the others.
        if not sum_across_ranks(torch.tensor(int(failure is not None))).item():
            self.saved = done
        elif may_fail:
            self._console.warn(f"{failure}; training continues, and {self.last_good}")
        else:
            raise failure or OtherRankError("rank 0 cannot save; see its own error message")

    @property
    def last_good(self) -> str:
        """Description of the last good checkpoint, for messages."""
        if self.saved is None:
            return "nothing was saved yet"
        return f"the last good checkpoint is {self.path} (step {self.saved:,})"
