"""Evaluation results are printed, then written to the run and to the user's file."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastsiam.config.evaluate import (
    EvalConfig,
    FeaturesConfig,
    KnnConfig,
    LinearConfig,
    NeighboursConfig,
)
from fastsiam.errors import CheckpointError, FastSiamError
from fastsiam.evaluate import record_files
from fastsiam.evaluate.command import evaluate_knn, evaluate_linear
from fastsiam.evaluate.feature_files import write_features, write_neighbours
from fastsiam.evaluate.subject import open_subject
from fastsiam.files import write_json
from fastsiam.interchange import load_pretrained
from fastsiam.report.run_report import write_report
from fastsiam.run.records import Record, read_records
from tests.conversions import stub_raising
from tests.disks import fill, read_only, small_disk
from tests.processes import fastsiam
from tests.train.runs import CPU


def test_read_only_run_is_evaluated(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A warning comes first and the exit code is 0; ``--json`` and reports elsewhere work."""
    with read_only(run):
        result = fastsiam("eval", "knn", str(run), "--device", "cpu", "--k", "5")
        assert "kNN top-1" in result.stdout and "eval/knn-epoch" in result.stderr
        assert "the result is only printed: pass --json FILE to keep it" in result.stderr
        json_path = tmp_path / "new" / "x.json"
        config = LinearConfig(workers=0, cached=True, epochs=1, json=str(json_path))
        record = evaluate_linear(run, config, CPU)
        assert Record.from_dict(json.loads(json_path.read_text())) == record
        assert f"the result goes to {json_path}" in capfd.readouterr().err
        assert [path.name for path in json_path.parent.iterdir()] == ["x.json"]
        write_report([run], tmp_path / "page.html")
        with pytest.raises(FastSiamError, match=r"^cannot write .*report\.html: "):
            write_report([run], run / "report.html")
    assert (tmp_path / "page.html").stat().st_size > 1000 and not read_records(run)


def test_state_of_weights_file_is_stored_next_to_json(
    run: Path, images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is kept without ``--json``; with it the state is stored next to the record."""
    torch.save({"state_dict": load_pretrained(run).part("backbone")}, tmp_path / "w.pth")
    subject = open_subject(tmp_path / "w.pth", EvalConfig(data=str(images), crop=16), CPU)
    facts = subject.data_facts(*subject.loaders())
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "file.txt")
    for file_name, state in (
        ("", []),
        ("pipe", []),
        ("x.json", ["x.partial"]),
        ("lr-0.1", ["lr-0.1.partial"]),
        ("link", ["file.txt.partial"]),
    ):
        config = LinearConfig(json=str(tmp_path / file_name) if file_name else "")
        files = subject.record_files("linear", facts, {}, config)
        files.save_state(1, dict, last=True)
        assert ("--json FILE to keep the result, and to resume" in capfd.readouterr().err) == (
            not file_name
        )
        partial = list(tmp_path.glob("*.partial"))
        assert [path.name for path in partial] == state
        for path in partial:
            path.unlink()


def test_unreadable_state_is_error_on_all_ranks(
    run: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be intact: starting over would overwrite it."""
    subject = open_subject(run, EvalConfig(data=str(images), crop=16), CPU)
    facts = subject.data_facts(*subject.loaders())
    subject.record_files("linear", facts, {}, LinearConfig()).save_state(1, dict, last=True)
    for target, name, fail in (
        (zipfile.ZipFile, "testzip", stub_raising(errno.EIO)),
        (torch, "load", stub_raising(errno.ENOMEM)),
        (record_files, "from_all", lambda text: [text, "cannot read x.partial: of another rank"]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, fail)
            with pytest.raises(CheckpointError, match=r"^cannot read .*\.partial: "):
                subject.record_files("linear", facts, {}, LinearConfig())
    assert subject.record_files("linear", facts, {}, LinearConfig()).saved is not None


def test_evaluation_on_full_disk(
    run: Path, images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", 8) as disk:
        shutil.copytree(run, disk / "run")
        fill(disk)
        knn = KnnConfig(workers=0, k=(5,))
        assert evaluate_knn(disk / "run", knn, CPU).results
        assert "No space left on device" in capfd.readouterr().err
        features = FeaturesConfig(out=str(disk / "f.npy"), workers=0)
        neighbours, picture = NeighboursConfig(workers=0), disk / "n.png"
        works: tuple[Callable[[], object], ...] = (
            lambda: evaluate_knn(disk / "run", replace(knn, json=str(disk / "x.json")), CPU),
            lambda: write_report([disk / "run"], disk / "run" / "report.html"),
            lambda: write_neighbours(disk / "run", neighbours, CPU, out=picture),
            lambda: write_features(disk / "run", features, CPU),
            lambda: write_json(disk / "info.json", "x" * 100_000),
        )
        for work in works:
            with pytest.raises(FastSiamError, match=r"^cannot write .*: No space left on device"):
                work()
        flags = ("--data", str(images), "--out", str(disk / "views.png"))
        stderr = fastsiam("views", *flags, code=1).stderr.splitlines()[-1]
        assert stderr.startswith(f"error: cannot write {disk}") and "No space left" in stderr
        assert {path.name for path in disk.iterdir()} == {"run", "filler"}
        assert all(path.stat().st_size for path in disk.rglob("*") if path.is_file())


def test_record_is_in_run_even_if_other_file_cannot_be_written(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    config = KnnConfig(workers=0, k=(5,), json=str(file))
    with pytest.raises(FastSiamError, match=rf"^cannot write {file}"):
        evaluate_knn(run, config, CPU, show=lambda record: file.mkdir())
    assert len(read_records(run)) == 1


def test_disk_filling_up_during_evaluation_keeps_state(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The record is printed before the failed write is noticed, and the state is kept."""
    printed_records: list[Record] = []
    config = LinearConfig(workers=0, cached=True, epochs=2, optimizer="sgd", lrs=(1,))
    with small_disk(tmp_path / "disk", 8) as disk:
        shutil.copytree(run, disk / "run")

        def show(record: Record) -> None:
            printed_records.append(record)
            fill(disk)

        with pytest.raises(FastSiamError, match=r"^cannot write .*json: No space left"):
            evaluate_linear(disk / "run", config, CPU, show=show)
        assert len(printed_records) == 1 and not read_records(disk / "run")
        (disk / "filler").unlink()
        again = evaluate_linear(disk / "run", config, CPU)
        assert again.results == printed_records[0].results and len(read_records(disk / "run")) == 1
    assert "resuming after step 2 of 2" in capfd.readouterr().err
