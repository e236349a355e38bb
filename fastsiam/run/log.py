"""The metrics of a run: ``metrics.jsonl`` in its folder, and its trackers."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from fastsiam.errors import DataError, FastSiamError
from fastsiam.files import explained, parsed_json, reason, written_whole
from fastsiam.run.folder import RunFolder
from fastsiam.run.trackers import Trackers


class MetricsLog:
    """Writer of a run's ``metrics.jsonl`` and of its trackers; on rank 0 only.

    Lines that cannot be written, for example to a full disk, are kept in memory and written later.
    Training continues meanwhile.
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
        """Open the file for appending, and remove lines after step ``step``.

        Such lines are left by a run that was killed after its last checkpoint. A run that begins
        removes all: they are of an earlier start, perhaps with other settings.

        Args:
            folder: the run's folder.
            step: number of steps that the run resumes after.
            steps_per_epoch: to compute the step of evaluation lines, which only have the epoch.
            end: the last step of this run, at which trackers mark it as complete.
            evaluates_again: whether the evaluation after ``step`` will be repeated.
            trackers: names of the trackers.
            settings: every setting by its flag's name, for the trackers.

        Raises:
            FastSiamError: the folder cannot be written.
        """
        self.path = folder.path / "metrics.jsonl"
        self._folder, self._steps_per_epoch, self._end = folder, steps_per_epoch, end
        self._last = step
        kept = [
            line
            for line in read_metrics(folder.path)
            if step and self._step_of(line) <= step - (line["kind"] == "knn" and evaluates_again)
        ]
        with explained(FastSiamError, f"cannot write the metrics in {folder.path}"):
            content = "".join(json.dumps(line) + "\n" for line in kept).encode()
            with written_whole(self.path) as temporary:
                temporary.write_bytes(content)
            self._file, self._size = os.open(self.path, os.O_WRONLY | os.O_APPEND), len(content)
        self._unwritten: list[str] = []
        self._trackers = Trackers(
            trackers,
            run=folder.path,
            settings=settings or {},
            step=step,
            console=folder.console,
        )

    def write(self, kind: str, values: dict[str, Any]) -> None:
        """Append one line, and pass its numbers to the trackers."""
        line = {"kind": kind, **values}
        self._last = max(self._last, self._step_of(line))
        self._unwritten.append(json.dumps(line) + "\n")
        try:
            self._append()
        except OSError as error:
            if len(self._unwritten) == 1:
                self._folder.console.warn(
                    f"cannot write {self.path}: {reason(error)}; training continues, and missing "
                    "lines are written later"
                )
        figures = {
            f"{kind}/{name}": value
            for name, value in values.items()
            if isinstance(value, (int, float)) and name not in ("step", "epoch", "since")
        }
        if figures:
            self._trackers.log(self._step_of(line), figures)

    def close(self) -> None:
        """Write pending lines, close the file, and end the trackers."""
        try:
            self._append()
        except OSError as error:
            self._folder.console.warn(
                f"{len(self._unwritten):,} lines of {self.path} are lost: {reason(error)}"
            )
        os.close(self._file)
        self._trackers.close(complete=self._last >= self._end)

    def _append(self) -> None:
        """Write all pending lines, or leave the file unchanged."""
        if not self._unwritten:
            return
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
        """Return the step of a line; lines of evaluations only have the epoch."""
        return int(line["step"] if "step" in line else round(line["epoch"] * self._steps_per_epoch))


def read_metrics(
    run: Path, *, numbers: Mapping[str, Collection[str]] | None = None
) -> list[dict[str, Any]]:
    """Read the lines of a run's ``metrics.jsonl``, up to the first corrupt one.

    The last line may be incomplete if the process was killed or the disk was full.

    Args:
        run: folder of the run.
        numbers: names of the numbers that the caller uses, by the kind of the line that has them.

    Raises:
        FastSiamError: the file cannot be read.
        DataError: ``numbers`` are given, and a line lacks one of them or is corrupt and not the
            last, such as one that was edited by hand.
    """
    path = run / "metrics.jsonl"
    with explained(FastSiamError, f"cannot read {path}"):
        content = path.read_bytes() if path.exists() else b""
    lines = []
    texts = content.decode(errors="replace").splitlines()
    for number, text in enumerate(texts, 1):
        try:
            line = parsed_json(text)
        except ValueError:
            line = None
        if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
            if numbers is not None and number < len(texts):
                raise DataError(f"{path} has an invalid line, number {number:,}; restore the file")
            break
        lines.append(line)
    for number, line in enumerate(lines, 1):
        for name in (numbers or {}).get(line["kind"], ()):
            value = line.get(name)
            if not isinstance(value, int | float) or (name == "epoch" and not isfinite(value)):
                raise DataError(
                    f"{path} has an invalid line, number {number:,}: {name} must be a number, not "
                    f"{value!r}; restore the file"
                )
    return lines


def initial_spread(run: Path) -> float | None:
    """Return the z_std of the untrained network from a run's log; None if it is not there."""
    lines = (line for line in read_metrics(run) if line["kind"] == "initial")
    return next((line.get("z_std") for line in lines), None)
