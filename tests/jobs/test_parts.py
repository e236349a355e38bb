"""Conversions in parts, by every engine: the same bytes, whatever is killed on the way."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fastsiam.config import ConvertConfig
from fastsiam.errors import FastSiamError
from fastsiam.jobs import parts
from fastsiam.jobs.engines import (
    Engine,
    Outcome,
    Task,
    engine_of,
    run_task,
)
from fastsiam.pipelines.convert import convert
from fastsiam.pipelines.store import open_store
from tests.conftest import ROOT, skip, write_images
from tests.conversions import Quiet
from tests.processes import command, fastsiam
from tests.slurm import Cluster, cluster
from tests.tiers import rest_slow

PARTS = 3
FAKE_SBATCH = """\
#!{python}
import os, re, subprocess, sys
script = sys.argv[-1]
text = open(script).read()
open({calls!r}, "a").write(text)
print("7", flush=True)
numbers = re.search("^#SBATCH --array=(.*)$", text, re.M)[1]
for number in numbers.split(","):
    subprocess.run(["bash", script], env={{**os.environ, "SLURM_ARRAY_TASK_ID": number}})
"""


def put_programs(folder: Path, monkeypatch: pytest.MonkeyPatch, **texts: str) -> None:
    """Put programs first on the path."""
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def fake_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a program for sbatch on the path, which runs the tasks here; return what it was given."""
    calls = tmp_path / "calls"
    text = FAKE_SBATCH.format(python=sys.executable, calls=str(calls))
    put_programs(tmp_path / "bin", monkeypatch, sbatch=text)
    return calls


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def needs(engine: str) -> None:
    module = {"dask": "distributed", "ray": "ray"}.get(engine)
    if module and find_spec(module) is None:
        skip(f"needs {engine}: pip install 'fastsiam[{engine}]'")


@pytest.mark.parametrize("engine", rest_slow(["slurm", "dask", "local", "ray"], fast=2))
def test_the_parts_are_those_that_are_made_by_hand(
    engine: str, images: Path, tmp_path: Path, fake_sbatch: Path
) -> None:
    needs(engine)
    by_hand, out = tmp_path / "by-hand", tmp_path / "out"
    for number in range(1, PARTS + 1):
        part = f"{number}/{PARTS}"
        convert("folder", ConvertConfig(source=str(images), out=str(by_hand), part=part), Quiet())
    asked = ["--source", str(images), "--out", str(out), "--parts", str(PARTS)]
    done = fastsiam("convert", "folder", *asked, "--engine", engine, "--engine-options", "--mem=1G")
    assert done.stdout.startswith(f"{PARTS} parts in {out} are one data set: use it with --data ")
    assert len(re.findall(r"^part \d of 3 is made", done.stderr, re.M)) == PARTS, done.stderr
    made = files(out)
    assert made.keys() == files(by_hand).keys() and len(made) == 3 * PARTS
    for name, content in files(by_hand).items():
        assert made[name] == content, name
    assert len(open_store(out, "train")) == 24
    if engine == "slurm":
        assert "#SBATCH --array=1,2,3\n#SBATCH --mem=1G\n" in fake_sbatch.read_text()


def test_they_are_those_of_a_conversion_without_engines(images: Path, tmp_path: Path) -> None:
    """The settings of the engines leave no trace: what was made before is gone on with."""
    out = tmp_path / "out"
    config = ConvertConfig(source=str(images), out=str(out), part="1/2")
    (train, _) = convert("folder", config, Quiet())
    assert "engine" not in train.about["options"] and "parts" not in train.about["options"]
    before = files(out)
    fastsiam("convert", "folder", "--source", str(images), "--out", str(out), "--parts", "2")
    assert before.items() < files(out).items()


def engine_here(name: str, folder: Path) -> Engine:
    needs(name)
    return engine_of(ConvertConfig(engine=name, parts=2), folder)  # type: ignore[arg-type]


def once(folder: Path, kill: str) -> Task:
    """Return a task that is killed, or whose worker is, at its first try."""
    whom = {"itself": "os.getpid()", "its worker": "os.getppid()"}[kill]
    mark = folder / "tried"
    script = (
        f"import os, pathlib, time; mark = pathlib.Path({str(mark)!r})\n"
        f"if not mark.exists():\n    mark.touch(); os.kill({whom}, 9); time.sleep(600)\n"
    )
    return Task(1, (sys.executable, "-c", script), str(folder))


