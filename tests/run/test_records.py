"""Evaluation records: records of older versions can be read and written back unchanged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from fastsiam.run.records import Record, check_targets, read_records
from tests.conftest import ROOT

RUN = ROOT / "bench" / "results" / "cifar10-evaluation"
FILES = sorted((RUN / "eval").glob("*.json"))


def test_older_records_round_trip() -> None:
    for path in FILES:
        plain = json.loads(path.read_text())
        record = Record.from_dict(plain)
        assert json.loads(json.dumps(record.to_dict())) == plain
        mark = path.stem.rsplit("-", 1)[1]
        assert record.path(RUN).stem.endswith(f"-epoch{record.network.epoch:g}-{mark}")
        assert record.headline in record.results
    records = read_records(RUN)
    assert len(records) == len(FILES) == 12
    assert {record.kind for record in records} == {"knn", "linear", "finetune"}


def record_of(kind: str) -> Record:
    return next(record for record in read_records(RUN) if record.kind == kind)


def test_record_path_depends_on_evaluation_not_location() -> None:
    record = record_of("linear")
    moved = replace(
        record,
        data=replace(record.data, root="/elsewhere"),
        images=replace(record.images, pipeline="torchvision", ranks=8),
    )
    assert moved.path(RUN) == record.path(RUN)
    for other in (
        replace(record, images=replace(record.images, crop=24)),
        replace(record, images=replace(record.images, exif="apply")),
        replace(record, data=replace(record.data, labels_crc32="0")),
        replace(record, protocol=record.protocol | {"seed": 1}),
    ):
        assert other.path(RUN) != record.path(RUN)


def test_class_accuracies_refer_to_trained_network() -> None:
    """With kNN baselines: the line refers to the trained network, not to raw pixels."""
    record = record_of("knn")
    assert record.headline["features"] == "trained" != record.results[0]["features"]
    heading, *lines = replace(record, per_class={"a": 12.5, "b\n\x1b": None}).class_lines()
    top1 = f"{record.headline['top1']:.2f}%"
    assert heading.startswith("per class, after ") and top1 in heading
    assert lines == ["  a: 12.50%", r"  'b\n\x1b': no images"]


def test_output_to_device_needs_no_writable_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", mock.Mock(side_effect=PermissionError))
    check_targets(Path("/dev/null"))
