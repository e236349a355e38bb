"""A campaign uses its minutes, keeps what is done, and continues where it stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastsiam.bench import gpu as campaign
from fastsiam.bench.config import GpuConfig
from fastsiam.bench.gpu import (
    Outcome,
    Setup,
    Stage,
    in_turn,
    perform,
    read_outcomes,
    results_folder,
    stages,
)
from fastsiam.bench.records import read
from fastsiam.errors import DataError
from tests.commands import parse
from tests.conftest import ROOT
from tests.processes import Forked, fastsiam


def stage(name: str, code: str, *, seconds: int = 1, most: int = 60, **more: Any) -> Stage:
    return Stage(name=name, arguments=("-c", code), seconds=seconds, most=most, **more)


def outcome(status: Any) -> Outcome:
    return Outcome(status=status, seconds=1.0, said="")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def test_new_stages_come_before_those_that_went_wrong() -> None:
    names = ("done", "cut", "failed", "partly", "stopped", "new")
    table = [stage("endless", "", endless=True)] + [stage(name, "") for name in names]
    outcomes = {name: outcome(name) for name in names[:-1]}
    expected = ["stopped", "new", "partly", "failed", "cut", "endless"]
    assert [one.name for one in in_turn(table, outcomes)] == expected
    outcomes["endless"] = outcome("done")
    assert [one.name for one in in_turn(table, outcomes)] == expected[:-1]


def test_what_was_skipped_is_not_done(out: Path) -> None:
    """What a test lacks may be there in the next call."""
    tests = out / "test_some.py"
    tests.write_text("import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('no DALI')\n")
    asked = ("-m", "pytest", str(tests), "-p", "no:cacheprovider", "-c", "/dev/null")
    some = Stage(name="some", arguments=asked, seconds=1, most=60)
    assert perform(some, out, seconds=100).status == "partly"


def test_a_stage_that_takes_too_long_is_ended_with_all_that_it_started(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest has logged its results until then."""
    monkeypatch.setattr(campaign, "_GRACE", (1.0, 1.0, 1.0))
    child, tests = out / "child", out / "test_slow.py"
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    tests.write_text(
        "import pathlib, subprocess, sys, time\n"
        "def test_a(): pass\n"
        "def test_b():\n"
        f"    process = subprocess.Popen([sys.executable, '-c', {deaf!r}])\n"
        f"    pathlib.Path({str(child)!r}).write_text(str(process.pid))\n"
        "    time.sleep(600)\n"
    )

    class Patient(subprocess.Popen[Any]):
        """A process whose time is over when the file is there, however long that takes."""

        def wait(self, timeout: float | None = None) -> int:
            if not child.exists():
                while not child.exists() and self.poll() is None:
                    time.sleep(0.05)
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Patient)
    asked = ("-m", "pytest", str(tests), "-v", "-p", "no:cacheprovider", "-c", "/dev/null")
    slow = Stage(name="slow", arguments=asked, seconds=1, most=8)
    assert perform(slow, out, seconds=100).status == "cut"
    assert "::test_a PASSED" in (out / "logs" / "slow.txt").read_text()
    process = Path(f"/proc/{child.read_text()}")
    deadline = time.monotonic() + 30
    while (process / "exe").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_tests_of_the_step_have_a_stage_each(tmp_path: Path) -> None:
    """Together they are all tests of the file; stages name the files that they collect."""
    table = {one.name: one for one in stages(Setup(out=tmp_path, gpu=True, pipelines=()))}
    steps = [one for name, one in table.items() if name.startswith("tests-step-")]
    named = {one.arguments[2].partition("::")[2] for one in steps}
    source = (ROOT / "tests" / "gpu" / "test_step.py").read_text()
    assert len(steps) == source.count("\ndef test_") and len(steps) > 5
    assert all(f"\ndef {name}(" in source for name in named) and len(named) == len(steps)
    files = [one for one in table["tests-elsewhere"].arguments if one.startswith("tests/")]
    assert files and all("mark.gpu" in (ROOT / file).read_text() for file in files)
    assert not any(file.startswith("tests/gpu/") for file in files)


def test_results_land_where_out_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert results_folder(GpuConfig()) == tmp_path / "gpu"
    assert results_folder(GpuConfig(out="there")) == Path("there").absolute()
    monkeypatch.delenv("OUT")
    assert results_folder(GpuConfig()) == Path("runs/gpu").absolute()


