"""Files of an evaluation: its record, and the state to resume from until that is written."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fastsiam.config.detect import DetectConfig
from fastsiam.config.evaluate import LabelConfig, NetworkConfig
from fastsiam.console import Console
from fastsiam.distributed import Place, from_all, from_leader, minimum_across_ranks
from fastsiam.errors import CheckpointError, DamagedError, FastSiamError
from fastsiam.files import atomic_write, is_file, why, write_json
from fastsiam.run.checkpoint import is_intact, read_errors
from fastsiam.run.records import Evaluation, Record, check_targets

Show = Callable[[Record], None]
"""Shows a record to the user. It is called before the record is written, which may fail."""

_SECONDS_BETWEEN_SAVES = 30.0


class RecordFiles:
    """Record of an evaluation in the run's folder and in the user's --json file, and saved state.

    The constructor checks that both records can be written. If the one in the run's folder
    cannot, it only warns, because the run may belong to a colleague. Rank 0 saves the state next to
    the record, and every rank loads it.

    Args:
        run: the run's folder, if the network has one.
        evaluation: describes the evaluation.
        details: parts of the protocol for the file name in the run's folder; empty ones are left
            out.
        config: has the path of the user's file, and whether to resume from a saved state.

    Raises:
        FastSiamError: the user's file cannot be written, or a saved state cannot be read.
    """

    def __init__(
        self,
        run: Path | None,
        evaluation: Evaluation,
        *details: str,
        config: NetworkConfig,
        place: Place,
        console: Console,
    ) -> None:
        self.evaluation, self.console = evaluation, console
        self._place, self._saved_at = place, time.monotonic()
        self._user_file = Path(config.json) if config.json else None
        if self._user_file and self._user_file.suffix == ".partial":
            raise FastSiamError(
                f"{config.json}: the ending .partial is for saved states; pass another --json"
            )
        run_file = None if run is None else evaluation.path(run, *details)
        if place.is_leader:
            if self._user_file:
                check_targets(self._user_file)
            elif run_file is None:
                restart = ", and to resume after an interruption" * (evaluation.kind != "knn")
                console.warn(f"no run folder: pass --json FILE to keep the result{restart}")
            try:
                check_targets(*filter(None, [run_file]))
            except FastSiamError as error:
                destination = (
                    f"goes to {self._user_file}"
                    if self._user_file
                    else "is only printed: pass --json FILE to keep it"
                )
                console.warn(f"{error}; the result {destination}")
                run_file = None
        self._run_file = run_file if from_leader("yes" if run_file else "") else None
        file = self._run_file or self._user_file
        self._state: Path | None = None
        if file and (file.is_file() or not file.exists()):  # not a device or a pipe
            real_path = Path(os.path.realpath(file))  # /dev/stdout may be redirected to a file
            self._state = real_path.with_name(f"{real_path.name.removesuffix('.json')}.partial")
        # "steps": states of version 0.2 count epochs and are not resumed.
        self._identity = f"steps {evaluation.network.fingerprint} {evaluation.identity}"
        self.results: list[dict[str, Any]] = []
        """Results of this evaluation's completed trainings; saved with the state of the next."""
        self.saved: dict[str, Any] | None = None
        """Loaded state of an interrupted training: "step" and "training"."""
        if isinstance(config, LabelConfig | DetectConfig) and config.resume == "auto":
            self._load()

    def _load(self) -> None:
        """Load the saved state on every rank, or on no rank if some do not find it.

        Raises:
            CheckpointError: a rank cannot read it.
        """
        saved, failure = dict[str, Any](), ""
        if (state := self._state) is not None:
            try:
                saved = _read(state, self._place.device)
            except DamagedError:
                self.console.warn(f"{state} is corrupt: starting over")
            except CheckpointError as error:
                failure = str(error)
        if failures := [text for text in from_all(failure) if text]:
            raise CheckpointError(failures[0])
        step = torch.tensor([saved["step"] if saved.get("same") == self._identity else 0])
        if int(minimum_across_ranks(step)):
            self.saved, self.results = saved, saved["results"]

    def save_state(self, step: int, state: Callable[[], dict[str, Any]], *, last: bool) -> None:
        """Save the state after ``step`` steps, at most every 30 seconds unless it is the last."""
        too_soon = time.monotonic() - self._saved_at < _SECONDS_BETWEEN_SAVES
        if self._state is None or not self._place.is_leader or (too_soon and not last):
            return
        saved = {"same": self._identity, "step": step, "training": state(), "results": self.results}
        try:
            with atomic_write(self._state) as temporary:
                torch.save(saved, temporary)
        except (OSError, RuntimeError) as error:
            self.console.warn(f"cannot save {self._state} ({why(error)}); continuing without")
        self._saved_at = time.monotonic()

    def keep(self, show: Show | None, **results: Any) -> Record:
        """Show the record and write it, on rank 0; then delete the saved state. Return the record.

        ``results`` are the fields of the record that the evaluation lacks.

        Raises:
            FastSiamError: the record cannot be written or shown.
        """
        record = self.evaluation.record(**results)
        if not self._place.is_leader:
            return record
        with contextlib.ExitStack() as stack:  # each of these is done even if another fails
            for target in filter(None, (self._run_file, self._user_file)):
                stack.callback(write_json, target, record.to_dict())
            if show:
                show(record)
        if self._state:
            self._state.unlink(missing_ok=True)
        return record


def _read(state: Path, device: torch.device) -> dict[str, Any]:
    """Read a saved state; empty if the file does not exist.

    Raises:
        DamagedError: it is corrupt.
        CheckpointError: it cannot be read, or memory ran out.
    """
    with read_errors(state):
        if not is_file(state):
            return {}
        if is_intact(state):
            saved: dict[str, Any] = torch.load(state, map_location=device, weights_only=True)
            return saved
    raise DamagedError(f"{state} does not match its checksum")
