"""Results are seen first and written then; a run of somebody else's can be evaluated."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fastsiam.config import TrainConfig
from fastsiam.config.evaluate import KnnConfig, LinearConfig
from fastsiam.distributed import Place
from fastsiam.errors import FastSiamError
from fastsiam.evaluate.command import evaluate_knn, evaluate_linear
from fastsiam.run.records import Record, read_records
from fastsiam.train.command import train_here
from tests.configs import with_settings
from tests.disks import fill, read_only, small_disk
from tests.processes import fastsiam
from tests.train.runs import CPU


@pytest.fixture
def run(small: TrainConfig) -> Path:
    return train_here(with_settings(small, max_steps=1), "imagenet")


def test_a_run_that_cannot_be_written_is_evaluated(run: Path, tmp_path: Path) -> None:
    """Warned before and exit code 0; the user's file has the record, the page goes elsewhere."""
    knn = ("eval", "knn", str(run), "--device", "cpu", "--k", "5")
    with read_only(run):
        done = fastsiam(*knn)
        assert "kNN top-1" in done.stdout
        assert "eval/knn-epoch" in done.stderr
        assert "the run will not contain the result; --json FILE" in done.stderr
        linear = ("eval", "linear", str(run), "--device", "cpu", "--cached", "--epochs", "1")
        done = fastsiam(*linear, "--json", str(tmp_path / "new" / "x.json"))
        record = Record.from_dict(json.loads((tmp_path / "new" / "x.json").read_text()))
        assert record.summary[0] in done.stdout
        assert f"result, only {tmp_path / 'new' / 'x.json'}" in done.stderr
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["x.json"]
        fastsiam("report", str(run), "--out", str(tmp_path / "page.html"))
        refused = fastsiam("report", str(run), code=1).stderr
        assert refused.startswith(f"error: cannot write {run / 'report.html'}: ")
    assert (tmp_path / "page.html").stat().st_size > 1000 and not read_records(run)


def test_a_disk_that_is_full_from_the_start(run: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 8) as disk:
        shutil.copytree(run, disk / "run")
        fill(disk)
        knn = ("eval", "knn", str(disk / "run"), "--device", "cpu", "--k", "5")
        done = fastsiam(*knn)
        assert "kNN top-1" in done.stdout and "No space left on device" in done.stderr
        refused = fastsiam(*knn, "--json", str(disk / "x.json"), code=1)
        assert "top-1" not in refused.stdout + refused.stderr  # known before it is computed
        for command in (
            ("report", str(disk / "run")),
            ("views", "--data", str(tmp_path / "data"), "--out", str(disk / "views.png")),
            ("neighbours", str(disk / "run"), "--out", str(disk / "n.png"), "--device", "cpu"),
            ("features", str(disk / "run"), "--out", str(disk / "f.npy"), "--device", "cpu"),
            ("info", "--json", str(disk / "info.json")),
        ):
            said = fastsiam(*command, code=1).stderr.splitlines()[-1]
            assert said.startswith("error: cannot write ") and str(disk) in said, command
            assert "No space left on device" in said, command
        kept = {"run", "filler"}
        assert {path.name for path in disk.iterdir()} == kept
        assert all(path.stat().st_size for path in disk.rglob("*") if path.is_file())


@pytest.mark.parametrize("asked", [False, True])
def test_a_disk_that_fills_up_meanwhile(
    asked: bool, run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The record is shown before it is found that it cannot be written."""
    shown: list[Record] = []
    with small_disk(tmp_path / "disk", 8) as disk:
        shutil.copytree(run, disk / "run")

        def show(record: Record) -> None:
            shown.append(record)
            fill(disk)

        config = KnnConfig(workers=0, k="5", json=str(disk / "x.json") if asked else "")
        if asked:
            with pytest.raises(FastSiamError, match=r"^cannot write .*x\.json: No space left"):
                evaluate_knn(disk / "run", config, CPU, show=show)
        else:
            evaluate_knn(disk / "run", config, CPU, show=show)
        assert len(shown) == 1 and not read_records(disk / "run")
    assert "the run does not contain the result" in capfd.readouterr().err


def test_what_was_trained_is_not_trained_again(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The state of an evaluation whose record found no room is kept, if there was room for it."""
    config = LinearConfig(workers=0, cached=True, epochs=2, optimizer="sgd", lrs="1")
    place: Place = CPU
    with small_disk(tmp_path / "disk", 8) as disk:
        shutil.copytree(run, disk / "run")

        def show(record: Record) -> None:
            fill(disk)

        record = evaluate_linear(disk / "run", config, place, show=show)
        (disk / "filler").unlink()
        again = evaluate_linear(disk / "run", replace(config, epochs=2), place)
        assert again.results == record.results and len(read_records(disk / "run")) == 1
    assert "continuing after epoch 2 of 2" in capfd.readouterr().err