@pytest.mark.parametrize(
    ("engine", "kill"),
    rest_slow(
        [("local", "itself"), ("dask", "its worker"), ("ray", "its worker"), ("slurm", "itself")],
        fast=2,
    ),
)
def test_a_lost_task_is_begun_again(
    engine: str, kill: str, tmp_path: Path, fake_sbatch: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = ConvertConfig(engine=engine, parts=1)  # type: ignore[arg-type]
    assert not parts._made(engine_here(engine, tmp_path), [once(tmp_path, kill)], config)
    said = capfd.readouterr().err
    assert re.search(r"part 1 of 1 is lost \(.+\): it is begun again, 1 of 2 times\n", said), said
    assert "part 1 of 1 is made" in said
    (tmp_path / "tried").unlink()
    config = ConvertConfig(engine=engine, parts=1, retries=0)  # type: ignore[arg-type]
    ((task, outcome),) = parts._made(engine_here(engine, tmp_path), [once(tmp_path, kill)], config)
    assert task.number == 1 and outcome.is_lost


def test_an_error_ends_a_part_alone(images: Path, tmp_path: Path) -> None:
    """The others are made; the error is that of a conversion here, and the same command goes on."""
    bad = images / "train" / "class0" / "004.jpg"
    bad.write_bytes(bad.read_bytes()[:300])
    out = tmp_path / "out"
    asked = ["convert", "folder", "--source", str(images), "--out", str(out), "--parts", "2"]
    done = fastsiam(*asked, code=1)
    assert "part 2 of 2 is made" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(r"error: part 1 of 2: .* 1 of 2 parts are missing, and the same .*", last)
    assert re.search(r"^part 1: .*class0/004\.jpg: ", done.stderr, re.M)
    done = fastsiam(*asked, "--skip-bad")
    assert len(re.findall("is made", done.stderr)) == 2 and len(open_store(out, "train")) == 23


@pytest.mark.parametrize(
    ("engine", "number"),
    rest_slow([("local", signal.SIGINT), ("dask", signal.SIGINT), ("ray", signal.SIGTERM)]),
)
def test_a_signal_ends_all_and_the_same_command_goes_on(
    engine: str, number: signal.Signals, tmp_path: Path
) -> None:
    needs(engine)
    write_images(tmp_path / "images", classes=2, each=30, side=900)
    asked = ["convert", "folder", "--source", str(tmp_path / "images"), "--max-side", "64"]
    asked += ["--out", str(tmp_path / "out"), "--parts", "2", "--engine", engine]
    process = command(*asked, session=True)
    while not list((tmp_path / "out").glob("*.partial")):
        assert process.poll() is None, process.wait().stderr
        time.sleep(0.02)
    os.killpg(process.pid, number)
    done = process.wait(120)  # and all that share its output
    assert done.returncode == 128 + number, done.stderr
    assert done.stderr.splitlines()[-1].endswith("goes on with the parts that are missing")
    fastsiam(*asked)
    assert len(open_store(tmp_path / "out", "train")) == 60


@pytest.mark.parametrize("said_first", [True, False])
def test_what_slurm_was_given_is_cancelled(
    said_first: bool, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if Ctrl-C comes before sbatch has said the job's number."""
    begun, cancelled = tmp_path / "begun", tmp_path / "cancelled"
    says = ["echo 42", "sleep 0.5", f"touch {begun}"]
    if not said_first:
        says = [f"touch {begun}", "sleep 1", "echo 42"]
    sbatch = "\n".join(["#!/bin/sh", *says, "exec sleep 600", ""])
    scancel = f'#!/bin/sh\necho "$@" > {cancelled}\n'
    put_programs(tmp_path / "bin", monkeypatch, sbatch=sbatch, scancel=scancel)
    asked = ["--source", str(images), "--out", str(tmp_path / "out"), "--parts", "2"]
    process = command("convert", "folder", *asked, "--engine", "slurm", session=True)
    while not begun.exists():
        assert process.poll() is None, process.wait().stderr
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60).returncode == 128 + signal.SIGINT
    assert cancelled.read_text() == "42\n"


def test_workers_are_told_where_the_data_are(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have been started with another FASTSIAM_DATA, or none."""

    class Elsewhere:
        def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Outcome]]:
            monkeypatch.delenv("FASTSIAM_DATA")
            yield from ((task, run_task(task)) for task in tasks)

    monkeypatch.setenv("FASTSIAM_DATA", str(images))
    monkeypatch.setattr(parts, "engine_of", lambda *_: Elsewhere())
    out = tmp_path / "out"
    config = ConvertConfig(out=str(out), parts=2, engine="dask")
    parts.convert_parts(config, ["convert", "folder", "--parts", "2"])
    assert len(open_store(out, "train")) == 24


def test_a_worker_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    outcome = run_task(Task(1, ("true",), str(tmp_path / "elsewhere")))
    assert outcome.code == 1 and "workers need the same files" in outcome.error
    assert not outcome.is_lost


def test_time_and_memory_are_measured(tmp_path: Path) -> None:
    script = "import time; x = bytearray(200 << 20); time.sleep(.2)"
    outcome = run_task(Task(1, (sys.executable, "-c", script), str(tmp_path)))
    assert outcome.code == 0 and outcome.seconds > 0.2 and outcome.megabytes > 200


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine": "dask"}, "--engine dask makes parts: say how many by --parts"),
        ({"parts": 3, "part": "1/3"}, "--part is one of --parts"),
        ({"parts": -1}, "parts must be 0 to 99999, not -1"),
        ({"engine": "spark", "parts": 2}, "engine must be local, slurm, ray, dask, not 'spark'"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        ConvertConfig(**settings)


@pytest.mark.parametrize("engine", ["dask", "ray", "slurm"])
def test_an_engine_that_is_not_there_is_one_line(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    config = ConvertConfig(engine=engine, parts=2)  # type: ignore[arg-type]
    with pytest.raises(FastSiamError, match=rf"fastsiam\[{engine}\]|no sbatch here"):
        engine_of(config, tmp_path)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster() as found:
        yield found


@pytest.mark.slow
def test_slurm_itself(slurm: Cluster, images: Path, tmp_path: Path) -> None:
    """Two nodes of the real program; one part is bad at first."""
    out = tmp_path / "out"
    asked = ["--source", str(images), "--out", str(out), "--parts", "3", "--engine", "slurm"]
    how: dict[str, Any] = {"environment": {**slurm.environment, "PYTHONPATH": str(ROOT)}}
    done = fastsiam("convert", "folder", *asked, "--engine-options", "--partition=low", **how)
    assert len(re.findall(r"^part \d of 3 is made on \S+; \d of 3$", done.stderr, re.M)) == 3
    assert len(open_store(out, "train")) == 24
    done = fastsiam("convert", "folder", *asked, "--engine-options", "--nonsense", code=1, **how)
    assert "error: sbatch refuses the job: " in done.stderr
