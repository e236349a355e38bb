"""A loader that is closed, or that nobody closed, leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from fastsiam.config import DataConfig, Pipeline
from fastsiam.pipelines import build_eval_loader
from tests.conftest import ROOT
from tests.pipelines import left_open
from tests.pipelines.cases import (
    SMALL,
    THREADED,
    build,
    ended,
    first,
    readable,
    threads,
)

CASES = [
    (kind, name)
    for kind in left_open.KINDS
    for name in get_args(Pipeline)
    if (kind, name) != ("trained", "synthetic")  # whose epoch is as long as ImageNet's
]


@pytest.mark.parametrize("name", THREADED)
def test_what_is_broken_off_ends_its_threads(name: str, images: Path) -> None:
    """A loader that is closed in mid-epoch, more than once; an evaluation that is left."""
    data = DataConfig(data=str(readable(name, images / "train")), pipeline=name, workers=3)  # type: ignore[arg-type]
    central = build_eval_loader(data, "train", SMALL, resize=20, batch=2)
    next(iter(central))  # what libraries keep for ever
    first(build(name, images / "train", batch=4, workers=3))
    before = threads()
    loader = build(name, images / "train", batch=4, workers=3)
    epoch = loader.epoch(0)
    next(epoch)
    own = threads() - before
    assert len(own) >= 3
    loader.close()
    loader.close()
    assert ended(own) and list(epoch) == []
    before = threads()
    batches = iter(central)
    next(batches)
    own = threads() - before
    assert len(own) >= 3
    del batches
    assert ended(own)


@pytest.mark.dali
@pytest.mark.ffcv
def test_loaders_that_nobody_closed_do_not_keep_the_program(images: Path) -> None:
    """Exceptions skip close(): the interpreter still has to end, workers and all, without a word.

    One program with a loader of every kind and pipeline: each of them alone would keep it.
    """
    arguments = [
        text for kind, name in CASES for text in (kind, name, str(readable(name, images / "train")))
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.pipelines.left_open", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stdout, done.stderr) == (left_open.CODE, "", "")
