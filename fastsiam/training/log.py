"""The metrics of a run in its folder: ``metrics.jsonl`` and TensorBoard's events."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from fastsiam.errors import FastSiamError
from fastsiam.files import explained, written_whole


class MetricsLog:
    """``metrics.jsonl`` and TensorBoard events of a run; written by rank 0 alone."""

    def __init__(
        self, run: Path, *, step: int, steps_per_epoch: int, evaluates_again: bool = False
    ) -> None:
        """Open for appending after ``step`` steps; drop what a lost part of the run left.

        Raises a ``FastSiamError`` where the folder cannot be written.

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
        with explained(FastSiamError, f"cannot write the metrics in {run}"):
            with written_whole(self.path) as temporary:
                temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
            self._file = self.path.open("a", buffering=1)
            self._board = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)

    def write(self, kind: str, values: dict[str, Any]) -> None:
        """Append one line; numbers go to TensorBoard too."""
        line = {"kind": kind, **values}
        with explained(FastSiamError, f"cannot write {self.path}"):
            self._file.write(json.dumps(line) + "\n")
            for name, value in values.items():
                if isinstance(value, (int, float)) and name not in ("step", "epoch"):
                    self._board.add_scalar(f"{kind}/{name}", value, self._step_of(line))

    def close(self) -> None:
        """Flush and close the files; what cannot be written any more was said by ``write``."""
        for file in (self._file, self._board):
            with contextlib.suppress(OSError):
                file.close()

    def _step_of(self, line: dict[str, Any]) -> int:
        """Steps done when a line was written; evaluations carry only the epoch."""
        return int(line["step"] if "step" in line else round(line["epoch"] * self._steps_per_epoch))


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's ``metrics.jsonl``; a last line cut off by a kill is left out."""
    path = run / "metrics.jsonl"
    with explained(FastSiamError, f"cannot read {path}"):
        texts = path.read_text().splitlines() if path.exists() else []
    lines = []
    for text in texts:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines
