"""The metrics of a run: ``metrics.jsonl`` in its folder, and the trackers that it has."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fastsiam.errors import FastSiamError
from fastsiam.files import explained, parsed_json, reason, written_whole
from fastsiam.run.folder import RunFolder
from fastsiam.run.trackers import TrackedRun, Trackers


class MetricsLog:
    """``metrics.jsonl`` of a run, and its trackers; written by rank 0 alone.

    A line that cannot be written is kept until it can be, and training continues: its hours are
    worth more than a curve, and a full disk is often made free again.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        step: int,
        steps_per_epoch: int,
        end: int = 0,
        evaluates_again: bool = False,
        trackers: Iterable[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Open for appending after ``step`` steps; drop what a lost part of the run left.

        Raises a ``FastSiamError`` where the folder cannot be written.

        Args:
            folder: the run's folder.
            step: steps that the run continues from.
            steps_per_epoch: to place evaluation lines, which carry only the epoch.
            end: the last step of this run, at which trackers are told that it is complete.
            evaluates_again: whether the evaluation after ``step`` is about to be repeated.
            trackers: names of those that get the figures too.
            settings: every setting by its flag's name, for them.
        """
        self.path = folder.path / "metrics.jsonl"
        self._folder, self._steps_per_epoch, self._end = folder, steps_per_epoch, end
        self._last = step
        kept = [
            line
            for line in read_metrics(folder.path)
            if self._step_of(line) <= step - (line["kind"] == "knn" and evaluates_again)
        ]
        with explained(FastSiamError, f"cannot write the metrics in {folder.path}"):
            self._begin("".join(json.dumps(line) + "\n" for line in kept).encode())
        self._unwritten: list[str] = []
        self._trackers = Trackers(
            trackers, TrackedRun(folder=folder, settings=settings or {}, step=step)
        )

    def write(self, kind: str, values: dict[str, Any]) -> None:
        """Append one line; its numbers go to the trackers too."""
        line = {"kind": kind, **values}
        self._last = max(self._last, self._step_of(line))
        self._unwritten.append(json.dumps(line) + "\n")
        try:
            self._folder.restore()
            self._append()
        except (OSError, FastSiamError) as error:
            if len(self._unwritten) == 1:
                self._folder.console.warn(
                    f"cannot write {self.path}: {reason(error)}; training continues, and the lines "
                    "are written as soon as they can be"
                )
        figures = {
            f"{kind}/{name}": value
            for name, value in values.items()
            if isinstance(value, (int, float)) and name not in ("step", "epoch", "since")
        }
        if figures:
            self._trackers.write(figures, self._step_of(line))

    def close(self) -> None:
        """Write what is still to be written, close the file, and end the trackers."""
        try:
            self._append()
        except OSError as error:
            self._folder.console.warn(
                f"{len(self._unwritten):,} lines of {self.path} are lost: {reason(error)}"
            )
        os.close(self._file)
        self._trackers.close(complete=self._last >= self._end)

    def _begin(self, content: bytes) -> None:
        """Write the file anew and open it."""
        with written_whole(self.path) as temporary:
            temporary.write_bytes(content)
        self._file, self._size = os.open(self.path, os.O_RDWR | os.O_APPEND), len(content)

    def _append(self) -> None:
        """Write the lines that are still to be written: all of them, or none."""
        if not self._unwritten:
            return
        if not self.path.exists():  # deleted; what this process has open is still whole
            before = self._file
            self._begin(os.pread(before, self._size, 0))
            os.close(before)
        content = "".join(self._unwritten).encode()
        try:
            written = 0
            while written < len(content):
                written += os.write(self._file, content[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(content)
        self._unwritten.clear()

    def _step_of(self, line: dict[str, Any]) -> int:
        """Steps done when a line was written; evaluations carry only the epoch."""
        return int(line["step"] if "step" in line else round(line["epoch"] * self._steps_per_epoch))


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's ``metrics.jsonl``; what follows a damaged line is left out.

    A kill, or a full disk, may have cut the last one off.
    """
    path = run / "metrics.jsonl"
    with explained(FastSiamError, f"cannot read {path}"):
        content = path.read_bytes() if path.exists() else b""
    lines = []
    for text in content.decode(errors="replace").splitlines():
        try:
            line = parsed_json(text)
        except ValueError:
            break
        if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
            break
        lines.append(line)
    return lines


def initial_spread(run: Path) -> float | None:
    """Return the z_std of the untrained network that a run's log has; None where it has none."""
    lines = (line for line in read_metrics(run) if line["kind"] == "initial")
    return next((line.get("z_std") for line in lines), None)
