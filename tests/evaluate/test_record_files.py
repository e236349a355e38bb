"""Results are shown, then written: into the run, the user's file, or one of them with a warning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fastsiam.config import TrainConfig
from fastsiam.config.evaluate import KnnConfig, LinearConfig
from fastsiam.console import Console
from fastsiam.errors import FastSiamError
from fastsiam.evaluate.command import evaluate_knn, evaluate_linear
from fastsiam.evaluate.record_files import RecordFiles
from fastsiam.run.records import Record, read_records
from fastsiam.train.command import train_here
from tests.configs import with_settings
from tests.conftest import ROOT
from tests.disks import fill, read_only, small_disk
from tests.processes import fastsiam
from tests.train.runs import CPU

RECORD = read_records(ROOT / "bench" / "results" / "cifar10-evaluation")[0]


def files(run: Path | None, asked: Path | str = "") -> RecordFiles:
    return RecordFiles(run, RECORD, asked=str(asked), place=CPU, console=Console())


def block(folder: Path) -> None:
    """Have a file stand where a folder was."""
    folder.rename(folder.with_name("moved"))
    folder.write_text("")


@pytest.mark.parametrize("asked", [False, True])
def test_a_run_that_cannot_be_written_in_the_end_is_a_warning(
    asked: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The state stays, unless the record is in the user's file."""
    own = files(tmp_path / "run", tmp_path / "mine" / "x.json" if asked else "")
    own.save_state(1, lambda: {}, last=True)
    assert own.load_state()
    block(tmp_path / "run" / "eval")
    shown: list[Record] = []
    own.keep(RECORD, shown.append)
    said = capfd.readouterr().err
    assert "the result is not kept with its run" in said and shown == [RECORD]
    assert ("--json FILE keeps it" in said) != asked
    if asked:
        assert f", but goes to {tmp_path / 'mine' / 'x.json'}" in said
        (tmp_path / "mine").rename(tmp_path / "eval")
        assert read_records(tmp_path) == [RECORD]
    else:
        assert list((tmp_path / "run" / "moved").glob("*.partial"))


def test_the_users_file_must_be_written(tmp_path: Path) -> None:
    own = files(tmp_path / "run", tmp_path / "mine" / "x.json")
    block(tmp_path / "mine")
    with pytest.raises(FastSiamError, match=r"^cannot write .*mine/x\.json: .+$"):
        own.keep(RECORD)
    assert read_records(tmp_path / "run") == [RECORD]


def test_what_can_be_known_before_is_said_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        asked = tmp_path / "x.json"
        whole = files(disk, asked)
        assert whole.record and whole.record.parent == disk / "eval"
        assert not capfd.readouterr().err
        fill(disk)
        assert files(disk, asked).record == asked
        assert "json: No space left" in capfd.readouterr().err
        with pytest.raises(FastSiamError, match=r"^cannot write .*x\.json: No space left"):
            files(None, disk / "x.json")


@pytest.fixture
def run(small: TrainConfig) -> Path:
    return train_here(with_settings(small, max_steps=1), "imagenet")


def test_a_run_that_cannot_be_written_is_evaluated(run: Path, tmp_path: Path) -> None:
    """Warned before and exit code 0; the user's file has the record, the page goes elsewhere."""
    knn = ("eval", "knn", str(run), "--device", "cpu", "--k", "5")
    with read_only(run):
        done = fastsiam(*knn)
        assert "kNN top-1" in done.stdout
        assert "eval/knn-epoch" in done.stderr and "will not be kept with its run: --json FILE" in (
            done.stderr
        )
        linear = ("eval", "linear", str(run), "--device", "cpu", "--cached", "--epochs", "1")
        done = fastsiam(*linear, "--json", str(tmp_path / "new" / "x.json"))
        record = Record.from_dict(json.loads((tmp_path / "new" / "x.json").read_text()))
        assert record.summary[0] in done.stdout
        assert f"but goes to {tmp_path / 'new' / 'x.json'}" in done.stderr
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

        config = KnnConfig(workers=0, k=(5,), json=str(disk / "x.json") if asked else "")
        if asked:
            with pytest.raises(FastSiamError, match=r"^cannot write .*x\.json: No space left"):
                evaluate_knn(disk / "run", config, CPU, show=show)
        else:
            evaluate_knn(disk / "run", config, CPU, show=show)
        assert len(shown) == 1 and not read_records(disk / "run")
    assert "the result is not kept with its run" in capfd.readouterr().err


def test_what_was_trained_is_not_trained_again(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The state of an evaluation whose record found no room is kept, if there was room for it."""
    config = LinearConfig(workers=0, cached=True, epochs=2, optimizer="sgd", lrs=(1,))
    with small_disk(tmp_path / "disk", 8) as disk:
        shutil.copytree(run, disk / "run")

        def show(record: Record) -> None:
            fill(disk)

        record = evaluate_linear(disk / "run", config, CPU, show=show)
        (disk / "filler").unlink()
        again = evaluate_linear(disk / "run", config, CPU)
        assert again.results == record.results and len(read_records(disk / "run")) == 1
    assert "continuing after epoch 2 of 2" in capfd.readouterr().err
