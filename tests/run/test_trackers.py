"""Trackers: their own stores hold the figures; what is missing or fails costs one line."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastsiam import signals
from fastsiam.config import TrainConfig
from fastsiam.config.flags import to_flags
from fastsiam.config.train import TRACKERS as NAMES
from fastsiam.errors import BackendError
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run import trackers
from fastsiam.run.folder import RunFolder
from fastsiam.run.log import read_metrics
from fastsiam.run.trackers import TRACKERS, TrackedRun, Trackers, Write, check_trackers
from fastsiam.signals import is_hanging
from tests.configs import flags, with_settings
from tests.conftest import skip
from tests.processes import ROOT, fastsiam


def needs(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        skip(f"needs {package}: pip install 'fastsiam[{package}]'")


def expected(run: Path) -> dict[int, dict[str, float]]:
    """Return the figures of a run's metrics by step, as trackers name them."""
    found: dict[int, dict[str, float]] = {}
    for line in read_metrics(run):
        at = found.setdefault(line.get("step", round(line["epoch"] * 3)), {})
        at |= {
            f"{line['kind']}/{name}": value
            for name, value in line.items()
            if name not in ("kind", "step", "epoch", "since", "seen")
        }
    return found


def wandb_records(file: Path) -> list[Any]:
    """Read a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    pb = needs("wandb.proto.wandb_internal_pb2")
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
        if kind in (1, 4):  # whole, or the last part
            record = pb.Record()
            record.ParseFromString(parts)
            records.append(record)
            parts = b""
    return records


def test_wandb_offline(small: TrainConfig, tmp_path: Path) -> None:
    """Its file holds the settings and figures, and a resumed run continues under the same id."""
    needs("wandb")
    config = with_settings(small, epochs=2, tracker="wandb,tensorboard")
    run = tmp_path / "run"
    how: dict[str, Any] = {"environment": {"WANDB_MODE": "offline", "WANDB_PROJECT": "own"}}
    fastsiam("train", *flags(with_settings(config, max_steps=4)), **how)
    fastsiam("train", *flags(config), **how)
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
        assert settings["folder"] == f'"{run}"' and set(to_flags(config)) <= set(settings)
        for record in records:
            if record.WhichOneof("record_type") == "history":
                items = {i.key or i.nested_key[0]: i.value_json for i in record.history.item}
                row = {key: float(x) for key, x in items.items() if not key.startswith("_")}
                rows.setdefault(int(items["_step"]), {}).update(row)
    assert rows == {step: pytest.approx(row) for step, row in expected(run).items()}
    assert sorted(rows) == list(range(7)) and list((run / "tensorboard").iterdir())


def test_mlflow_files(small: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store holds the settings and figures; a resumed run continues in the same one."""
    mlflow = needs("mlflow")
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
        (found,) = client.search_runs([experiment.experiment_id])
        return found

    fastsiam("train", *flags(with_settings(config, max_steps=4)))
    fastsiam("train", *flags(config), "--workers", "1", "--log-every", "2")
    found = only()
    assert found.info.run_id == (run / "trackers" / "mlflow.txt").read_text().strip()
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.data.tags["folder"] == str(run)
    assert found.data.params == {name: str(x) for name, x in to_flags(config).items()} | {
        "max_steps": "4"
    }
    wanted = expected(run)
    for name in wanted[0] | wanted[1]:
        history = {x.step: x.value for x in client.get_metric_history(found.info.run_id, name)}
        assert history == {step: row[name] for step, row in wanted.items() if name in row}
    assert not (run / "tensorboard").exists()
    client.delete_run(found.info.run_id)
    mlflow.tracking._tracking_service.utils._get_store()._hard_delete_run(found.info.run_id)
    fastsiam("train", *flags(config))
    assert only().info.run_name == "run"  # a new one: its store had lost the other


def test_events_of_a_folder_that_is_deleted_while_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are lost with it, without a traceback of TensorBoard's thread; later ones are not."""
    real, folder = shutil.disk_usage, tmp_path / "tensorboard"

    def deleted(path: Path) -> Any:
        found = real(path)
        shutil.rmtree(path)
        return found

    run = TrackedRun(folder=RunFolder(tmp_path), settings={}, step=0)
    with TRACKERS["tensorboard"](run) as write:
        monkeypatch.setattr(shutil, "disk_usage", deleted)
        write({"loss": 1.0}, 1)
        assert not folder.exists()
        monkeypatch.setattr(shutil, "disk_usage", real)
        write({"loss": 2.0}, 2)
        assert len(list(folder.iterdir())) == 1
        folder.rename(tmp_path / "moved")
        tmp_path.rename(tmp_path.with_name("gone"))
        write({"loss": 3.0}, 3)
        assert not tmp_path.exists()  # the run makes it again, not its tracker
        tmp_path.with_name("gone").rename(tmp_path)
        (tmp_path / "moved").rename(folder)
    assert "Traceback" not in capfd.readouterr().err


