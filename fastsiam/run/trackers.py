"""Trackers: TensorBoard, Weights & Biases and MLflow.

Each tracker has its own thread, so that a slow disk or server does not delay training. A tracker
that fails is disabled with one warning. Its package is imported only if the tracker is used.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from fastsiam.errors import BackendError
from fastsiam.files import why
from fastsiam.run.folder import RunFolder
from fastsiam.signals import note_hanging

Write = Callable[[dict[str, float], int], Any]
"""Function of values by names such as ``train/loss``, and of the step they belong to."""

_PATIENCE = 20.0
"""Seconds that a run waits for its trackers at its end; schedulers wait 30 for the run."""
_EVENTS_BYTES = 1 << 16
"""Free space below which no events are written: the thread of torch's ``SummaryWriter`` would print
a traceback."""


@dataclass(slots=True, kw_only=True)
class TrackedRun:
    """The facts about a run that trackers use."""

    folder: RunFolder
    settings: Mapping[str, Any]
    """Every setting by its flag's name."""
    step: int
    """Number of steps that the run resumes after; 0 for a new run."""
    is_complete: bool = False
    """Whether the run reached its last step; set when the run ends."""

    def known_id(self, tracker: str) -> str:
        """Return the tracker's id of a run that is resumed; empty for a new run."""
        path = self.folder.path / "trackers" / f"{tracker}.txt"
        return path.read_text().strip() if self.step and path.is_file() else ""

    def keep_id(self, tracker: str, own: str) -> None:
        """Save the tracker's id of the run for the next start."""
        self.folder.keep(f"trackers/{tracker}.txt", f"{own}\n".encode())


@contextlib.contextmanager
def _tensorboard(run: TrackedRun) -> Iterator[Write]:
    from torch.utils.tensorboard import SummaryWriter

    folder = run.folder.path / "tensorboard"
    # TensorBoard hides events of later steps, which the run wrote before it was killed.
    writer: SummaryWriter | None = SummaryWriter(folder, purge_step=run.step + 1)
    _silence_tensorboard()

    def write(figures: dict[str, float], step: int) -> None:
        nonlocal writer
        if not run.folder.path.is_dir():  # deleted; it is recreated before the next values
            return
        if writer is None or not folder.is_dir():
            writer = SummaryWriter(folder)
        try:
            if shutil.disk_usage(folder).free < _EVENTS_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for name, value in figures.items():
                writer.add_scalar(name, value, step)
            writer.flush()
        except FileNotFoundError:  # deleted just now
            writer = None

    yield write
    if writer is not None:
        writer.close()


def _silence_tensorboard() -> None:
    """Hide tracebacks of the thread of ``SummaryWriter``: ``flush`` raises its errors anyway."""
    hook = threading.excepthook

    def quiet(args: threading.ExceptHookArgs) -> None:
        if not type(args.thread).__module__.startswith("tensorboard."):
            hook(args)

    threading.excepthook = quiet


@contextlib.contextmanager
def _wandb(run: TrackedRun) -> Iterator[Write]:
    import wandb

    path, variables = run.folder.path, os.environ
    console: Any = variables.get("WANDB_CONSOLE") or "off"  # else it logs the progress bar
    own = run.known_id("wandb") or variables.get("WANDB_RUN_ID") or secrets.token_hex(4)
    tracked = wandb.init(
        id=own,
        resume="allow",
        name=variables.get("WANDB_NAME") or path.resolve().name,
        dir=variables.get("WANDB_DIR") or path,
        config={**run.settings, "folder": str(path.resolve())},
        reinit="create_new",
        settings=wandb.Settings(
            console=console, finish_timeout=_PATIENCE - 5, finish_timeout_raises=True
        ),
    )
    run.keep_id("wandb", own)
    # A resumed run repeats steps; wandb drops those it already has.
    yield lambda figures, step: tracked.log(figures, step=step)
    tracked.finish(exit_code=0 if run.is_complete else 1)


