"""The metrics of a run: ``metrics.jsonl`` in its folder, and its trackers."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any

from fastsiam.console import format_count
from fastsiam.errors import DataError, FastSiamError
from fastsiam.files import atomic_write, is_file, os_errors_as, parse_json, reason, write_at
from fastsiam.run.run_folder import RunFolder
from fastsiam.run.trackers import Outcome, Trackers


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
        trackers: Iterable[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Remove lines after step ``step`` from the file, and invalid lines with a warning.

        Later lines come from a run that was killed after its last checkpoint. A new run removes all
        lines: they come from an earlier start, perhaps with other settings.

        Args:
            folder: the run's folder.
            step: number of steps that the run resumes after.
            steps_per_epoch: to compute the step of evaluation lines, which only have the epoch.
            trackers: names of the trackers.
            settings: every setting by its flag's name, for the trackers.

        Raises:
            FastSiamError: the folder cannot be written.
        """
        self.path = folder.path / "metrics.jsonl"
        self._folder, self._steps_per_epoch = folder, steps_per_epoch
        self.is_evaluated = False
        """Whether the evaluation after ``step`` was logged by an earlier start."""
        invalid = 0
        with os_errors_as(FastSiamError, f"cannot write the metrics in {folder.path}"):
            with atomic_write(self.path) as temporary, temporary.open("w", encoding="utf-8") as out:
                for text, line in _lines(folder.path) if step else ():
                    try:
                        line_step = self._step_of(line or {})
                    except (ArithmeticError, LookupError, TypeError, ValueError):
                        invalid += text.endswith("\n")  # a killed run may leave half a line
                        continue
                    if line and line_step <= step:
                        self.is_evaluated |= line["kind"] == "knn" and line_step == step
                        out.write(text.rstrip("\n") + "\n")
            self._size = self.path.stat().st_size
        if invalid:
            folder.console.warn(f"removed {format_count(invalid, 'invalid line')} from {self.path}")
        self._unwritten: list[str] = []
        self._trackers = Trackers(trackers, folder, settings or {}, step)

    def write(self, kind: str, values: dict[str, Any]) -> None:
        """Append one line to the file, and pass its numbers to the trackers."""
        line = {"kind": kind, **values}
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

    def close(self, outcome: Outcome = "FAILED") -> None:
        """Write pending lines, and end the trackers; ``outcome`` says how the run ended."""
        try:
            if self._unwritten:
                self.path.touch()  # in case it was deleted
            self._append()
        except OSError as error:
            self._folder.console.warn(
                f"{len(self._unwritten):,} lines of {self.path} are lost: {reason(error)}"
            )
        self._trackers.close(outcome)

    def sync(self) -> None:
        """Write pending lines and synchronise the file to the disk, before a checkpoint."""
        with contextlib.suppress(OSError):  # ``write`` has warned, and ``close`` tries again
            self._append()
            with self.path.open("rb+") as file:
                os.fsync(file.fileno())

    def _append(self) -> None:
        """Write all pending lines, or leave the file unchanged.

        The file is opened each time, because after an error of a network file system an open file
        may never work again. Half a line that such an error leaves is overwritten the next time.
        """
        if not self._unwritten:
            return
        content = "".join(self._unwritten).encode()
        with self.path.open("rb+", buffering=0) as file:
            self._size = min(self._size, os.fstat(file.fileno()).st_size)
            try:
                write_at(file.fileno(), content, self._size)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(file.fileno(), self._size)
                raise
        self._size += len(content)
        self._unwritten.clear()

    def _step_of(self, line: dict[str, Any]) -> int:
        """Return the step of a line; lines of evaluations only have the epoch."""
        return int(line["step"] if "step" in line else round(line["epoch"] * self._steps_per_epoch))


def read_metrics(
    run: Path, *, numbers: Mapping[str, Collection[str]] | None = None
) -> list[dict[str, Any]]:
    """Read the lines of a run's ``metrics.jsonl``, skipping corrupt ones.

    The last line may be incomplete if the process was killed or the disk was full.

    Args:
        run: folder of the run.
        numbers: names of the numbers that the caller uses, by the kind of line that has them.

    Raises:
        FastSiamError: the file cannot be read.
        DataError: ``numbers`` is given, and a line lacks one of them, or a line other than the last
            is corrupt, for example because it was edited by hand.
    """
    path = run / "metrics.jsonl"
    lines, invalid = [], 0
    for number, (_, line) in enumerate(_lines(run), 1):
        if invalid and numbers is not None:
            raise _invalid_line(path, invalid)
        if line is None:
            invalid = number
        else:
            lines.append(line)
    for number, line in enumerate(lines, 1):
        for name in (numbers or {}).get(line["kind"], ()):
            value = line.get(name)
            if not isinstance(value, int | float) or (name == "epoch" and not isfinite(value)):
                raise _invalid_line(path, number, f": {name} must be a number, not {value!r}")
    return lines


def remove_log(folder: RunFolder, *, step: int, epoch: float, save_every: int) -> None:
    """Remove the log of a start that saved no checkpoint; rename that of a run that lost its own.

    Args:
        folder: the run's folder, which has no checkpoint.
        step, epoch: where the log begins: 0, or for a branch where it left the original run.
        save_every: steps between two checkpoints.

    Raises:
        FastSiamError: the log cannot be read.
        OSError: it cannot be removed or renamed.
    """
    path = folder.path / "metrics.jsonl"
    try:
        lines = read_metrics(folder.path, numbers={"train": ["step"], "knn": ["epoch"]})
    except DataError:  # a line is corrupt
        had_checkpoint = True
    else:  # a run saves before an evaluation, too
        had_checkpoint = any(
            x["step"] // save_every > step // save_every
            if x["kind"] == "train"
            else x["kind"] == "knn" and x["epoch"] > epoch
            for x in lines
        )
    if had_checkpoint:
        names = (path.with_name(f"{path.name}.old{number or ''}") for number in count())
        kept = next(name for name in names if not name.exists())
        path.rename(kept)
        folder.console.warn(
            f"the checkpoints of the run in {folder.path} are gone: its log is kept as "
            f"{kept.name}, and a new run starts"
        )
    path.unlink(missing_ok=True)


def _invalid_line(path: Path, number: int, reason: str = "") -> DataError:
    return DataError(f"{path} has an invalid line, number {number:,}{reason}; restore the file")


def _lines(run: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yield the lines of a run's ``metrics.jsonl`` as text and as values; None for corrupt ones."""
    path = run / "metrics.jsonl"
    with os_errors_as(FastSiamError, f"cannot read {path}"):
        if not is_file(path):
            return
        with path.open(encoding="utf-8", errors="replace") as file:
            for text in file:
                try:
                    line = parse_json(text)
                except ValueError:
                    line = None
                is_valid = isinstance(line, dict) and isinstance(line.get("kind"), str)
                yield text, line if is_valid else None


def initial_spread(run: Path) -> float | None:
    """Return the z_std of the untrained network from a run's log; None if it was not logged."""
    return next((x.get("z_std") for _, x in _lines(run) if x and x["kind"] == "initial"), None)
