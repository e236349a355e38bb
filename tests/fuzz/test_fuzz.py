"""Every reader survives damaged files; and what does not is noticed."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fastsiam.errors import FastSiamError
from tests.fuzz.run import fuzz
from tests.fuzz.targets import TARGETS, Target
from tests.tiers import slow


@pytest.mark.parametrize("cases", [40, slow(1000)])
@pytest.mark.parametrize("name", TARGETS)
def test_readers_bear_damaged_files(name: str, cases: int) -> None:
    found = fuzz(name, seed=1, first=0, count=cases)
    assert not found, "\n".join(map(str, found))


FOUND = {
    "arrow": (31023, 76379, 169997),
    "bad images of a run": (87365,),
    "checkpoint": (26385,),
    "checkpoint pickle": (27857,),
    "parquet": (2798, 10614, 25682, 27208, 47261, 99159, 107367, 235950),
    "settings in YAML": (3110, 45063),
    "tar index": (6137,),
    "weights": (38813,),
    "weights pickle": (12670, 23580),
}
"""Cases of seed 0 that went wrong once."""


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_mended(name: str) -> None:
    for number in FOUND[name]:
        assert fuzz(name, seed=0, first=number, count=1) == []


@pytest.mark.parametrize("name", TARGETS)
def test_whole_files_are_read(name: str, tmp_path: Path) -> None:
    """Or damaged ones would prove nothing."""
    target, folder = TARGETS[name], tmp_path / "case"
    (tmp_path / "made").mkdir()
    content = target.wrap(target.corpus(tmp_path / "made")[0])
    for place, whole in {**target.beside(tmp_path / "made"), target.place: content}.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes(whole)
    target.read(folder)


def crash(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(folder: Path) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.2)  # not the 20 s that a case has
    time.sleep(60)


def gorge(folder: Path) -> None:
    mmap.mmap(-1, 1 << 30)  # malloc may have so much that is free


def write_elsewhere(folder: Path) -> None:
    (folder.parents[2] / "elsewhere").write_text("x")


def write_here(folder: Path) -> None:
    (folder / "kept").write_text("x")


def start_a_program(folder: Path) -> None:
    os.system("true")


def say_two_lines(folder: Path) -> None:
    raise FastSiamError("one\ntwo")


def refuse(folder: Path) -> None:
    raise ValueError("of nobody's contract")


@pytest.mark.parametrize(
    ("reader", "said"),
    [
        (crash, "ended by SIGSEGV"),
        (hang, "took longer than 20 s"),
        (gorge, "takes more than 768 MB"),
        (write_elsewhere, "Forbidden at"),
        (start_a_program, "Forbidden at"),
        (say_two_lines, "is not one line"),
        (refuse, "ValueError at"),
        (write_here, ""),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_reader_may_not_do_is_noticed(reader: Callable[[Path], object], said: str) -> None:
    """In each of two cases, also where a case ends its process."""
    target = Target(lambda folder: [b"whole"], "x", reader)
    found = fuzz(target, seed=0, first=7, count=2)
    assert [one.number for one in found] == ([7, 8] if said else [])
    assert all(said in one.what for one in found), found
