"""A loader that is closed, or that nobody closed, leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fastsiam.config import DataConfig
from fastsiam.pipelines import build_eval_loader
from tests.conftest import ROOT
from tests.pipelines import left_open
from tests.pipelines.cases import (
    PIPELINES,
    SMALL,
    THREADED,
    build,
    ended,
    first,
    readable,
    threads,
)

CASES = [
    pytest.param(kind, *name.values, marks=name.marks)
    for kind in left_open.KINDS
    for name in PIPELINES
    if name.values != ("synthetic",) or kind != "trained"  # whose epoch is as long as ImageNet's
]


@pytest.mark.parametrize("name", THREADED)
def test_closing_in_mid_epoch_ends_the_threads(name: str, images: Path) -> None:
    """And the epoch that was under way; more than once does no harm."""
    first(build(name, images / "train", batch=4, workers=3))  # what the library keeps for ever
    before = threads()
    loader = build(name, images / "train", batch=4, workers=3)
    batches = loader.epoch(0)
    next(batches)
    own = threads() - before
    assert len(own) >= 3
    loader.close()
    loader.close()
    assert ended(own)
    assert list(batches) == []


@pytest.mark.parametrize("name", THREADED)
def test_breaking_off_an_evaluation_ends_the_threads(name: str, images: Path) -> None:
    data = DataConfig(data=str(readable(name, images / "train")), pipeline=name, workers=3)  # type: ignore[arg-type]
    loader = build_eval_loader(data, "train", SMALL, resize=20, batch=2)
    next(iter(loader))  # what the library keeps for ever
    before = threads()
    batches = iter(loader)
    next(batches)
    own = threads() - before
    assert len(own) >= 3
    del batches
    assert ended(own)


def end_with(*cases: tuple[str, str], images: Path) -> tuple[int, str, str]:
    """Run a program that leaves loaders open; return its exit code and what it said."""
    arguments = [
        text for kind, name in cases for text in (kind, name, str(readable(name, images / "train")))
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.pipelines.left_open", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.dali
@pytest.mark.ffcv
def test_loaders_that_nobody_closed_do_not_keep_the_program(images: Path) -> None:
    """Exceptions skip close(): the interpreter still has to end, workers and all, without a word.

    One program with a loader of every kind and pipeline: each of them alone would keep it.
    """
    cases = [(str(kind), str(name)) for kind, name in (case.values for case in CASES)]
    assert end_with(*cases, images=images) == (left_open.CODE, "", "")
