"""Trackers store a run's metrics; a missing package or a failure costs one line."""

from __future__ import annotations

import signal
import struct
import sys
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fastsiam.config import TrainConfig
from fastsiam.config.run import TRACKERS as NAMES
from fastsiam.distributed import Signalled, StopSignals
from fastsiam.errors import BackendError, Interrupted
from fastsiam.run.log import read_metrics
from fastsiam.run.run_folder import RunFolder
from fastsiam.run.trackers import TRACKERS, Trackers, check_trackers
from fastsiam.train.command import train_here
from tests.configs import flags, with_settings
from tests.conftest import import_or_skip
from tests.processes import fastsiam


def read_expected_metrics(run: Path) -> dict[int, dict[str, float]]:
    """Return a run's metrics by step, with the names that trackers use."""
    metrics: dict[int, dict[str, float]] = {}
    for line in read_metrics(run):
        at = metrics.setdefault(line.get("step", round(line["epoch"] * 3)), {})
        at |= {
            f"{line['kind']}/{name}": value
            for name, value in line.items()
            if name not in ("kind", "step", "epoch", "since", "seen")
        }
    return metrics


def wandb_records(file: Path) -> list[Any]:
    """Read a .wandb file, which is in LevelDB's log format after a header of 7 bytes."""
    pb = import_or_skip("wandb.proto.wandb_internal_pb2")
    data, at, parts, records = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        if not kind:
            break
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a full record, or the last part of one
            record = pb.Record()
            record.ParseFromString(parts)
            records.append(record)
            parts = b""
    return records


@pytest.mark.slow
def test_wandb_offline_file_has_settings_and_metrics(small: TrainConfig, tmp_path: Path) -> None:
    """The file contains the settings and metrics. A resumed run keeps its id."""
    import_or_skip("wandb")
    config = with_settings(small, epochs=2, tracker="wandb,tensorboard")
    run = tmp_path / "run"
    options: dict[str, Any] = {"environment": {"WANDB_MODE": "offline", "WANDB_PROJECT": "own"}}
    fastsiam("train", *flags(with_settings(config, max_steps=4)), **options)
    fastsiam("train", *flags(config), **options)
    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"), key=lambda x: x.stat().st_mtime)
    assert len(files) == 2 and len({file.name for file in files}) == 1
    rows: dict[int, dict[str, float]] = {}
    for file in files:
        records = wandb_records(file)
        (began,) = (r.run for r in records if r.WhichOneof("record_type") == "run")
        assert began.run_id == (run / "trackers" / "wandb.txt").read_text().strip()
        assert (began.display_name, began.project) == ("run", "own")
        settings = {item.key: item.value_json for item in began.config.update}
        assert settings["knn_every"] == "2" and settings["method"] == '"simsiam"'
        assert settings["folder"] == f'"{run}"' and set(config.to_flags()) <= set(settings)
        for record in records:
            if record.WhichOneof("record_type") == "history":
                items = {i.key or i.nested_key[0]: i.value_json for i in record.history.item}
                row = {key: float(x) for key, x in items.items() if not key.startswith("_")}
                rows.setdefault(int(items["_step"]), {}).update(row)
    assert rows == {step: pytest.approx(row) for step, row in read_expected_metrics(run).items()}
    assert sorted(rows) == list(range(7)) and list((run / "tensorboard").iterdir())


def test_wandb_logs_repeated_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server drops steps before the one after the last logged step."""
    wandb = Mock()
    wandb.init.return_value.starting_step = 4
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    trackers = Trackers(["wandb"], RunFolder(tmp_path), {}, 3)
    for step, name in ((2, "knn/top1"), (3, "train/loss"), (3, "knn/top1"), (4, "knn/top1")):
        trackers.log(step, {name: 0.5})
    logged = [(call.kwargs["step"], *call.args[0]) for call in wandb.init().log.mock_calls]
    assert logged == [(2, "knn/top1"), (3, "train/loss"), (4, "knn/top1"), (4, "knn/top1")]


def test_mlflow_store_has_settings_and_metrics(
    small: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store contains the settings and metrics. A resumed run continues the same MLflow run.

    So does one that was stopped before its first step.
    """
    mlflow = import_or_skip("mlflow")
    for name, value in {
        "MLFLOW_TRACKING_URI": f"file:{tmp_path / 'store'}",
        "MLFLOW_EXPERIMENT_NAME": "own",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }.items():
        monkeypatch.setenv(name, value)
    config = with_settings(small, epochs=2, tracker="mlflow")
    run = tmp_path / "run"
    client = mlflow.MlflowClient()

    def only() -> Any:
        experiment = client.get_experiment_by_name("own")
        (tracked_run,) = client.search_runs([experiment.experiment_id])
        return tracked_run

    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="after step 0"):
        patch.setattr(StopSignals, "over", Mock(side_effect=Signalled(signal.SIGTERM)))
        train_here(with_settings(config, max_steps=4), "imagenet")
    train_here(with_settings(config, max_steps=4), "imagenet")
    train_here(with_settings(config, workers=1, log_every=2), "imagenet")
    tracked_run = only()
    assert tracked_run.info.run_id == (run / "trackers" / "mlflow.txt").read_text().strip()
    assert (tracked_run.info.run_name, tracked_run.info.status) == ("run", "FINISHED")
    assert tracked_run.data.tags["folder"] == str(run)
    assert tracked_run.data.params == {name: str(x) for name, x in config.to_flags().items()} | {
        "max_steps": "4"
    }
    metrics = read_expected_metrics(run)
    for name in metrics[0] | metrics[1]:
        history = {
            x.step: x.value for x in client.get_metric_history(tracked_run.info.run_id, name)
        }
        assert history == {step: row[name] for step, row in metrics.items() if name in row}
    assert not (run / "tensorboard").exists()
    client.delete_run(tracked_run.info.run_id)
    TRACKERS["mlflow"](run, {}, 12).close("FINISHED")
    new_id = (run / "trackers" / "mlflow.txt").read_text().strip()
    assert only().info.run_id == new_id != tracked_run.info.run_id