def test_a_campaign_continues_where_it_stopped(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mended = out / "mended"
    table = [
        stage("first", f"open({str(out / 'first')!r}, 'a').write('1')"),
        stage("broken", f"import os; assert os.path.exists({str(mended)!r}), 'broken'"),
        stage("lacks", "print('dali: not measured: no memory')"),
        stage("last", "print('fine')", endless=True),
    ]
    monkeypatch.setattr(campaign, "stages", lambda _: table)
    config = GpuConfig(out=str(out), device="cpu", minutes=2)
    process = SimpleNamespace(create_time=time.time)  # this process may be old
    monkeypatch.setattr("psutil.Process", lambda: process)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        page = campaign.run(config).read_text()
        assert {n: o.status for n, o in read_outcomes(out).items()} == {
            "first": "done", "broken": "failed", "lacks": "partly", "last": "done",
        }  # fmt: skip
        assert "AssertionError: broken" in page and "| broken | failed" in page
        mended.touch()
        page = campaign.run(config).read_text()
        assert "AssertionError" not in page
        assert {n for n, one in read_outcomes(out).items() if one.status != "done"} == {"lacks"}
        assert (out / "first").read_text() == "1"
        (out / "records" / "broken.json").write_text("[{")  # cut by a kill
        campaign.run(GpuConfig(out=str(out), device="cpu", minutes=2, again="first"))
        assert (out / "first").read_text() == "11"
        monkeypatch.setattr(campaign, "_MARGIN", 300.0)  # no time is left
        campaign.run(GpuConfig(out=str(out), device="cpu", minutes=2, again="first"))
        assert (out / "first").read_text() == "11"
        assert "first: left for another call" in capsys.readouterr().err
        with pytest.raises(DataError, match="--again stop: there is no such stage, only first, "):
            campaign.run(GpuConfig(out=str(out), device="cpu", again="stop"))
        (out / "state.json").write_text("[1]")
        with pytest.raises(DataError, match="not written by fastsiam bench gpu: delete it"):
            read_outcomes(out)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_signal_ends_the_stage_too(out: Path) -> None:
    pid = out / "pid"
    process = Forked(_run_one_for_ever, out, pid)
    deadline = time.monotonic() + 120
    while not pid.exists() or not pid.read_text():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send(signal.SIGTERM)
    assert process.wait(60).returncode == 143
    assert not Path(f"/proc/{pid.read_text()}/exe").exists()


def _run_one_for_ever(out: Path, pid: Path) -> None:
    """Run a campaign of one stage, which says who it is and sleeps."""
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    vars(campaign)["stages"] = lambda _: [stage("one", code, most=600)]
    campaign.run(GpuConfig(out=str(out), device="cpu"))


def test_every_stage_of_a_gpu_is_a_command_that_there_is(tmp_path: Path) -> None:
    """Options as the command line has them, files of tests that are there."""
    for gpu in (True, False):
        setup = Setup(out=tmp_path, gpu=gpu, pipelines=("dali", "native"), cifar10="c", data="d")
        table = {one.name: one for one in stages(setup)}
        assert len(table) == len(stages(setup)) and list(table)[-1] == "cifar10"
        given = {
            argument.partition("::")[0] for one in table.values() for argument in one.arguments
        }
        for path in (ROOT / "tests" / "gpu").glob("test_*.py"):
            assert f"tests/gpu/{path.name}" in given
        for one in table.values():
            assert one.seconds <= one.most
            if one.arguments[:2] == ("-m", "fastsiam"):
                parse(one.arguments[2:])
    bare = [one.name for one in stages(Setup(out=tmp_path, gpu=True, pipelines=()))]
    assert "jpeg-engine" not in bare and bare[-2:] == ["images", "cifar10"]


def test_a_stage_runs_on_a_cpu(tmp_path: Path) -> None:
    """The one that is new, of those that there are."""
    outcomes = campaign_on_cpu(tmp_path, lambda name: name == "photometric-512")
    assert {one.status for one in outcomes.values()} == {"done"}
    (records,) = (tmp_path / "records").iterdir()
    assert records.stem == "photometric-512" and read(records)
    page = " ".join((tmp_path / "page.md").read_text().split())
    assert "## photometric" in page and "## loader" not in page
    assert "| photometric-512 | done" in page


@pytest.mark.slow
@pytest.mark.dali
@pytest.mark.ffcv
def test_all_of_it_runs_on_a_cpu(tmp_path: Path) -> None:
    """Stages that differ from others in size alone are taken for done."""
    repeated = {"photometric-4096", "geometric-4096", "step-cifar10", "step-fp32", "train"}
    repeated |= {"step-graphs", "step-authors"}

    def new(name: str) -> bool:
        return name == "tests-knn" or not (name in repeated or name.startswith("tests-"))

    outcomes = campaign_on_cpu(tmp_path, new)
    unfinished = {name: one.status for name, one in outcomes.items() if one.status != "done"}
    skipped = {} if torch.cuda.is_available() else {"tests-knn": "partly"}
    assert unfinished == skipped
    measured = {"machine", "photometric-512", "geometric-512", "step-512", "loader"}
    measured |= {"jpeg-engine", "profile"}
    assert {path.stem for path in (tmp_path / "records").iterdir()} == measured
    assert all(read(path) for path in (tmp_path / "records").iterdir())
    page = (tmp_path / "page.md").read_text()
    assert "## loader" in page and "matrix product, bfloat16" in page and "not yet" not in page
    assert "| tests-knn" in page
    assert os.path.getsize(tmp_path / "trace.json") > 0 and (tmp_path / "made").is_dir()


def campaign_on_cpu(out: Path, new: Callable[[str], bool]) -> dict[str, Outcome]:
    """Run the command with the stages that are new, all others taken for done."""
    names = [one.name for one in stages(Setup(out=out, gpu=False, pipelines=("dali",)))]
    done = {"status": "done", "seconds": 1, "said": ""}
    old = sorted(name for name in names if not new(name))
    (out / "state.json").write_text(json.dumps(dict.fromkeys(old, done)))
    said = fastsiam("bench", "gpu", "--device", "cpu", "--minutes", "20", "--out", str(out))
    assert said.stdout == f"wrote {out / 'page.md'}\n"
    outcomes = read_outcomes(out)
    assert set(names) <= set(outcomes)
    return outcomes
