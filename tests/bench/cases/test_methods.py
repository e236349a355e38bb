"""The ``methods`` case: fastsiam's training steps against lightly's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fastsiam.bench.cases import methods
from fastsiam.bench.config import BenchConfig
from fastsiam.bench.measurements import Record, Row, read
from fastsiam.bench.session import session
from tests.bench.sample_records import bench
from tests.conftest import import_or_skip

import_or_skip("lightly", "peers", allow_module_level=True)


@pytest.mark.slow
def test_fastsiam_and_lightly_are_measured_in_one_run(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    result = bench(
        "methods", "--methods", "simclr", "--variants", "eager,authors", "--recipe", "demo",
        "--batch", "4", "--repeats", "1", "--device", "cpu", "--json", str(file),
    )  # fmt: skip
    assert "simclr, authors: not measured" in result.stderr
    records = {one.name: one for one in read(file)}
    ours, theirs = records["simclr, eager"], records["simclr, lightly"]
    assert {*records} == {ours.name, theirs.name} and {one.case for one in read(file)} == {
        "methods"
    }
    assert ours.ratio == pytest.approx(ours.images_per_second / theirs.images_per_second)
    assert theirs.ratio == 1 and ours.baseline == theirs.name
    assert ours.cpu_seconds_per_image > 0 and ours.config["model"] == theirs.config["model"]
    assert ours.config["step"]["compile"] == "off" and theirs.config["lightly"]
    assert theirs.config["precision"] == "fp32" and not theirs.config["channels_last"]


def test_methods_that_do_not_fit_the_recipe_are_left_out(
    bench_config: BenchConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []

    def compare(_: object, rows: list[Row], *, apart: bool) -> list[Record]:
        measured.extend(one.name for one in rows)
        return []

    monkeypatch.setattr(methods, "compare", compare)
    config = replace(bench_config, recipe="fastsiam_cifar10", variants=("plain",))
    with session(replace(config, methods=("simsiam", "fastsiam"))) as bench_session:
        assert methods.measure(bench_session) == []
    assert measured == ["fastsiam, lightly", "fastsiam, plain"]
    message = "simsiam: not measured: simsiam compares two views of each image, not 4; "
    assert message in capsys.readouterr().err
