"""Where the figures of a run go beside ``metrics.jsonl``: TensorBoard, Weights & Biases, MLflow.

Each tracker works in a thread of its own, which alone waits for a disk or a network: training goes
on at its speed whatever becomes of a tracker. One that fails is left out, with one warning. Its
package is imported only where it is asked for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import IO, Any, ClassVar

from fastsiam.errors import BackendError
from fastsiam.files import why
from fastsiam.leaving import note_hanging
from fastsiam.training.folder import RunFolder

_PATIENCE = 20.0
"""Seconds that the end of a run waits for trackers still at work; schedulers wait 30 for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """What a tracker is told of a run."""

    folder: RunFolder
    settings: Mapping[str, Any]
    """Every setting by its flag's name."""
    step: int
    """Steps that the run goes on from."""


class Tracker(ABC):
    """Takes figures somewhere. But for ``check``, a thread of its own calls all of it."""

    name: ClassVar[str]
    """Its name in ``--tracker``."""
    modules: ClassVar[tuple[str, ...]]
    """What it needs to import."""
    install: ClassVar[str]
    """What brings that, as pip is told."""

    def __init__(self, run: Tracked) -> None:
        self.run = run

    @classmethod
    def check(cls) -> None:
        """Refuse what is known not to work, before anything starts; imports the package.

        Raises:
            BackendError: the package is missing, or lacks what it needs; one line.
        """
        cls.load()

    @classmethod
    def load(cls) -> None:
        """Import the package: in the main thread, before loaders fork.

        Raises:
            BackendError: it is missing.
        """
        try:
            for module in cls.modules:
                import_module(module)
        except ImportError as error:
            raise BackendError(
                f"--tracker {cls.name} misses its package ({error}): pip install {cls.install}"
            ) from error

    @abstractmethod
    def open(self) -> None:
        """Begin, or go on with what an earlier part of the run began."""

    @abstractmethod
    def write(self, figures: Mapping[str, float], step: int) -> None:
        """Take the figures after so many steps, by names such as ``train/loss``."""

    @abstractmethod
    def close(self, *, complete: bool) -> None:
        """End; ``complete`` tells whether the run came to where it should."""

    @property
    def _kept_in(self) -> str:
        return f"trackers/{self.name}.txt"

    def _earlier(self) -> str:
        """Return by which name the tracker knows the run that goes on; "" if it is a new one."""
        path = self.run.folder.path / self._kept_in
        return path.read_text().strip() if self.run.step and path.is_file() else ""

    def _remember(self, name: str) -> None:
        self.run.folder.keep(self._kept_in, f"{name}\n".encode())


class TensorBoard(Tracker):
    """Event files in ``RUN/tensorboard``.

    They are written here, not by ``SummaryWriter``, whose own thread prints a traceback if the disk
    is full.
    """

    name, install = "tensorboard", "tensorboard"
    modules = "tensorboard.summary.writer.record_writer", "tensorboard.compat.proto.event_pb2"

    def open(self) -> None:
        """Begin a file that overrules what others hold of later steps."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        folder = self.run.folder.path / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / name
        self._file: IO[bytes] = self._path.open("wb")
        self._add(Event(file_version="brain.Event:2"))
        self._add(Event(step=self.run.step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, figures: Mapping[str, float], step: int) -> None:
        """Add a scalar for each figure."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if not self._path.exists():  # somebody deleted the folder
            self._file.close()
            self.open()
        for name, value in figures.items():
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
            self._add(Event(step=step, summary=summary))

    def close(self, *, complete: bool) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        event.wall_time = time.time()
        RecordWriter(self._file).write(event.SerializeToString())
        self._file.flush()


class WandB(Tracker):
    """Weights & Biases: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and its other variables hold."""

    name, modules, install = "wandb", ("wandb",), "'fastsiam[wandb]'"

    @classmethod
    def check(cls) -> None:
        """Refuse a missing package or key; a network that fails is no reason not to train."""
        super().check()
        import wandb

        if wandb.setup().settings.mode != "online":
            return
        with contextlib.suppress(wandb.Error):
            if not wandb.login(prompt=False):
                raise BackendError(
                    "--tracker wandb has no key: run wandb login first, or set WANDB_MODE=offline"
                )

    def open(self) -> None:
        """Begin a run of wandb, or go on with the same one; its files go into the run's folder."""
        import wandb

        path, variables = self.run.folder.path, os.environ
        console: Any = variables.get("WANDB_CONSOLE") or "off"  # a progress bar is no log
        name = self._earlier() or variables.get("WANDB_RUN_ID") or secrets.token_hex(4)
        self._run = wandb.init(
            id=name,
            resume="allow",
            name=variables.get("WANDB_NAME") or path.resolve().name,
            dir=variables.get("WANDB_DIR") or path,
            config={**self.run.settings, "folder": str(path.resolve())},
            reinit="create_new",
            settings=wandb.Settings(
                console=console,
                finish_timeout=_PATIENCE - 5,
                finish_timeout_raises=True,
            ),
        )
        self._remember(name)

    def write(self, figures: Mapping[str, float], step: int) -> None:
        """Add a row of history; wandb drops steps that it has, which a resumed run repeats."""
        self._run.log(dict(figures), step=step)

    def close(self, *, complete: bool) -> None:
        """Wait until all is sent, or no longer than ``finish_timeout``."""
        self._run.finish(exit_code=0 if complete else 1)


