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
    """Writes a run's last checkpoint, at most once for each step.

    Args:
        folder: the run's.
        step: the training step to save; rank 0 writes.
        clock: the run's.
        digest: digest of the images and augmentations.
        images: number of images in the data set.
        start: the checkpoint that was resumed, which is saved already; None for a new run.
        before: called by every rank before each checkpoint, for example to exchange data.
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
        """Save the state after step ``done``, unless it is saved already; return the path.

        Every rank must call it.

        Raises:
            CheckpointError: the file cannot be written; the previous checkpoint stays.
            OtherRankError: rank 0 cannot write the file; raised on the other ranks.
        """
        # First the parts that all ranks must take part in.
        self._before()
        self._digest.share()
        if self._saved == done:
            return self.path
        failure: Exception | None = None
        if self._step.place.is_leader:
            try:
                self._write(done)
            except (OSError, FastSiamError) as error:
                failure = error
        # All ranks wait for the file: when one of them exits, a launcher kills the others.
        if sum_across_ranks(torch.tensor(int(failure is not None))).item():
            raise failure or OtherRankError("rank 0 cannot save; see its own error message")
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
            weights="",  # save() computes the digest
            branch=self._branch,
            **self._step.state(),
        )
        checkpoints.save(self.path, state, keep=checkpoints.previous(self._folder.path))

    def try_to(self, done: int) -> None:
        """Save during a run; if that fails, print a warning and continue.

        Ending the run here would lose the steps that were to be saved; the next save may work.
        """
        try:
            self.save(done)
        except (OSError, FastSiamError) as error:
            self._folder.console.warn(f"{error}; training continues, and {self}")

    def __str__(self) -> str:
        """Return a message that names the last good checkpoint."""
        if self._saved is None:
            return "nothing was saved yet"
        return f"the last good checkpoint is {self.path} (step {self._saved:,})"
