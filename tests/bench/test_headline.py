"""The headline benchmark: training in resumable slices, the record and the picture."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastsiam.bench import headline
from fastsiam.bench.config import HeadlineConfig
from fastsiam.bench.headline import PICTURE, RECORD, Training, draw, run
from fastsiam.config.recipes import RECIPES
from fastsiam.environment import environment
from fastsiam.errors import DataError, FastSiamError
from fastsiam.run import checkpoint as checkpoints
from tests.bench.sample_records import wait_for_text
from tests.configs import with_settings
from tests.conftest import write_images
from tests.processes import Forked

_FAKE_RUN = """
import signal, sys, time
from pathlib import Path
heard = Path(sys.argv[1])
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: heard.write_text(heard.read_text() + f"{number} "))
heard.write_text("signals: ")
while not heard.with_name("all-sent").exists():
    time.sleep(0.05)
time.sleep(1)
"""
"""A fake run that logs the signals it receives. It exits a second after the test sent its last."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_is_sent_to_run_once(number: signal.Signals, tmp_path: Path) -> None:
    """A second signal would end it before it saves. A terminal sends Ctrl-C to all processes."""
    heard = tmp_path / "heard"
    process = Forked(_train_for_ever, heard, tmp_path / "out", session=True)
    wait_for_text(heard, process, "signals: ")
    for sent in (number, signal.SIGTERM):
        (os.killpg if sent == signal.SIGINT else os.kill)(process.pid, sent)
        wait_for_text(heard, process, f"{signal.SIGTERM} ")
    heard.with_name("all-sent").touch()
    assert process.wait(60).returncode == 128 + number
    assert heard.read_text() == f"signals: {signal.SIGTERM} "


def test_cuda_graphs_are_used_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def uses_graphs(**settings: Any) -> bool:
        return "--cuda-graphs" in Training("simsiam", HeadlineConfig(**settings)).command

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not uses_graphs()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert uses_graphs() and not uses_graphs(cuda_graphs=False) and not uses_graphs(device="cpu")


def _train_for_ever(heard: Path, out: Path) -> None:
    command = [sys.executable, "-c", _FAKE_RUN, str(heard)]
    Training.command = command  # type: ignore[assignment, method-assign]
    run(HeadlineConfig(out=str(out), only=("simsiam",)))


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"epochs": 3}, {"epochs": 1}, {"width": 8}, {"data": "other"}]
)
def test_run_with_other_settings_is_rejected(change: dict[str, Any], tmp_path: Path) -> None:
    """Otherwise a finished run would be reported under settings it was not trained with."""
    config = _finished_run(tmp_path)
    training = Training("simsiam", config)
    assert training.is_done
    training.check_continues()
    ((name, value),) = change.items()
    with pytest.raises(FastSiamError, match=f"was trained with --{name} .*{value}: use the same"):
        run(replace(config, **change))


