"""What is timed is what was done: in turns, child processes included."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastsiam.bench.measure import GpuWatch, cpu_seconds, forget
from fastsiam.bench.timing import Timing
from tests.bench.made import sample


def test_medians_and_spreads() -> None:
    timing = Timing([sample(1.0, 5.0), sample(4.0, 6.0), sample(2.0, 9.0)], images=10)
    assert (timing.median, timing.spread, timing.cpu, timing.rate) == (2.0, 0.75, 6.0, 5.0)


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


def test_forgetting_files_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(2**20))
    with path.open("rb") as file:
        file.read()
    share = forget([path])
    assert 0 <= share <= 1
    path.read_bytes()
    from fastsiam.bench.measure import _cached

    with path.open("rb") as file:
        assert _cached(file.fileno()) == (256, 256)  # what was read is there again


def test_a_gpu_is_watched_while_something_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that reports the JPEG engine, one that does not, and a machine without one."""
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for engine, expected in (("40", {"jpeg_engine_busy": 0.4}), ("[N/A]", {})):
        now = '"$(date +"%Y/%m/%d %H:%M:%S.%3N")'
        line = f'echo {now}, 80, {engine}"; echo {now}, 60, {engine}"; echo {now}"; echo 20'
        program.write_text(f"#!/bin/sh\n{line}; touch {tmp_path}/said; exec sleep 60\n")
        program.chmod(0o755)
        began = time.time() - 0.001  # milliseconds are cut
        with GpuWatch() as watch:
            while not (tmp_path / "said").exists():
                assert time.time() - began < 60
                time.sleep(0.01)
        ended = time.time()
        assert watch.shares([(began, ended)]) == {"gpu_busy": 0.7, **expected}
        assert watch.shares([(ended, ended + 1)]) == {}
        (tmp_path / "said").unlink()
    monkeypatch.setenv("PATH", "")
    with GpuWatch() as watch:
        pass
    assert watch.shares([(began, time.time())]) == {}
