"""A campaign stays within its minutes, keeps finished stages and resumes where it stopped."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastsiam.bench import gpu as campaign
from fastsiam.bench.config import GpuConfig
from fastsiam.bench.gpu import Outcome, Stage, perform, read_outcomes, stages
from fastsiam.bench.measurements import read, write
from fastsiam.errors import DataError, FastSiamError
from tests.bench.sample_records import build_record
from tests.commands import check_usage
from tests.conftest import ROOT
from tests.processes import fastsiam


def build_stage(name: str, code: str, *, seconds: int = 1) -> Stage:
    return Stage(name, seconds, ("-c", code))


def test_stage_is_stopped_at_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage ends with the campaign's minutes or at its own time limit."""
    monkeypatch.setattr(campaign, "_GRACE", 1.0)
    (tmp_path / "logs").mkdir()
    sleeps = build_stage("sleeps", "import time; time.sleep(600)")
    assert perform(sleeps, tmp_path, seconds=2).status == "stopped"
    monkeypatch.setattr(Stage, "limit", 1.0)
    assert perform(sleeps, tmp_path, seconds=100).status == "failed"


def test_log_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FastSiamError, match=r"cannot write .*logs/sleeps\.txt: No such file"):
        perform(build_stage("sleeps", ""), tmp_path, seconds=2)


def test_stage_with_skipped_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage is done only if this machine cannot run the skipped tests."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # plugins take seconds to import
    (tmp_path / "logs").mkdir()
    file = tmp_path / "test_it.py"
    reasons = ("two GPUs", "a GPU")
    skips = [f"def test_{n}(): pytest.skip('needs {x}')\n" for n, x in enumerate(reasons)]
    file.write_text("".join(["import pytest\ndef test(): pass\n", *skips]))
    tests = Stage("tests", 60, ("-m", "pytest", str(file), "-v", "-ra"))
    outcome = perform(tests, tmp_path, seconds=100)
    assert outcome.status == "partly" and outcome.said.endswith("needs a GPU")
    log = (tmp_path / "logs" / "tests.txt").read_text()
    fails = build_stage("tests", f"print({log!r}); raise SystemExit(1)")
    outcome = perform(fails, tmp_path, seconds=100)
    assert outcome.status == "failed" and "1 passed, 2 skipped" in outcome.said
    other_lines = "\n".join(line for line in log.splitlines() if not line.endswith("needs a GPU"))
    outcome = perform(build_stage("tests", f"print({other_lines!r})"), tmp_path, seconds=100)
    assert outcome.status == "done" and "1 passed, 2 skipped" in outcome.said


def test_campaign_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, mended = tmp_path / "first", tmp_path / "mended"
    table = [
        build_stage("first", f"open({str(first)!r}, 'a').write('1')"),
        build_stage("broken", f"import os; assert os.path.exists({str(mended)!r}), 'broken'"),
        build_stage("lacks", "print('dali: not measured: no memory')"),
        build_stage("last", "print('fine')", seconds=0),
    ]
    monkeypatch.setattr(campaign, "stages", lambda *_, **__: table)
    monkeypatch.setenv("OUT", str(tmp_path))
    config, out = GpuConfig(device="cpu", minutes=2), tmp_path / "gpu"
    process = SimpleNamespace(create_time=time.time)  # the campaign's time counts from here
    monkeypatch.setattr("psutil.Process", lambda: process)

    page = campaign.run(config)
    assert page == out / "page.md" and "AssertionError: broken" in page.read_text()
    assert {name: one.status for name, one in read_outcomes(out).items()} == {
        "first": "done", "broken": "failed", "lacks": "failed", "last": "done",
    }  # fmt: skip
    mended.touch()
    (out / "records" / "broken.json").write_text("[{")  # truncated, as if killed while writing
    assert "AssertionError" not in campaign.run(config).read_text()
    assert {n for n, one in read_outcomes(out).items() if one.status != "done"} == {"lacks"}
    assert first.read_text() == "1"
    again = GpuConfig(out=str(out), device="cpu", minutes=2, again=("first",))
    campaign.run(again)
    assert first.read_text() == "11"
    monkeypatch.setattr(campaign, "_MARGIN", 300.0)  # no time is left
    campaign.run(again)
    assert first.read_text() == "11"
    assert "first: left for another call" in capsys.readouterr().err
    with pytest.raises(DataError, match="--again stop: unknown stage; known stages: first, "):
        campaign.run(GpuConfig(out=str(out), device="cpu", again=("stop",)))
    (out / "state.json").write_text("[1]")
    with pytest.raises(DataError, match=r"state\.json is damaged: .* delete it"):
        read_outcomes(out)


