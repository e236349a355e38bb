"""Conversions in parts, here and by dask: the same bytes, whatever is killed on the way."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fastsiam.config import ConvertConfig
from fastsiam.errors import FastSiamError
from fastsiam.pipelines.convert import convert, parts
from fastsiam.pipelines.store import open_store
from tests.conftest import skip, write_images
from tests.conversions import Quiet
from tests.processes import command, fastsiam
from tests.tiers import rest_slow

PARTS = 3


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def needs(engine: str) -> None:
    if engine == "dask" and find_spec("distributed") is None:
        skip("needs dask: pip install 'fastsiam[dask]'")


@pytest.mark.parametrize("engine", ["local", "dask"])
def test_the_parts_are_those_that_are_made_by_hand(
    engine: str, images: Path, tmp_path: Path
) -> None:
    needs(engine)
    by_hand, out = tmp_path / "by-hand", tmp_path / "out"
    for number in range(1, PARTS + 1):
        part = f"{number}/{PARTS}"
        convert("folder", ConvertConfig(source=str(images), out=str(by_hand), part=part), Quiet())
    asked = ["--source", str(images), "--out", str(out), "--parts", str(PARTS)]
    done = fastsiam("convert", "folder", *asked, "--engine", engine)
    assert f"{PARTS} parts in {out} are one data set: use it with --data " in done.stdout
    said = r"^part \d of 3 is made on \S+ in " if engine == "dask" else r"^part \d of 3$"
    assert len(re.findall(said, done.stderr, re.M)) == PARTS, done.stderr
    made = files(out)
    assert made.keys() == files(by_hand).keys() and len(made) == 3 * PARTS
    for name, content in files(by_hand).items():
        assert made[name] == content, name
    assert len(open_store(out, "train")) == 24


def test_they_are_those_of_a_conversion_without_engines(images: Path, tmp_path: Path) -> None:
    """The settings of the engines are not recorded: a conversion by --part is resumed."""
    out = tmp_path / "out"
    config = ConvertConfig(source=str(images), out=str(out), part="1/2")
    (train, _) = convert("folder", config, Quiet())
    assert not {"engine", "parts", "scheduler"} & train.about["options"].keys()
    before = files(out)
    fastsiam("convert", "folder", "--source", str(images), "--out", str(out), "--parts", "2")
    assert before.items() < files(out).items()


@pytest.mark.parametrize(("whom", "times"), rest_slow([("os.getppid()", 1), ("os.getpid()", 9)]))
def test_dask_restarts_a_part_that_is_killed(
    whom: str,
    times: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its worker is killed at the first try, or its own process at every one."""
    needs("dask")
    tried = tmp_path / "tried"
    script = (
        f"import os, pathlib, time; tried = pathlib.Path({str(tried)!r})\n"
        f"with tried.open('a') as file: file.write('x')\n"
        f"if len(tried.read_text()) <= {times}: os.kill({whom}, 9); time.sleep(600)\n"
    )
    monkeypatch.setattr(parts, "_command", lambda *_: (sys.executable, "-c", script))
    failed = parts._by_dask(ConvertConfig(engine="dask", parts=1), [])
    said = capfd.readouterr().err
    if times == 1:
        assert not failed and "part 1 of 1 is made on " in said
        assert tried.read_text() == "xx"
    else:
        assert re.fullmatch(r"its process on \S+ was killed \(exit code -9\)", failed[1])
        assert tried.read_text() == "x" * (1 + parts._RETRIES)


@pytest.mark.parametrize("engine", rest_slow(["local", "dask"]))
def test_an_error_ends_a_part_alone(engine: str, images: Path, tmp_path: Path) -> None:
    """The others are made; the error is that of a conversion here, and the same command resumes."""
    needs(engine)
    bad = images / "train" / "class0" / "004.jpg"
    bad.write_bytes(bad.read_bytes()[:300])
    out = tmp_path / "out"
    asked = ["convert", "folder", "--source", str(images), "--out", str(out), "--parts", "2"]
    asked += ["--engine", engine]
    done = fastsiam(*asked, code=1)
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(r"error: part 1 of 2: .* 1 of 2 parts are missing, and the same .*", last)
    assert re.search(r"^(part 1: )?\S*class0/004\.jpg: ", done.stderr, re.M)
    assert [path.name for path in out.glob("train*.beton")] == ["train-00002-of-00002.beton"]
    fastsiam(*asked, "--skip-bad")
    assert len(open_store(out, "train")) == 23


@pytest.mark.parametrize(
    ("engine", "number"),
    rest_slow([("dask", signal.SIGINT), ("local", signal.SIGINT), ("dask", signal.SIGTERM)]),
)
def test_a_signal_ends_all_and_the_same_command_resumes(
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
    assert "the same command" in done.stderr.splitlines()[-1]
    fastsiam(*asked)
    assert len(open_store(tmp_path / "out", "train")) == 60


def test_workers_are_told_where_the_data_are(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have been started with another FASTSIAM_DATA, or none."""
    asked: list[str] = []

    def by_dask(_: ConvertConfig, words: list[str]) -> dict[int, str]:
        asked.extend(words)
        return {1: "not made"}

    monkeypatch.setenv("FASTSIAM_DATA", str(images))
    monkeypatch.setattr(parts, "_by_dask", by_dask)
    with pytest.raises(FastSiamError, match="part 1 of 2: not made; 1 of 2 parts are missing"):
        parts.convert_parts("folder", ConvertConfig(parts=2, engine="dask"), ["convert", "folder"])
    assert asked == ["convert", "folder", "--source", str(images), "--out", f"{images}-beton"]


def test_a_worker_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    result = parts.run_part(("true",), str(tmp_path / "elsewhere"))
    assert "workers need the same files" in result.error


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine": "dask"}, "--engine dask needs --parts"),
        ({"parts": 2, "scheduler": "tcp://x:1"}, "--scheduler needs --engine dask"),
        ({"parts": 3, "part": "1/3"}, "give --part or --parts, not both"),
        ({"parts": -1}, "parts must be at least 0 and at most 99999, not -1"),
        ({"engine": "slurm", "parts": 2}, "engine must be one of local, dask, not 'slurm'"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        ConvertConfig(**settings)


def test_dask_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ConvertConfig(engine="dask", parts=2, scheduler="tcp://127.0.0.1:1")
    if find_spec("distributed") is not None:
        import dask

        with (
            dask.config.set({"distributed.comm.timeouts.connect": "1s"}),
            pytest.raises(FastSiamError, match=r"no dask scheduler answers at tcp://127.0.0.1:1"),
        ):
            parts._by_dask(config, [])
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(FastSiamError, match=r"fastsiam\[dask\]"):
        parts._by_dask(config, [])