@contextlib.contextmanager
def _mlflow(run: TrackedRun) -> Iterator[Write]:
    import mlflow

    path, tracked = run.folder.path.resolve(), None
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it logs each attempt
    if own := run.known_id("mlflow"):
        try:
            tracked = mlflow.start_run(run_id=own)
        except mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
    if tracked is None:  # settings are sent once: MLflow refuses to change them
        tracked = mlflow.start_run(run_name=path.name)
        mlflow.log_params(dict(run.settings))
        mlflow.set_tag("folder", str(path))
    run.keep_id("mlflow", tracked.info.run_id)
    yield lambda figures, step: mlflow.log_metrics(figures, step=step)
    mlflow.end_run("FINISHED" if run.is_complete else "KILLED")


TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
"""Context manager for each value of ``--tracker``; it yields the function that writes values."""


def check_trackers(names: Iterable[str]) -> None:
    """Check that trackers work, before a run starts.

    Raises:
        BackendError: a package is missing or not set up.
    """
    for name in names:
        _load(name)
        if name == "wandb":
            _check_wandb()
        if name == "mlflow":
            _check_mlflow()


def _load(name: str) -> None:
    package = "torch.utils.tensorboard" if name == "tensorboard" else name
    try:
        import_module(package)
    except ImportError as error:
        raise BackendError(
            f"--tracker {name} needs a package ({error}): pip install "
            + ("tensorboard" if name == "tensorboard" else f"'fastsiam[{name}]'")
        ) from error


def _check_wandb() -> None:
    """Check that there is a key; errors of the network are ignored."""
    import wandb

    with contextlib.suppress(wandb.Error):
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise BackendError(
                "--tracker wandb has no API key: run `wandb login`, or set WANDB_MODE=offline"
            )


def _check_mlflow() -> None:
    """Check that this installation of MLflow can write to its store."""
    import mlflow

    try:
        mlflow.MlflowClient()
    except Exception as error:
        raise BackendError(
            f"--tracker mlflow cannot write {mlflow.get_tracking_uri()} ({why(error).strip()}); "
            "set MLFLOW_TRACKING_URI to a server, or `pip install mlflow` for databases"
        ) from error


class Trackers:
    """The trackers of a run.

    Args:
        names: keys of ``TRACKERS``.
        run: facts about the run.
    """

    def __init__(self, names: Iterable[str], run: TrackedRun) -> None:
        names = tuple(names)
        for name in names:
            _load(name)  # in the main thread, before loaders fork
        self._run = run
        self._threads = {name: _TrackerThread(name, run) for name in names}

    def write(self, figures: dict[str, float], step: int) -> None:
        """Queue values of a step for all trackers; returns at once and raises no errors."""
        for name, thread in list(self._threads.items()):
            thread.todo.put((figures, step))
            if thread.error:
                self._leave_out(name, why(thread.error))

    def close(self, *, complete: bool) -> None:
        """End all trackers; wait for them at most 20 seconds.

        Args:
            complete: whether the run reached its last step.
        """
        self._run.is_complete = complete
        for thread in self._threads.values():
            thread.todo.put(None)
        until = time.monotonic() + _PATIENCE
        for name, thread in list(self._threads.items()):
            thread.join(max(0.0, until - time.monotonic()))
            if thread.error:
                self._leave_out(name, why(thread.error))
            elif thread.is_alive():
                self._leave_out(name, f"not finished after {_PATIENCE:.0f} s")
                note_hanging()
        self._threads.clear()

    def _leave_out(self, name: str, reason: str) -> None:
        del self._threads[name]
        self._run.folder.console.warn(
            f"--tracker {name} failed and is disabled ({reason}); metrics.jsonl has all values"
        )


class _TrackerThread(threading.Thread):
    def __init__(self, name: str, run: TrackedRun) -> None:
        super().__init__(name=f"fastsiam-{name}", daemon=True)
        self.todo: queue.SimpleQueue[tuple[dict[str, float], int] | None] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self._open, self._run = TRACKERS[name], run
        self.start()

    def run(self) -> None:
        try:
            with self._open(self._run) as write:
                while (item := self.todo.get()) is not None:
                    write(*item)
        except BaseException as error:
            self.error = error