def test_order_of_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New stages run first, failed ones last; results from another device count as new."""
    before = {
        "endless": None, "own": ("done", "GPU B"), "failed": ("failed", "GPU B"),
        "partly": ("partly", "GPU B"), "other": ("done", "GPU A"),
        "stopped": ("stopped", "GPU B"), "new": None,
    }  # fmt: skip
    table = [build_stage(name, "", seconds=name != "endless") for name in before]
    monkeypatch.setattr(campaign, "stages", lambda *_, **__: table)
    monkeypatch.setattr(campaign, "check_devices", lambda _: None)
    ran: list[str] = []

    def perform(one: Stage, *_: object, **__: object) -> Outcome:
        ran.append(one.name)
        return Outcome(status="failed", seconds=1.0, said="failed now")

    monkeypatch.setattr(campaign, "perform", perform)
    properties = SimpleNamespace(name="GPU B", total_memory=0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
    first, *other_stages = before
    for gpu, expected in (
        ("GPU B", ["other", "new", "stopped", "failed", "partly", "endless"]),
        ("", [*other_stages, first]),
    ):
        out, ran[:] = tmp_path / f"out{gpu}", []
        monkeypatch.setattr("torch.cuda.is_available", lambda gpu=gpu: bool(gpu))
        (out / "records").mkdir(parents=True)
        state = {}
        for name, (status, device) in ((k, v) for k, v in before.items() if v):
            state[name] = {"status": status, "seconds": 1, "said": "earlier", "device": device}
            write(out / "records" / f"{name}.json", [build_record(name)])
        (out / "state.json").write_text(json.dumps(state))
        page = campaign.run(GpuConfig(out=str(out), minutes=2)).read_text()
        assert ran == expected and page.count("failed now") == len(expected)
        repeated = {"failed", "partly", "stopped"} if gpu else set()
        sections = {name for name in state if f"## {name}\n" in page}
        assert sections == (set(state) - set(expected)) | repeated
        after = {name: one.device for name, one in read_outcomes(out).items()}
        assert after == dict.fromkeys(before, gpu or "cpu")


def test_command_of_every_stage_parses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option parses, and every stage of tests has all files of GPU tests."""
    bare = GpuConfig(out=str(tmp_path))
    with_data = GpuConfig(out=str(tmp_path), cifar10="c", data="d")
    for config, gpu_bytes in ((bare, 80e9), (with_data, 140e9), (with_data, 0.0)):
        table = stages(config, gpu_bytes=gpu_bytes)
        names = [one.name for one in table]
        assert len(set(names)) == len(names) and names[-1] == "cifar10"
        assert ("images" in names) == (config is bare)
        for one in table:
            if one.arguments[:2] == ("-m", "fastsiam"):
                check_usage(one.arguments[2:])
        tests = [one.arguments for one in table if "pytest" in one.arguments]
        files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests/gpu").glob("test_*.py")}
        assert len(tests) == 3 and all(files < set(arguments) for arguments in tests)
    monkeypatch.chdir(tmp_path)
    Path("d").symlink_to("blob")  # without the name, its format might not be recognised
    monkeypatch.setenv("FASTSIAM_DATA", "d")  # relative to this folder, not to the checkout
    table = stages(replace(bare, cifar10="s3://bucket/c"), gpu_bytes=80e9)
    arguments = {one.name: one.arguments for one in table}
    assert (
        str(Path("d").absolute()) in arguments["loader"] and "s3://bucket/c" in arguments["cifar10"]
    )
    gpus = ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
    folders = {stages(with_data, gpu_bytes=80e9, device=x)[-1].arguments[6] for x in gpus}
    assert folders == {f"{tmp_path}/cifar10-{x.replace(' ', '-')}" for x in gpus}


@pytest.mark.slow
@pytest.mark.dali
@pytest.mark.ffcv
def test_campaign_runs_on_cpu(tmp_path: Path) -> None:
    """Stages that differ from others only in size are marked as done."""
    repeated = {"photometric-4096", "geometric-4096", "step-cifar10", "step-fp32", "train"}
    repeated |= {"step-graphs", "step-authors", "tests"}
    names = {one.name for one in stages(GpuConfig(), gpu_bytes=0)}
    outcome = {"status": "done", "seconds": 1, "said": "", "device": "cpu"}
    (tmp_path / "state.json").write_text(json.dumps(dict.fromkeys(sorted(repeated), outcome)))
    result = fastsiam("bench", "gpu", "--device", "cpu", "--minutes", "20", "--out", str(tmp_path))
    assert result.stdout == f"wrote {tmp_path / 'page.md'}\n"
    outcomes = read_outcomes(tmp_path)
    assert set(outcomes) == names
    partly = {name for name, one in outcomes.items() if one.status == "partly"}
    assert partly == {"tests-loaders", "tests-alone"}  # all their tests need a GPU
    assert {one.status for one in outcomes.values()} == {"done", "partly"}
    measured = {"machine", "photometric-512", "geometric-512", "step-512", "loader"}
    measured |= {"profile"}
    assert {path.stem for path in (tmp_path / "records").iterdir()} == measured
    assert all(read(path) for path in (tmp_path / "records").iterdir())
    page = (tmp_path / "page.md").read_text()
    assert "## loader" in page and "matrix product, bfloat16" in page and "not yet" not in page
    assert os.path.getsize(tmp_path / "trace.json") > 0 and (tmp_path / "made-cpu").is_dir()
