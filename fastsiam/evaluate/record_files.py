"""The files of an evaluation: its record, and until that is written the state it resumes from."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fastsiam.config.detect import DetectConfig
from fastsiam.config.evaluate import LabelConfig, NetworkConfig
from fastsiam.console import Console
from fastsiam.distributed import Place, from_leader, minimum_across_ranks
from fastsiam.errors import FastSiamError
from fastsiam.files import why, write_json, written_whole
from fastsiam.run.records import Evaluation, Record, check_targets

Show = Callable[[Record], None]
"""Shows a record to the user: it is seen even if it cannot be written."""

_SECONDS_BETWEEN_SAVES = 30.0


class RecordFiles:
    """Where an evaluation's record goes: into its run, if it has one, and where the user wants it.

    Whether both can be written is tried at once. That the run's cannot is a warning: the run may be
    a colleague's. The state is saved beside the record by rank 0, and found by every rank.

    Args:
        run: the run's folder.
        evaluation: what is evaluated.
        details: of the protocol, for the name of the run's file; empty ones are left out.
        config: names the user's file, and says whether an earlier state is resumed.

    Raises:
        FastSiamError: the user's file cannot be written.
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
        self._asked = Path(config.json) if config.json else None
        own = None if run is None else evaluation.path(run, *details)
        if place.is_leader:
            if self._asked:
                check_targets(self._asked)
            elif own is None:
                restart = ", and to resume after an interruption" * (evaluation.kind != "knn")
                console.warn(f"no run folder: pass --json FILE to keep the result{restart}")
            try:
                check_targets(*filter(None, [own]))
            except FastSiamError as error:
                fate = (
                    f"goes to {self._asked}"
                    if self._asked
                    else "is only shown: --json FILE keeps it"
                )
                console.warn(f"{error}; the result {fate}")
                own = None
        self._own = own if from_leader("yes" if own else "") else None
        record = self._own or self._asked
        self._state: Path | None = None
        if record and (record.is_file() or not record.exists()):  # not a device or a pipe
            real = Path(os.path.realpath(record))  # such as what /dev/stdout is redirected to
            self._state = real.with_name(f"{real.name.removesuffix('.json')}.partial")
        # Version 0.2 counted epochs: its states are not resumed.
        self._same = f"steps {evaluation.network.fingerprint} {evaluation.identity}"
        self.results: list[dict[str, Any]] = []
        """Of the trainings of this evaluation that are done; saved with the state of the next."""
        self.saved: dict[str, Any] | None = None
        """The "step" and the state, "training", of the training that was interrupted."""
        if isinstance(config, LabelConfig | DetectConfig) and config.resume == "auto":
            self._load()

    def _load(self) -> None:
        """Load what ``save_state`` saved, on every rank or, where only some find it, on none."""
        saved: dict[str, Any] = {}
        if self._state is not None and self._state.is_file():
            try:
                saved = torch.load(self._state, map_location=self._place.device, weights_only=True)
            except Exception:  # a damaged file makes the unpickler raise anything
                self.console.warn(f"{self._state} is damaged: starting over")
        step = torch.tensor([saved["step"] if saved.get("same") == self._same else 0])
        if int(minimum_across_ranks(step)):
            self.saved, self.results = saved, saved["results"]

    def save_state(self, step: int, state: Callable[[], dict[str, Any]], *, last: bool) -> None:
        """Save the state of a training after a step, at most every 30 seconds, and the last."""
        soon = time.monotonic() - self._saved_at < _SECONDS_BETWEEN_SAVES
        if self._state is None or not self._place.is_leader or (soon and not last):
            return
        saved = {"same": self._same, "step": step, "training": state(), "results": self.results}
        try:
            with written_whole(self._state) as temporary:
                torch.save(saved, temporary)
        except (OSError, RuntimeError) as error:
            self.console.warn(f"cannot save {self._state} ({why(error)}); continuing without")
        self._saved_at = time.monotonic()

    def keep(self, record: Record, show: Show | None = None) -> Record:
        """Show a record and write it, on rank 0; then remove the state. Return the record.

        Raises:
            FastSiamError: it cannot be written, or shown.
        """
        if not self._place.is_leader:
            return record
        try:
            if show:
                show(record)
        finally:  # even if it cannot be shown
            for target in filter(None, (self._asked, self._own)):
                write_json(target, record.to_dict())
        if self._state:
            self._state.unlink(missing_ok=True)
        return record
