"""The tables of cases and variants match the code, and importing them does not load torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from importlib import import_module
from typing import Any

import pytest
import torch

from fastsiam.bench.cases import CASES, geometric, machine, photometric, sweep
from fastsiam.bench.config import VARIANTS, BenchConfig, Over
from fastsiam.bench.measurements import Record
from fastsiam.bench.runner import Task
from fastsiam.bench.session import session
from fastsiam.config import AugmentConfig
from tests.bench.sample_records import build_record
from tests.conftest import ROOT


def test_every_case_has_module_help_and_options() -> None:
    for name, case in CASES.items():
        assert callable(import_module(f"fastsiam.bench.cases.{name}").measure)
        assert case.help and set(case.options) <= {f.name for f in fields(BenchConfig)}
    files = {path.stem for path in (ROOT / "bench" / "cases").glob("*.py")}
    assert files - {"__init__", "profile"} == set(CASES)  # profile is a separate command


def test_variant_settings_reach_train_config(bench_config: BenchConfig) -> None:
    with session(bench_config) as bench_session:
        for settings in VARIANTS.values():
            config = bench_session.train_config(8, **{"compile": "on"} | settings).to_dict()
            used = config["numerics"] | config["step"]
            assert {k: used[k] for k in settings} == settings


def test_tables_and_report_do_not_import_torch() -> None:
    """Neither the tables nor the report import torch or runners; the tables do not need numpy."""
    code = (
        "import sys, fastsiam.bench.config, fastsiam.bench.cases; print(*sys.modules); "
        "import fastsiam.bench.report; print(*sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    tables, report = (set(line.split()) for line in result.stdout.splitlines())
    assert not tables & {"torch", "numpy"} and "fastsiam.bench.report" in report
    assert not report & {"torch", "fastsiam.bench.measure", "fastsiam.bench.runner"}
    assert not any(name.startswith("fastsiam.bench.cases.") for name in report)


def check_convert(records: dict[str, Record]) -> bool:
    ours, cp = records["fastsiam, files"], records["cp, files"]
    expected = ours.images_per_second / cp.images_per_second
    return bool(ours.ratio == pytest.approx(expected) and ours.facts["megabytes_per_second"] > 0)


def check_geometric(records: dict[str, Record]) -> bool:
    ratios = records["fastsiam"].ratio, records["torchvision, image by image"].ratio
    return bool(ratios[0]) and ratios[1] == records["one pass over the crops"].share_of_ceiling == 1


def check_digest(records: dict[str, Record]) -> bool:
    digest, step = records["digest"], records["step"]
    share = 100 * digest.cpu_seconds_per_image / step.cpu_seconds_per_image
    return bool(digest.facts["percent_of_step"] == pytest.approx(share))


def check_machine(records: dict[str, Record]) -> bool:
    units = [one.facts["rate"].split()[1] for one in records.values()]
    assert all(one.config["threads"] >= 1 for one in records.values())
    return units == ["GB/s", "TFLOP/s", "TFLOP/s"]


EXPECTED_RECORDS: dict[str, tuple[str, Callable[[dict[str, Record]], bool]]] = {
    "convert": ("cp, files; fastsiam, files; ffcv, files", check_convert),
    "geometric": (
        "fastsiam; torchvision, image by image; one pass over the crops", check_geometric,
    ),
    "machine": (
        "copy within memory; matrix product, bfloat16; matrix product, float32", check_machine,
    ),
    "digest": ("digest; step", check_digest),
}  # fmt: skip


@pytest.mark.ffcv
@pytest.mark.parametrize("case", EXPECTED_RECORDS)
def test_case_measures_expected_records(case: str, bench_config: BenchConfig) -> None:
    with session(bench_config) as bench_session:
        records = {one.name: one for one in CASES[case].measure(bench_session)}
    names, holds = EXPECTED_RECORDS[case]
    assert list(records) == names.split("; ") and holds(records)


def test_tasks_allocate_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a GPU's figures would include the allocation that each repeat has to do again."""
    monkeypatch.setattr(machine, "_random_matrix", lambda *_: torch.ones(2, 2))
    sizes: dict[str, Any] = {"augment": AugmentConfig.alike(crop=8), "batch": 2, "batches": 1}
    for tasks in (
        machine.build_machine(device="cpu"),
        photometric.build_photometric(**sizes, device="cpu"),
        geometric.build_geometric(**sizes, device="cpu"),
    ):
        assert not [name for name, task in tasks.items() if task.before is Task.before]


def test_rate_of_fast_machine_has_no_exponent(
    bench_config: BenchConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = build_record(case="machine", facts={"amount": 5900.0, "unit": "GB/s"})
    monkeypatch.setattr(machine, "compare", lambda *_: [record])
    with session(bench_config) as bench_session:
        (one,) = machine.measure(bench_session)
    assert one.facts["rate"] == "2,950 GB/s"


@pytest.mark.slow
def test_sweep_over_ranks(bench_config: BenchConfig) -> None:
    with session(replace(bench_config, over="ranks", values=(1, 2))) as bench_session:
        one, two = CASES["sweep"].measure(bench_session)
    assert (one.facts["value"], two.facts["value"]) == (1, 2) and two.ratio is not None
    assert two.images % 16 == 0


def test_sweep_records_name_varied_setting_and_images(
    bench_config: BenchConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "compare", lambda _, rows: [*rows])
    cases: list[tuple[Over, int, str]] = [
        ("workers", 3, "average"), ("quality", 50, "with quality 50"),
    ]  # fmt: skip
    for over, value, end in cases:
        config = replace(bench_config, over=over, values=(value,), pipelines=("native",))
        with session(config) as bench_session:
            rows: Any = CASES["sweep"].measure(bench_session)
        for row in rows:
            assert row.config[over] == value and row.config["data"].endswith(end)


def test_jpeg_engine_sweep_measures_only_dali(
    bench_config: BenchConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "compare", lambda _, rows: [*rows])
    config = replace(bench_config, over="jpeg-engine", values=(0, 90), pipelines=("dali", "memory"))
    with session(config) as bench_session:
        assert not CASES["sweep"].measure(bench_session)  # a CPU has no such engine
        bench_session.device = "cuda"
        rows: list[Any] = CASES["sweep"].measure(bench_session)
    assert [one.name for one in rows] == ["dali, jpeg-engine 0", "dali, jpeg-engine 90"]
    assert rows[1].build.args[0].data.dali_hw_decoder_load == 0.9
    assert rows[1].config["jpeg-engine"] == 90 and rows[1].baseline[0] == "jpeg-engine 0"
    for over in ("jpeg-engine", "quality"):
        with pytest.raises(ValueError, match=f"values of {over} are at most 100, not 101"):
            replace(config, over=over, values=(1, 101))
