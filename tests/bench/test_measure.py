"""What is timed is what was done, child processes included."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fastsiam.bench.measure import _cached_pages, cpu_seconds, drop_from_cache
from fastsiam.bench.records import Timing
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


def test_dropping_files_from_the_cache_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(2**20))
    assert 0 <= drop_from_cache([path]) <= 1
    path.read_bytes()
    with path.open("rb") as file:
        assert _cached_pages(file.fileno(), 2**20) == [1] * 256