def test_none(small: TrainConfig, tmp_path: Path) -> None:
    fastsiam("train", *flags(with_settings(small, max_steps=1, tracker="none")))
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_every_name_has_a_tracker() -> None:
    assert tuple(TRACKERS) == NAMES
    assert with_settings(TrainConfig(), tracker="wandb,wandb").run.trackers == ("wandb",)
    with pytest.raises(ValueError, match="unknown tracker 'x'; there are tensorboard, wandb"):
        with_settings(TrainConfig(), tracker="x")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_one_line_before_anything_starts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BackendError, match=rf"^--tracker {name} .*pip install 'fastsiam\[{name}\]"):
        check_trackers([name])


def test_a_tracker_that_cannot_be_used_is_refused(small: TrainConfig, tmp_path: Path) -> None:
    """No key for wandb; a database that mlflow-skinny has no code for."""
    needs("wandb")
    needs("mlflow")
    nobody = {"HOME": str(tmp_path), "WANDB_API_KEY": "", "NETRC": str(tmp_path / "netrc")}
    for name, said, environment in (
        ("wandb", "has no API key: run `wandb login`", nobody),
        ("mlflow", "set MLFLOW_TRACKING_URI to a server", {"MLFLOW_TRACKING_URI": "x://y"}),
    ):
        arguments = flags(with_settings(small, tracker=name))
        errors = fastsiam("train", *arguments, code=1, environment=environment).stderr
        assert errors.splitlines()[-1].startswith(f"error: --tracker {name} ") and said in errors
    assert not (tmp_path / "run").exists()


def test_a_server_that_is_not_there_ends_nothing(small: TrainConfig, tmp_path: Path) -> None:
    needs("mlflow")
    nowhere = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    arguments = flags(with_settings(small, tracker="mlflow,tensorboard"))
    said = fastsiam("train", *arguments, environment=nowhere).stderr
    assert said.count("warning: --tracker mlflow failed and is disabled") == 1
    assert "Traceback" not in said
    assert checkpoints.load(tmp_path / "run").step == 12 and list(
        tmp_path.glob("run/tensorboard/*")
    )


def test_a_slow_tracker_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    answers, steps = threading.Event(), []

    @contextlib.contextmanager
    def slow(run: TrackedRun) -> Iterator[Write]:
        assert answers.wait(60)

        def write(figures: dict[str, float], step: int) -> None:
            steps.append(step)
            if step == 2:
                raise ConnectionError("gone\nwith more to say")

        yield write

    monkeypatch.setitem(trackers.TRACKERS, "slow", slow)
    monkeypatch.setattr(trackers, "_load", lambda name: None)
    monkeypatch.setattr(trackers, "_PATIENCE", 0.1)
    monkeypatch.setattr(signals, "_is_hanging", False)
    run = TrackedRun(folder=RunFolder(tmp_path), settings={}, step=0)
    ours = Trackers(["slow"], run)
    for step in range(4):
        ours.write({"train/loss": 0.5}, step)
    ours.close(complete=True)
    assert steps == [] and is_hanging()
    assert "(not finished after 0 s)" in capfd.readouterr().err
    answers.set()
    monkeypatch.setattr(trackers, "_PATIENCE", 60)
    ours = Trackers(["slow"], run)
    for step in range(4):
        ours.write({"train/loss": 0.5}, step)
    ours.close(complete=True)
    said = capfd.readouterr().err
    assert said.count("warning: --tracker slow failed and is disabled (gone)") == 1


@pytest.mark.parametrize("code", [0, 143])
def test_a_tracker_that_hangs_does_not_hold_up_the_end(code: int) -> None:
    """Its library would wait for it there; the exit code is the run's."""
    program = (
        "import atexit, sys, time, fastsiam.cli as cli, fastsiam.signals as leaving\n"
        "atexit.register(time.sleep, 600)\n"
        f"cli.app = lambda: (leaving.note_hanging(), print('done'), sys.exit({code or None}))\n"
        "cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "done\n", "")
