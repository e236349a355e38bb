"""What is timed is what was done, child processes included."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastsiam.bench.measure import GpuWatch, cpu_seconds
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


@pytest.mark.parametrize(("engine", "expected"), [("40", {"jpeg_engine_busy": 0.4}), ("[N/A]", {})])
def test_a_gpu_is_watched_while_something_runs(
    engine: str, expected: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that reports the JPEG engine, and one that does not; the last line is cut."""
    program, said = tmp_path / "nvidia-smi", tmp_path / "said"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    now = '"$(date +"%Y/%m/%d %H:%M:%S.%3N")'
    lines = f'echo {now}, 80, {engine}"; echo {now}, 60, {engine}"; echo {now}"; echo 20'
    program.write_text(f"#!/bin/sh\n{lines}; touch {said}; exec sleep 60\n")
    program.chmod(0o755)
    began = time.time() - 0.001  # milliseconds are cut
    with GpuWatch() as watch:
        while not said.exists():
            assert time.time() - began < 60
            time.sleep(0.01)
    ended = time.time()
    assert watch.shares([(began, ended)]) == {"gpu_busy": 0.7, **expected}
    assert watch.shares([(ended, ended + 1)]) == {}