class MLflow(Tracker):
    """MLflow: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and its other variables hold."""

    name, modules, install = "mlflow", ("mlflow",), "'fastsiam[mlflow]'"

    @classmethod
    def check(cls) -> None:
        """Refuse a missing package, and a store that this installation cannot write."""
        super().check()
        import mlflow

        try:
            mlflow.MlflowClient()
        except Exception as error:
            where, reason = mlflow.get_tracking_uri(), why(error).strip()
            raise BackendError(
                f"--tracker mlflow cannot write {where} ({reason}); set MLFLOW_TRACKING_URI to "
                "a server, or pip install mlflow, which has databases too"
            ) from error

    def open(self) -> None:
        """Begin a run of MLflow, or go on with the same one if its store still has it."""
        import mlflow

        path = self.run.folder.path.resolve()
        logging.getLogger("urllib3").setLevel(logging.ERROR)  # it tells of each attempt
        earlier = self._earlier()
        try:
            began = mlflow.start_run(run_id=earlier) if earlier else None
        except mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            began = None
        if began is None:  # settings are given once: MLflow refuses to change them
            began = mlflow.start_run(run_name=path.name)
            mlflow.log_params(dict(self.run.settings))
            mlflow.set_tag("folder", str(path))
        self._remember(began.info.run_id)

    def write(self, figures: Mapping[str, float], step: int) -> None:
        """Send a metric for each figure."""
        import mlflow

        mlflow.log_metrics(dict(figures), step=step)

    def close(self, *, complete: bool) -> None:
        """End the run: FINISHED, or KILLED if it stopped before its end."""
        import mlflow

        mlflow.end_run("FINISHED" if complete else "KILLED")


TRACKERS: dict[str, type[Tracker]] = {kind.name: kind for kind in (TensorBoard, WandB, MLflow)}
"""By their names, which ``fastsiam.config`` has too."""


def check_trackers(names: Iterable[str]) -> None:
    """Refuse trackers that cannot work, before anything starts.

    Raises:
        BackendError: a package is missing, or lacks what it needs.
    """
    for name in names:
        TRACKERS[name].check()


class Trackers:
    """Some trackers at work, each in its thread.

    Args:
        names: of ``TRACKERS``.
        run: what they are told of it.
    """

    def __init__(self, names: Iterable[str], run: Tracked) -> None:
        names = tuple(names)
        for name in names:
            TRACKERS[name].load()
        self._console = run.folder.console
        self._working = {name: _Working(TRACKERS[name](run)) for name in names}

    def write(self, figures: Mapping[str, float], step: int) -> None:
        """Hand on the figures after so many steps; waits for nothing, raises nothing."""
        for name, tracker in list(self._working.items()):
            tracker.todo.put((figures, step))
            if tracker.error:
                self._leave_out(name, why(tracker.error))

    def close(self, *, complete: bool) -> None:
        """End all, and wait for them a little.

        Args:
            complete: whether the run came to where it should.
        """
        for tracker in self._working.values():
            tracker.complete = complete
            tracker.todo.put(None)
        until = time.monotonic() + _PATIENCE
        for name, tracker in list(self._working.items()):
            tracker.thread.join(max(0.0, until - time.monotonic()))
            if tracker.error:
                self._leave_out(name, why(tracker.error))
            elif tracker.thread.is_alive():
                self._leave_out(name, f"it is not done after {_PATIENCE:.0f} s")
                note_hanging()
        self._working.clear()

    def _leave_out(self, name: str, reason: str) -> None:
        del self._working[name]
        self._console.warn(
            f"--tracker {name} failed and is left out from here on ({reason}); "
            "metrics.jsonl has all figures"
        )


class _Working:
    """A tracker and the thread in which it works."""

    def __init__(self, tracker: Tracker) -> None:
        self.todo: queue.SimpleQueue[tuple[Mapping[str, float], int] | None] = queue.SimpleQueue()
        self.complete = False
        self.error: BaseException | None = None
        name = f"fastsiam-{type(tracker).__name__}"
        self.thread = threading.Thread(target=self._work, args=(tracker,), name=name, daemon=True)
        self.thread.start()

    def _work(self, tracker: Tracker) -> None:
        try:
            tracker.open()
            while (item := self.todo.get()) is not None:
                tracker.write(*item)
            tracker.close(complete=self.complete)
        except BaseException as error:
            self.error = error
