"""Machine warnings appear once per problem in the log, on the screen and in the report."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from fastsiam.config import TrainConfig
from fastsiam.console import Console, size
from fastsiam.report.run_report import write_report
from fastsiam.run import checkpoint as checkpoints
from fastsiam.run.log import MetricsLog, read_metrics
from fastsiam.run.run_folder import RunFolder
from fastsiam.train import gauges
from fastsiam.train.gauges import MachineMonitor
from tests.configs import with_settings
from tests.train.runs import train_run

pytestmark = pytest.mark.usefixtures("ample_memory")


def collect_warnings(run: Path, waits: list[float]) -> list[str]:
    log = MetricsLog(RunFolder(run), step=0, steps_per_epoch=10)
    machine_monitor = MachineMonitor(log, console=Console(quiet=True))
    for step, wait in enumerate(waits, start=1):
        machine_monitor.check({"step": step, "epoch": step / 10, "data_wait": wait})
    log.close()
    return [f"{line['step']} {line['name']}: {line['text']}" for line in read_metrics(run)]


def test_slowing_loader_causes_warning(tmp_path: Path) -> None:
    """A loader that was slow from the start, or for a few log points, gives no warning."""
    steady = [0.9, *(60 * [0.3])]
    assert collect_warnings(tmp_path / "steady", [*steady, *(18 * [0.9]), *steady]) == []
    (warning,) = collect_warnings(tmp_path / "slower", [*steady, *(60 * [0.41])])
    assert warning == (
        "82 data_wait: data wait grew from 30% to 41% (medians of 40 log points): the loader "
        "became slower"
    )


def test_low_host_memory_causes_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges, "host_memory", lambda: (3 * 10**9, 64 * 10**9))
    (warning,) = collect_warnings(tmp_path, 3 * [0.02])
    assert warning.startswith("1 memory: the host has 3.0 GB of 64 GB memory left; ")


def test_low_disk_space_is_logged_printed_and_reported(
    small: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A run warns after its first checkpoint, and again when it is resumed."""
    config = with_settings(small, knn_every=0, save_every=2)
    folder = checkpoints.last(Path(config.run.out)).parent  # may be a link to another disk
    free = {folder: 10**5}
    monkeypatch.setattr(
        "shutil.disk_usage", lambda path: SimpleNamespace(free=free.get(path, 10**12))
    )
    run = train_run(config, max_steps=4)
    takes = size(checkpoints.last(run).stat().st_size)
    text = f"the disk of {folder} has 100 kB left; a checkpoint takes {takes}, and the previous one"
    assert capfd.readouterr().err.count(f"warning: {text}") == 1
    train_run(config)
    assert capfd.readouterr().err.count(f"warning: {text}") == 1
    alarms = [line for line in read_metrics(run) if line["kind"] == "alarm"]
    assert [(line["step"], line["name"]) for line in alarms] == [(3, "disk"), (5, "disk")]
    page = write_report([run], tmp_path / "page.html").read_text()
    assert "<h2>Alarms</h2>" in page and f"epoch 1: the disk of {folder} has 100 kB left" in page
