"""Measurements are made as they say: in turns, on the same images, after cleaning up."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fastsiam.bench import loader
from fastsiam.bench.convert import measure, table
from fastsiam.bench.measure import Timing, cpu_seconds, in_turns

from .conftest import write_images
from .sources import encoded, picture


def test_work_is_done_in_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    work = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    timings = in_turns(work, repeats=3, before=lambda: calls.append("-"))
    assert "".join(calls) == "-a-b" * 4
    assert [len(timing.wall) for timing in timings.values()] == [3, 3]


def test_medians_and_spreads() -> None:
    timing = Timing(wall=[1.0, 4.0, 2.0], cpu=[0.0, 0.0, 0.0])
    assert timing.median == 2.0 and timing.spread == 0.75


@pytest.mark.ffcv
def test_conversion_beside_cp_and_ffcv(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", classes=2, each=5)
    record = measure(images, copies=2, repeats=2)
    assert find_spec("ffcv") and list(record["results"]) == ["cp", "fastsiam", "ffcv"]
    assert record["images"] == 20 and record["stored"] == {"unchanged": 20}
    ours, theirs = record["results"]["fastsiam"], record["results"]["ffcv"]
    assert ours["images_per_second"] == pytest.approx(20 / ours["seconds"])
    assert theirs["fastsiam_is_times_as_fast"] == theirs["seconds"] / ours["seconds"]
    assert min(ours["cpu_seconds_per_image"], theirs["cpu_seconds_per_image"]) > 0
    assert len(ours["all_seconds"]) == record["n"] == 2
    assert record["environment"]["packages"]["torch"] and "fastsiam" in table(record)
    assert len(list(images.rglob("*.jpg"))) == 10  # nothing is left behind


def test_a_tar_is_measured_without_ffcv(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", classes=2, each=3)
    (images / "class0" / "gray.jpg").write_bytes(encoded(picture(0).convert("L")))
    record = measure(images, copies=2, as_tar=True, repeats=1)
    assert list(record["results"]) == ["cp", "fastsiam"]
    assert record["images"] == 12 and record["stored"] == {"unchanged": 12}


def test_processor_time_of_living_children_counts() -> None:
    before = cpu_seconds()
    script = (
        "import sys, time\nwhile time.process_time() < 0.5: pass\n"
        "print(flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout and child.stdin
        child.stdout.readline()
        assert cpu_seconds() - before > 0.4
        child.stdin.close()


@pytest.mark.ffcv
@pytest.mark.dali
def test_all_pipelines_are_measured_on_the_same_images(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", classes=2, each=6, side=40)
    record = loader.measure(images, copies=2, crop=16, batch=5, workers=1, repeats=2)
    names = [result["name"] for result in record["results"]]
    assert len(names) == len(set(names)) and record["images"] == 20
    for what in ("ffcv crops", "ffcv views", "dali crops", "dali views", "memory views"):
        assert {what, f"{what}, pixels 256"} <= set(names)
    by_name = {result["name"]: result for result in record["results"]}
    baseline = by_name[loader.BASELINE]
    assert baseline["ratio_to_torchvision"] == 1
    ours = by_name["ffcv views"]
    assert ours["ratio_to_torchvision"] == pytest.approx(
        ours["images_per_second"] / baseline["images_per_second"]
    )
    decode = by_name["libjpeg-turbo decode"]
    assert decode["share_of_ceiling"] == 1 and by_name["memory views"]["share_of_ceiling"] is None
    assert ours["share_of_ceiling"] == pytest.approx(
        ours["images_per_second"] / decode["images_per_second"]
    )
    assert len(ours["all_seconds"]) == 2
    assert "| ffcv views |" in loader.table(record)
