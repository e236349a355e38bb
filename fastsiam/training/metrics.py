"""What a run tells: collapse measures, the collapse guard, the clock, and the metrics' files."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fastsiam.distributed import minimum_across_ranks
from fastsiam.errors import TrainingError
from fastsiam.files import written_whole

T = TypeVar("T")

_RANK_ROWS = 1024


def z_std(z: Tensor) -> Tensor:
    """Measure the spread of projections (section 4.1 of the paper).

    Args:
        z: (N, d) projections of the global batch.

    Returns:
        Scalar: standard deviation of each channel of the l2-normalised z, averaged over channels,
        times sqrt(d). 1 is spread over the sphere, 0 is collapse to one point.
    """
    z = F.normalize(z.float(), dim=1)
    return z.std(0, unbiased=False).mean() * math.sqrt(z.shape[1])


def effective_rank(z: Tensor) -> Tensor:
    """Count the dimensions in use, which ``z_std`` does not see (dimensional collapse).

    Args:
        z: (N, d) projections; of more than 1024 rows the first 1024 are used.

    Returns:
        Scalar: exp of the entropy of the normalised singular values of the l2-normalised z (Roy and
        Vetterli 2007; RankMe, Garrido et al. 2023); between 1 and min(N, d).
    """
    z = F.normalize(z[:_RANK_ROWS].float(), dim=1)
    gram = z @ z.T if z.shape[0] < z.shape[1] else z.T @ z
    singular = torch.linalg.eigvalsh(gram.double()).clamp(min=0).sqrt()
    share = singular / singular.sum().clamp(min=1e-30)
    return torch.exp(-torch.xlogy(share, share).sum())


class CollapseGuard:
    """Watches the measures of the log points and speaks up when the representation collapses."""

    SPREAD = 0.5
    """z_std below this is a collapse in progress; a healthy run stays above 0.8."""
    RANK = 4.0
    """Fewer dimensions than this carry nothing, whatever their spread; tiny batches have fewer."""

    ADVICE = (
        "usual causes: the stop-gradient is missing, the learning rate is too high for the batch, "
        "BN sees too few samples, the augmentation is too weak, or fp16 overflow"
    )

    def __init__(self, on_collapse: str, *, batch: int) -> None:
        self._stops = on_collapse == "stop"
        self._least_rank = min(self.RANK, batch / 4)
        self._warned = False

    def check(self, step: int, spread: float, rank: float) -> str | None:
        """Return a warning, once for each episode.

        Raises:
            TrainingError: on collapse, if the run shall stop then.
        """
        if spread >= self.SPREAD and rank >= self._least_rank:
            self._warned = False
            return None
        message = (
            f"the representation collapses at step {step:,}: std {spread:.3f} (healthy: near 1), "
            f"effective rank {rank:.1f}; {self.ADVICE}"
        )
        if self._stops:
            raise TrainingError(message)
        if self._warned:
            return None
        self._warned = True
        return message


class FiniteCheck:
    """Remembers the first step whose loss was not finite, on the device, without asking it."""

    def __init__(self, device: torch.device) -> None:
        self._first = torch.full((), math.inf, device=device, dtype=torch.float64)

    def note(self, step: int, loss: Tensor) -> None:
        """Look at one step's loss; does not wait for it."""
        at = torch.where(torch.isfinite(loss), math.inf, float(step))
        self._first = torch.minimum(self._first, at.to(self._first.dtype))

    def verdict(self) -> int | None:
        """Return the first bad step of any rank, if any; every rank asks. Waits for the device."""
        first = minimum_across_ranks(self._first).item()
        return None if math.isinf(first) else int(first)


class Clock:
    """Times the steps since the last reading and the part of them spent waiting for data."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        """Training time of the whole run, pauses left out."""
        self._begun: float | None = None
        self._waited = self._elapsed = 0.0
        self._steps = 0

    def over(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches, timing how long each one keeps us waiting."""
        self._begun = time.perf_counter()
        iterator = iter(batches)
        while True:
            asked = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                break
            finally:
                self._waited += time.perf_counter() - asked
            self._steps += 1
            yield batch
        self.pause()

    def pause(self) -> None:
        """Stop counting until ``resume``: what follows is not training."""
        if self._begun is not None:
            elapsed = time.perf_counter() - self._begun
            self._elapsed += elapsed
            self.seconds += elapsed
            self._begun = None

    def resume(self) -> None:
        """Count again."""
        self._begun = time.perf_counter()

    def read(self, images_per_step: int) -> dict[str, float]:
        """Return speed, share of waiting and total time; start a new interval. Call it paused."""
        elapsed = max(self._elapsed, 1e-9)
        reading = {
            "images_per_second": self._steps * images_per_step / elapsed,
            "data_wait": min(1.0, self._waited / elapsed),
            "seconds": self.seconds,
        }
        self._waited = self._elapsed = 0.0
        self._steps = 0
        return reading


class MetricsLog:
    """``metrics.jsonl`` and TensorBoard events of a run; written by rank 0 alone."""

    def __init__(
        self, run: Path, *, step: int, steps_per_epoch: int, evaluates_again: bool = False
    ) -> None:
        """Open for appending after ``step`` steps; drop what a lost part of the run left.

        Args:
            run: the run's folder.
            step: steps that the run goes on from.
            steps_per_epoch: to place evaluation lines, which carry only the epoch.
            evaluates_again: whether the evaluation after ``step`` is about to be repeated.
        """
        from torch.utils.tensorboard import SummaryWriter

        self.path = run / "metrics.jsonl"
        self._steps_per_epoch = steps_per_epoch
        kept = [
            line
            for line in read_metrics(run)
            if self._step_of(line) <= step - (line["kind"] != "train" and evaluates_again)
        ]
        with written_whole(self.path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        self._file = self.path.open("a", buffering=1)
        self._board = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)

    def write(self, kind: str, values: dict[str, Any]) -> None:
        """Append one line; numbers go to TensorBoard too."""
        line = {"kind": kind, **values}
        self._file.write(json.dumps(line) + "\n")
        for name, value in values.items():
            if isinstance(value, (int, float)) and name not in ("step", "epoch"):
                self._board.add_scalar(f"{kind}/{name}", value, self._step_of(line))

    def close(self) -> None:
        """Flush and close the files."""
        self._file.close()
        self._board.close()

    def _step_of(self, line: dict[str, Any]) -> int:
        """Steps done when a line was written; evaluations carry only the epoch."""
        return int(line["step"] if "step" in line else round(line["epoch"] * self._steps_per_epoch))


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's ``metrics.jsonl``; a last line cut off by a kill is left out."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines
