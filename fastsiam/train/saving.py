"""Saving a run while it trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from fastsiam.distributed import sum_across_ranks
from fastsiam.errors import FastSiamError, OtherRankError
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.checkpoint import Checkpoint
from fastsiam.run.folder import RunFolder
from fastsiam.train.clock import Clock
from fastsiam.train.data_digest import DataDigest
from fastsiam.train.step import TrainingStep


class Saver:
    """Writes a run's last checkpoint; each step at most once.

    Args:
        folder: the run's.
        step: whose state is saved; rank 0 writes.
        clock: the run's.
        digest: of what was trained on.
        images: in the data set.
        start: what the run continues from, which is saved already; None if there is nothing.
        before: done by every rank before each checkpoint, such as telling the others something.
    """

    def __init__(
        self,
        folder: RunFolder,
        step: TrainingStep,
        *,
        clock: Clock,
        digest: DataDigest,
        images: int,
        start: Checkpoint | None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = checkpoints.last(folder.path)
        """The checkpoint."""
        self._folder, self._step, self._clock, self._images = folder, step, clock, images
        self._digest = digest
        self._saved = None if start is None else start.step
        self._branch = {} if start is None else start.branch
        self._before = before

    def save(self, done: int) -> Path:
        """Save the state after so many steps, if that is not done yet; return the checkpoint.

        Every rank calls it.

        Raises:
            CheckpointError: the file cannot be written; the one before stays.
            OtherRankError: on the ranks that do not write, the same.
        """
        # On every rank or on none, whatever this one knows of what is saved.
        self._before()
        self._digest.share()
        if self._saved == done:
            return self.path
        failure: Exception | None = None
        if self._step.place.leads:
            try:
                self._write(done)
            except (OSError, FastSiamError) as error:
                failure = error
        # Nobody continues or leaves before the file is there: a launcher ends the others then.
        if sum_across_ranks(torch.tensor(int(failure is not None))).item():
            raise failure or OtherRankError("rank 0 cannot save, and says why")
        self._saved = done
        return self.path

    def _write(self, done: int) -> None:
        state = Checkpoint(
            config=self._step.config,
            step=done,
            seconds=self._clock.seconds,
            images=self._images,
            steps_per_epoch=self._step.steps_per_epoch,
            seen=self._digest.state(),
            weights="",  # as they are saved
            branch=self._branch,
            **self._step.state(),
        )
        self._folder.restore()
        checkpoints.save(self.path, state, keep=checkpoints.previous(self._folder.path))

    def try_to(self, done: int) -> None:
        """Save in the middle of a run; if it cannot be done, warn: the next time it may.

        A run that ended here would lose the very steps that are to be saved.
        """
        try:
            self.save(done)
        except (OSError, FastSiamError) as error:
            self._folder.console.warn(f"{error}; training continues, and {self}")

    def __str__(self) -> str:
        """Say for people where the last good state is."""
        if self._saved is None:
            return "nothing was saved yet"
        return f"the last good checkpoint is {self.path} (step {self._saved:,})"
