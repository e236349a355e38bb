"""Experiment trackers of a run: TensorBoard, wandb and MLflow, each through its own client."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from fastsiam.errors import BackendError
from fastsiam.files import why
from fastsiam.run.run_folder import RunFolder

Outcome = Literal["FINISHED", "KILLED", "FAILED"]
"""How a run ended, in MLflow's words; KILLED means that a signal stopped it."""
_EVENTS_BYTES = 1 << 16
"""Free disk space, in bytes, below which no events are written: the thread of torch's
``SummaryWriter`` would print a traceback."""


class _TensorBoard:
    def __init__(self, run: Path, settings: Mapping[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = run / "tensorboard"
        # TensorBoard hides events of later steps, which the run wrote before it was killed, and all
        # events if it starts over.
        self._writer = SummaryWriter(self._folder, purge_step=step + 1 if step else 0)

    def log(self, step: int, figures: dict[str, float]) -> None:
        if shutil.disk_usage(self._folder).free < _EVENTS_BYTES:
            raise OSError("no space left on the disk")
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, outcome: Outcome) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, run: Path, settings: Mapping[str, Any], step: int) -> None:
        import wandb

        variables = os.environ
        console: Any = variables.get("WANDB_CONSOLE") or "off"  # else it logs the progress bar
        run_id = _known_id(run, "wandb") or variables.get("WANDB_RUN_ID") or secrets.token_hex(4)
        self._run = wandb.init(
            id=run_id,
            resume="allow",
            name=variables.get("WANDB_NAME") or run.resolve().name,
            dir=variables.get("WANDB_DIR") or run,
            config={**settings, "folder": str(run.resolve())},
            reinit="create_new",
            settings=wandb.Settings(console=console, finish_timeout=15, finish_timeout_raises=True),
        )
        _keep_id(run, "wandb", run_id)

    def log(self, step: int, figures: dict[str, float]) -> None:
        # wandb drops steps before starting_step, which a resumed run repeats. An evaluation that
        # was interrupted belongs to the last of these steps, but is new.
        if "knn/top1" in figures and step == self._run.starting_step - 1:
            step += 1
        self._run.log(figures, step=step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=0 if outcome == "FINISHED" else 1)


class _MLflow:
    def __init__(self, run: Path, settings: Mapping[str, Any], step: int) -> None:
        import mlflow

        logging.getLogger("urllib3").setLevel(logging.ERROR)  # it logs each attempt
        # By default MLflow retries for minutes, while other ranks would wait for this one.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        self._mlflow = mlflow
        self._last: Any = None  # the figures that an MLflow thread is sending
        if run_id := _known_id(run, "mlflow"):
            try:  # a new run replaces one that was deleted
                if mlflow.get_run(run_id).info.lifecycle_stage != "deleted":
                    mlflow.start_run(run_id=run_id)
                    return
            except mlflow.MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        active_run = mlflow.start_run(run_name=run.resolve().name)
        try:
            mlflow.log_params(dict(settings))  # only for a new run: MLflow cannot change them later
            mlflow.set_tag("folder", str(run.resolve()))
            _keep_id(run, "mlflow", active_run.info.run_id)
        except Exception:
            self.fail()
            raise

    def log(self, step: int, figures: dict[str, float]) -> None:
        self._wait()
        self._last = self._mlflow.log_metrics(figures, step=step, synchronous=False)

    def close(self, outcome: Outcome) -> None:
        self._wait()
        self._mlflow.end_run(outcome)

    def fail(self) -> None:
        """Mark the run as failed, if the server answers; at exit MLflow would mark it finished."""
        os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"  # other ranks wait for this one
        with contextlib.suppress(Exception):
            self._mlflow.end_run("FAILED")

    def _wait(self) -> None:
        """Wait until the last figures are sent; raise the error if sending failed."""
        if self._last is not None:
            self._last.wait()


TRACKERS: dict[str, Any] = {"tensorboard": _TensorBoard, "wandb": _Wandb, "mlflow": _MLflow}
"""Class for each value of ``--tracker``. It continues the tracker's run whose id is in the folder.
Figures have names such as ``train/loss``."""


def _known_id(run: Path, tracker: str) -> str:
    """Return the tracker's id of a resumed run; "" for a new run."""
    path = run / "trackers" / f"{tracker}.txt"
    return path.read_text().strip() if path.is_file() else ""


def _keep_id(run: Path, tracker: str, run_id: str) -> None:
    """Save the tracker's id of the run for the next start."""
    path = run / "trackers" / f"{tracker}.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{run_id}\n")


def check_trackers(names: Iterable[str]) -> None:
    """Check that the packages of trackers are installed and set up, before a run starts.

    Raises:
        BackendError: a package or wandb's key is missing.
    """
    for name in names:
        package = "torch.utils.tensorboard" if name == "tensorboard" else name
        try:
            module = import_module(package)
            if module.__file__ is None:  # not the package, but a folder with W&B's files
                raise ImportError(f"No module named '{package}'")
        except ImportError as error:
            raise BackendError(
                f"--tracker {name} needs a package ({error}): pip install "
                + ("tensorboard" if name == "tensorboard" else f"'fastsiam[{name}]'")
            ) from error
        if name == "wandb":
            with contextlib.suppress(module.Error):  # network errors
                online = module.setup().settings.mode == "online"
                if online and not module.login(prompt=False):
                    raise BackendError(
                        "--tracker wandb has no API key: run `wandb login`, or set "
                        "WANDB_MODE=offline"
                    )


class Trackers:
    """The trackers of a run. A tracker that fails is disabled with a warning.

    Args:
        names: keys of ``TRACKERS``.
        folder: the run's folder, whose console prints warnings.
        settings: every setting by its flag's name.
        step: number of steps that the run resumes after; 0 for a new run.
    """

    def __init__(
        self, names: Iterable[str], folder: RunFolder, settings: Mapping[str, Any], step: int
    ) -> None:
        self._console = folder.console
        self._trackers: dict[str, Any] = {}
        for name in names:
            with self._disabled_on_error(name):
                self._trackers[name] = TRACKERS[name](folder.path, settings, step)

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Pass figures to all trackers."""
        for name, tracker in list(self._trackers.items()):
            with self._disabled_on_error(name):
                tracker.log(step, figures)

    def close(self, outcome: Outcome) -> None:
        """End all trackers."""
        for name, tracker in list(self._trackers.items()):
            with self._disabled_on_error(name):
                tracker.close(outcome)
        self._trackers.clear()

    @contextlib.contextmanager
    def _disabled_on_error(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a client may raise anything
            tracker = self._trackers.pop(name, None)
            if isinstance(tracker, _MLflow):
                tracker.fail()
            self._console.warn(
                f"--tracker {name} failed and is disabled ({why(error)}); metrics.jsonl has all "
                "values"
            )
