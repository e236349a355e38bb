"""Evaluations that train with labels: their epochs, validations and saved state."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastsiam.console import Console, duration, pace
from fastsiam.distributed import Place, minimum_across_ranks
from fastsiam.evaluate.classifiers import HeadResult, HeadTraining
from fastsiam.evaluate.labelled import Batches, LabelledImages, Source
from fastsiam.files import why, written_whole
from fastsiam.run.records import Evaluation

_SECONDS_BETWEEN_SAVES = 30.0


@dataclass(frozen=True, slots=True)
class Trained:
    """What came out of all epochs."""

    results: list[HeadResult]
    """Of each head at the end."""
    seconds: float
    """Time that the epochs took, validations included."""
    epochs: int
    """Epochs that were trained in this time; fewer than all, where an earlier try went before."""

    @property
    def best(self) -> HeadResult:
        """The head that got most right."""
        return best_of(self.results)


def best_of(results: list[HeadResult]) -> HeadResult:
    """Return the result with the highest top-1."""
    return max(results, key=lambda result: result.top1)


def train_epochs(
    training: HeadTraining,
    source: Source,
    held: Any,
    *,
    images: LabelledImages,
    epochs: int,
    partial: Partial,
) -> Trained:
    """Train epoch by epoch; validate on the way and at the end.

    Args:
        training: what is trained.
        source: its batches; closed at the end.
        held: the validation images or features, as ``training.evaluate`` takes them.
        images: what ``source`` makes its batches of.
        epochs: how many.
        partial: where the state is saved now and then, and found again.
    """
    console, config, steps = images.subject.console, images.config, images.steps
    first = 0
    if config.resume == "auto" and (found := partial.load()):
        first = found["epoch"]
        training.load(found["state"])
        console.say(f"continuing after epoch {first} of {epochs}, where it was interrupted")
    results: list[HeadResult] = []
    began = time.monotonic()
    with closing(source), console.progress(epochs * steps, first * steps):
        for epoch in range(first, epochs):
            batches = _shown(source.epoch(epoch), images, epoch, epochs)
            losses = training.epoch(epoch, batches)
            done = epoch + 1
            if done == epochs or (config.eval_every and done % config.eval_every == 0):
                results = training.evaluate(held)
                best = best_of(results)
                loss = losses[results.index(best)].item()
                console.say(f"epoch {done} of {epochs}: loss {loss:.3f}, {best}")
            partial.save(done, training.state, last=done == epochs)
    if not results:
        results = training.evaluate(held)
    trained = Trained(results, time.monotonic() - began, epochs - first)
    console.say(
        f"trained in {duration(trained.seconds)}; {trained.best.images:,} validation images, "
        "each counted once"
    )
    return trained


def _shown(batches: Batches, images: LabelledImages, epoch: int, epochs: int) -> Batches:
    """Pass on the batches of an epoch, and show the progress."""
    console, steps = images.subject.console, images.steps
    began, before = time.monotonic(), epoch * steps
    for step, batch in enumerate(batches, start=1):
        yield batch
        speed = step * images.batch / max(time.monotonic() - began, 1e-9)
        left = (epochs * steps - before - step) * images.batch
        console.advance(before + step, pace(speed, left))


class Partial:
    """The state of an evaluation under way, in a file beside where its record will be; of rank 0.

    Args:
        beside: where the record will go; without it, nothing is saved.
        evaluation: tells whether a state that is found is of the same.
        place: this rank.
        console: for warnings.
    """

    def __init__(
        self, beside: Path | None, evaluation: Evaluation, *, place: Place, console: Console
    ) -> None:
        self._path = beside.with_suffix(".partial") if beside else None
        self._same = f"{evaluation.network.fingerprint} {evaluation.identity}"
        self._place, self._console, self._saved = place, console, time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """Return what was saved, if it was the same evaluation of the same network.

        The same on every rank: none, where only some find it.
        """
        found: dict[str, Any] = {}
        if self._path is not None and self._path.is_file():
            try:
                found = torch.load(self._path, map_location=self._place.device, weights_only=True)
            except Exception:  # a damaged file makes the unpickler raise anything
                self._console.warn(f"{self._path} is damaged: beginning anew")
        epoch = torch.tensor([found.get("epoch", 0) if found.get("same") == self._same else 0])
        return found if int(minimum_across_ranks(epoch.to(self._place.device))) else None

    def save(self, epoch: int, state: Callable[[], dict[str, Any]], *, last: bool) -> None:
        """Save the state after so many epochs, but not all the time."""
        soon = time.monotonic() - self._saved < _SECONDS_BETWEEN_SAVES
        if self._path is None or not self._place.is_leader or (soon and not last):
            return
        try:
            with written_whole(self._path) as temporary:
                torch.save({"same": self._same, "epoch": epoch, "state": state()}, temporary)
        except (OSError, RuntimeError) as error:
            self._console.warn(f"cannot save {self._path} ({why(error)}); continuing without")
        self._saved = time.monotonic()

    def remove(self) -> None:
        """Forget it: the record says it all."""
        if self._path is None:
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            self._console.warn(f"cannot remove {self._path} ({why(error)}), which nobody needs")
