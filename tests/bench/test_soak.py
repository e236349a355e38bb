"""A soak of seconds: one run is hurt, and held to the one that is not."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastsiam.bench import soak as module
from fastsiam.bench.config import SoakConfig
from fastsiam.bench.soak import FAULTS, Run, Soak, as_markdown, processes_of, read_record, soak
from fastsiam.config import TrainConfig
from fastsiam.config.files import parse_assignments
from fastsiam.errors import DataError, FastSiamError
from fastsiam.run.checkpoint import last
from fastsiam.train.command import train_here
from tests.commands import parse
from tests.configs import with_settings
from tests.conftest import ROOT


@pytest.mark.slow
def test_a_minute_and_a_half_of_it(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    config = SoakConfig(
        minutes=1.5, pipelines="torchvision,memory", ranks=2, seconds=20, every=8, out=str(out)
    )
    assert soak(config) == out
    record = read_record(out)
    assert not record["findings"] and record["ranks"] == 2 and record["minutes"] > 0
    runs = record["runs"]
    assert sum(len(run["faults"]) for run in runs) >= 2
    assert all(run["starts"] >= 1 and run["steps"] >= 30 and not run["left"] for run in runs)
    assert {fault for run in runs for fault in run["faults"]} <= {one.name for one in FAULTS}


def run_of(config: TrainConfig, out: Path) -> Run:
    data = Path(config.data.data)
    return Run(out, data, pipeline="memory", steps=12, ranks=1, seed=0, mark="FASTSIAM_SOAK=test")


def test_every_difference_between_two_runs_is_found(small: TrainConfig, tmp_path: Path) -> None:
    one = train_here(with_settings(small, knn_every=0, out=str(tmp_path / "one")), "imagenet")
    calm = run_of(small, one)

    def changed(change: object) -> str:
        other = shutil.copytree(one, tmp_path / "other")
        try:
            change(other)  # type: ignore[operator]
            return run_of(small, Path(other)).difference(calm)
        finally:
            shutil.rmtree(other)

    def lines(change: object) -> object:
        def do(other: Path) -> None:
            path = other / "metrics.jsonl"
            found = [json.loads(line) for line in path.read_text().splitlines()]
            change(found)  # type: ignore[operator]
            path.write_text("".join(json.dumps(line) + "\n" for line in found))

        return do

    assert changed(lambda other: None) == ""
    assert changed(lines(lambda found: found[3].update(loss=found[3]["loss"] + 1e-7))).startswith(
        "line 4: "
    )
    assert changed(lines(lambda found: found.pop())) == "12 lines for 13"
    assert changed(lines(lambda found: found[3].update(seconds=1e9))) == ""
    alarm = {"kind": "alarm", "step": 3, "epoch": 0.5, "name": "disk"}
    assert changed(lines(lambda found: found.insert(3, alarm))) == ""
    assert "is corrupt" in changed(lambda other: last(other).write_bytes(b""))
    weights = train_here(
        with_settings(small, knn_every=0, seed=5, out=str(tmp_path / "seed")), "imagenet"
    )
    assert changed(lambda other: shutil.copy(last(weights), last(other))) == "the last weights"


def test_what_is_left_behind_is_found(small: TrainConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for name in ("lock", "checkpoints/last.pt.tmp", "checkpoints/last.pt", "metrics.jsonl"):
        (run / name).touch()
    assert run_of(small, run).left_behind() == ["checkpoints/last.pt.tmp", "lock"]


def test_a_damaged_checkpoint_differs_in_one_bit(
    small: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train_here(with_settings(small, knn_every=0, save_every=5), "imagenet")
    before = last(run).read_bytes()
    monkeypatch.setattr(Run, "kill", lambda run: None)
    monkeypatch.setattr(Run, "wait", lambda run, seconds: 0)
    module._damage_checkpoint(run_of(small, run), random.Random(1))
    after = last(run).read_bytes()
    bits = sum((x ^ y).bit_count() for x, y in zip(before, after, strict=True))
    assert bits == 1


def test_a_run_is_a_command_of_the_program(tmp_path: Path) -> None:
    for pipeline in ("memory", "synthetic"):
        run = Run(tmp_path / "run", tmp_path, pipeline, steps=300, ranks=4, seed=1)
        parse(run.command[3:])
        words = run.command
        given = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        settings = parse_assignments(given)
    assert settings["epochs"] == "1" and settings["gpus"] == "4"


def test_every_fault_comes_as_often_as_the_others(
    small: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Soak(SoakConfig(seed=4), tmp_path, 0.0)
    run = run_of(small, tmp_path / "run")
    monkeypatch.setattr(Run, "children", lambda run, kind: [1])
    able = [one.name for one in FAULTS if one.needs(run)]
    drawn = [fault.name for _ in range(3 * len(able)) if (fault := work._next(run))]
    assert all(drawn.count(name) == 3 for name in able) and len(able) >= 9


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ranks": 1}, "ranks must be at least 2, not 1"),
        ({"minutes": 0}, "minutes must be above 0, not 0"),
        ({"pipelines": "memory,tape"}, "pipelines are some of .*, not 'tape'"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SoakConfig(**settings)  # type: ignore[arg-type]


def test_a_finding_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(work: Soak) -> None:
        work.findings.append("memory, seed 0: it hangs")

    monkeypatch.setattr(Soak, "run", hang)
    out = tmp_path / "soak.json"
    with pytest.raises(FastSiamError, match=r"1 findings, the first: memory.*; see .*soak\.json"):
        soak(SoakConfig(out=str(out)))
    assert read_record(out)["findings"] == ["memory, seed 0: it hangs"]


def test_a_run_is_known_by_its_mark() -> None:
    mark = f"FASTSIAM_MARK={os.getpid()}"
    name, _, value = mark.partition("=")
    process = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, name: value}
    )
    try:
        assert [one.pid for one in processes_of(mark)] == [process.pid]
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"runs": [1], "findings": []}'])
def test_what_is_no_record_is_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"soak\.json holds no record of fastsiam bench soak$"):
        read_record(path)


def test_findings_stand_below_the_tables() -> None:
    """The docs have a record without any, with the growth that version 0.2 measured."""
    record = read_record(ROOT / "bench" / "results" / "soak" / "soak.json")
    assert as_markdown(record).endswith("\n\nNothing else was found.")
    assert as_markdown(record | {"findings": ["it hangs"]}).endswith("\n\n- it hangs")