def test_every_tracker_name_is_implemented() -> None:
    assert tuple(TRACKERS) == NAMES
    assert with_settings(TrainConfig(), tracker="wandb,wandb").run.trackers == ("wandb",)
    with pytest.raises(ValueError, match="unknown tracker 'x'; choose one of tensorboard, wandb"):
        with_settings(TrainConfig(), tracker="x")
    with pytest.raises(ValueError, match=r"unknown tracker ''; choose one of .*, mlflow, none$"):
        with_settings(TrainConfig(), tracker="")
    with pytest.raises(ValueError, match=r"unknown tracker 'none'; choose one of .*, mlflow$"):
        with_settings(TrainConfig(), tracker="wandb,none")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_missing_tracker_package_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of that name, such as the one that W&B creates, is not taken for the package."""
    message = rf"^--tracker {name} .*pip install 'fastsiam\[{name}\]"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BackendError, match=message):
        check_trackers([name])
    (tmp_path / name).mkdir()
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(BackendError, match=message):
        check_trackers([name])


def test_wandb_without_api_key_is_rejected(small: TrainConfig, tmp_path: Path) -> None:
    import_or_skip("wandb")
    nobody = {"HOME": str(tmp_path), "WANDB_API_KEY": "", "NETRC": str(tmp_path / "netrc")}
    arguments = flags(with_settings(small, tracker="wandb"))
    errors = fastsiam("train", *arguments, code=1, environment=nobody).stderr
    message = "error: --tracker wandb has no API key: run `wandb login`"
    assert errors.splitlines()[-1].startswith(message) and not (tmp_path / "run").exists()


def test_mlflow_is_disabled_after_failed_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thread of MLflow sends them, so the next call or the end of the run detects the failure."""
    mlflow = import_or_skip("mlflow")
    from mlflow.utils.async_logging.run_operations import RunOperations

    failed: Future[None] = Future()
    failed.set_exception(ConnectionError("the server is gone"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/store")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    operations: Any = RunOperations
    monkeypatch.setattr(mlflow, "log_metrics", lambda *_, **__: operations([failed]))
    start = partial(Trackers, folder=RunFolder(tmp_path), settings={}, step=0)
    trackers = start(["mlflow"])
    trackers.log(1, {"train/loss": 0.5})
    assert "disabled" not in capsys.readouterr().err
    trackers.log(2, {"train/loss": 0.4})
    assert "--tracker mlflow failed and is disabled" in capsys.readouterr().err
    assert mlflow.active_run() is None  # otherwise MLflow marks it as finished at exit
    run_id = (tmp_path / "trackers" / "mlflow.txt").read_text().strip()
    assert mlflow.get_run(run_id).info.status == "FAILED"
    (tmp_path / "trackers" / "mlflow.txt").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(mlflow, "log_params", lambda _: operations([failed]).wait())
        start(["mlflow"])
    assert "--tracker mlflow failed and is disabled" in capsys.readouterr().err
    assert mlflow.active_run() is None
    assert {one.info.status for one in mlflow.MlflowClient().search_runs(["0"])} == {"FAILED"}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    trackers = start(["mlflow", "tensorboard"])
    assert "--tracker mlflow failed and is disabled" in capsys.readouterr().err
    trackers.log(1, {"train/loss": 0.5})
    trackers.close("FINISHED")
    assert list((tmp_path / "tensorboard").iterdir())
