"""Every reader survives corrupt files, and the fuzzer detects readers that do not."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from fastsiam.errors import FastSiamError
from tests.fuzz.run import Cases, fuzz
from tests.fuzz.targets import TARGETS, Target
from tests.tiers import slow


@pytest.mark.parametrize("cases", [40, slow(1000)])
@pytest.mark.parametrize("name", TARGETS)
def test_readers_handle_corrupt_files(name: str, cases: int, tmp_path: Path) -> None:
    """The readers must also read valid files, otherwise this would prove nothing."""
    assert fuzz(name, seed=1, first=0, count=cases) == {}
    Cases(TARGETS[name], tmp_path).read_whole()


PAST_FAILURES = {
    "bad images of a run": (87365,),
    "parquet": (235950,),
    "weights": (38813,),
    "weights pickle": (12670, 23580),
}
"""Cases of seed 0 that failed in the past."""


@pytest.mark.parametrize("name", PAST_FAILURES)
def test_past_failures_are_fixed(name: str, tmp_path: Path) -> None:
    cases = Cases(TARGETS[name], tmp_path)
    for number in PAST_FAILURES[name]:
        assert cases.run(range(number, number + 1)) == {}


def hang(folder: Path) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.2)  # instead of the 20 s limit of a case
    time.sleep(60)


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        (lambda _: os.kill(os.getpid(), signal.SIGSEGV), "ended by SIGSEGV"),
        (hang, "took longer than 20 s"),
        # large enough that malloc cannot serve it from free memory
        (lambda _: mmap.mmap(-1, 1 << 30), "takes more than 768 MB"),
        (lambda folder: (folder.parent / "elsewhere").write_text("x"), "Forbidden at"),
        (lambda _: os.system("true"), "Forbidden at"),
        (Mock(side_effect=FastSiamError("one\ntwo")), "is not one line"),
        (Mock(side_effect=ValueError("of nobody's contract")), "ValueError at"),
        (lambda folder: (folder / "kept").write_text("x"), ""),
    ],
)
def test_fuzzer_detects_forbidden_reader_behaviour(
    reader: Callable[[Path], object], message: str
) -> None:
    """It is detected in each of two cases, even if a case ends its process."""
    failures = fuzz(Target("x", lambda _: [b"whole"], reader), seed=0, first=7, count=2)
    assert list(failures) == ([7, 8] if message else [])
    assert all(message in one for one in failures.values()), failures