@pytest.mark.parametrize(
    ("graphs", "gpus", "message"),
    [(True, [], "--cuda-graphs, not --no-cuda-graphs"), (False, ["a GPU"], "GPU a GPU, not none")],
)
def test_unfinished_run_on_other_terms_is_rejected(
    graphs: bool, gpus: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record would add minutes that cannot be compared."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(headline, "environment", lambda: environment() | {"gpus": []})
    config = _finished_run(tmp_path)
    log, file = tmp_path / "simsiam/metrics.jsonl", tmp_path / "simsiam/config.json"
    log.write_text(log.read_text().replace('"epoch": 2', '"epoch": 1'))
    settings = json.loads(file.read_text())
    settings["config"]["step"]["cuda_graphs"], settings["environment"]["gpus"] = graphs, gpus
    file.write_text(json.dumps(settings))
    with pytest.raises(FastSiamError, match=f"was trained with {message}: use the same"):
        run(config)


def test_run_that_could_not_compile_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was started with ``--cuda-graphs``, but its steps use none."""
    config = _finished_run(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    log, file = tmp_path / "simsiam/metrics.jsonl", tmp_path / "simsiam/config.json"
    log.write_text(log.read_text().replace('"epoch": 2', '"epoch": 1'))
    settings = json.loads(file.read_text())
    step = settings["config"]["step"]
    settings["asked"] = settings["config"] | {"step": step | {"cuda_graphs": True}}
    file.write_text(json.dumps(settings))
    assert not step["cuda_graphs"]
    Training("simsiam", config).check_continues()


def _finished_run(out: Path) -> HeadlineConfig:
    """Write the files of a finished run of SimSiam; return the settings of its command."""
    config = HeadlineConfig(data="images", out=str(out), epochs=2, width=4, only=("simsiam",))
    folder = Training("simsiam", config).folder
    folder.mkdir()
    trained = with_settings(RECIPES["cifar10"](), seed=0, epochs=2, width=4, data="images")
    settings = {"recipe": "cifar10", "config": trained.to_dict(), "environment": environment()}
    (folder / "config.json").write_text(json.dumps(settings))
    line = {"kind": "knn", "step": 2, "epoch": 2, "top1": 50.0}
    line |= {"k": 200, "temperature": 0.1, "bank": 50}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return config


def test_record_has_settings_of_run(tmp_path: Path) -> None:
    """A corrupt config.json, even of the other method's run, is an error of one line."""
    config = _finished_run(tmp_path)
    run(config)
    (record,) = json.loads((tmp_path / RECORD).read_text())["runs"]
    file = tmp_path / "simsiam" / "config.json"
    settings = json.loads(file.read_text())
    assert (record["config"], record["environment"]) == (
        settings["config"],
        settings["environment"],
    )
    file.write_text("{")
    with pytest.raises(DataError, match="cannot read the settings of the run"):
        run(replace(config, only=("fastsiam",), minutes=1e-9))


def test_picture_names_machines_of_runs(tmp_path: Path) -> None:
    """The last call, which writes the record, may be on another machine."""
    run(_finished_run(tmp_path))
    record = json.loads((tmp_path / RECORD).read_text())
    record["runs"][0]["environment"] |= {"gpus": ["a GPU"], "cpu": "a CPU", "cores": 4}
    record["runs"] += [record["runs"][0], {"method": "fastsiam", "curve": []}]
    texts = [text.get_text() for text in draw(record).texts]
    assert any("evaluations, on 4 cores of a CPU, a GPU. Crosses" in text for text in texts)


def test_seconds_of_evaluation_between_log_lines_are_interpolated(tmp_path: Path) -> None:
    knn = {"kind": "knn", "top1": 50.0}
    lines = [
        {**knn, "epoch": 0.0},
        {"kind": "train", "epoch": 0.8, "seconds": 4.0},
        {**knn, "epoch": 1.0},
        {"kind": "train", "epoch": 1.2, "seconds": 7.0},
        {"kind": "train", "epoch": 2.0, "seconds": 9.0},
        {**knn, "epoch": 2.0},
        {**knn, "epoch": 2.5},  # the run was stopped before the next line
    ]
    (tmp_path / "simsiam").mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "simsiam" / "metrics.jsonl").write_text(text)
    curve = Training("simsiam", HeadlineConfig(out=str(tmp_path))).curve
    assert [point["epoch"] for point in curve] == [0, 1, 2, 2.5]
    assert [point["seconds"] for point in curve] == pytest.approx([0, 5.5, 9, 11.25])


@pytest.mark.slow
def test_call_stops_in_time_and_next_resumes(tmp_path: Path) -> None:
    """The record then has the curves of both methods, with the time summed over all calls."""
    for split, each in (("train", 300), ("val", 20)):
        write_images(tmp_path / "data" / split, classes=2, each=each, side=32)
    config = HeadlineConfig(
        data=str(tmp_path / "data"), out=str(tmp_path / "out"), device="cpu", width=4,
        knn_every=1, epochs=3, minutes=0.001,
    )  # fmt: skip
    first = replace(config, only=("fastsiam",), goal=100)
    run(first)
    stopped = checkpoints.load(Training("fastsiam", first).folder)
    assert 0 < stopped.step < 3 * stopped.steps_per_epoch
    record = run(replace(config, minutes=60, goal=1))
    assert json.loads(json.dumps(record)) == json.loads((Path(config.out) / RECORD).read_text())
    assert [one["method"] for one in record["runs"]] == ["fastsiam", "simsiam"]
    for one in record["runs"]:
        assert one["seconds_to_goal"] == 0  # an untrained network is above 1%
    finished_record = run(replace(config, minutes=60, goal=100, only=("fastsiam",)))
    assert finished_record["runs"][1]["curve"] == record["runs"][1]["curve"]  # simsiam's
    curve = finished_record["runs"][0]["curve"]
    assert [point["epoch"] for point in curve] == [0, 1, 2, 3]
    seconds = [point["seconds"] for point in curve]
    assert seconds == sorted(seconds) and seconds[0] == 0 < seconds[1]
    assert (Path(config.out) / PICTURE).read_bytes().startswith(b"\x89PNG")
