"""Loaders end their threads and processes, closed or not, and do not leak memory."""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import psutil
import pytest
import torch
from PIL import Image

from fastsiam.config import AugmentConfig, Pipeline
from fastsiam.errors import WorkerError
from tests.conftest import write_images
from tests.pipelines.cases import (
    GRAPH,
    THREADED,
    central,
    first,
    make_readable,
    marked,
    open_loader,
    same,
)
from tests.pipelines.conftest import Loaders
from tests.pipelines.dali_cases import skip_dali_checks
from tests.processes import Forked, python
from tests.sources import encoded

OPEN_LOADERS_SCRIPT = """
import sys
import numba, torch
from tests.pipelines.cases import central, open_loader

torch.set_num_threads(3)
threads = torch.get_num_threads(), numba.get_num_threads()
held, words = [], iter(sys.argv[1:])
for kind, name, data in zip(words, words, words):
    evaluates = kind == "evaluation"
    loader = (central if evaluates else open_loader)(name, data, batch=4, workers=2)
    batches = iter(loader) if evaluates else loader.epoch(0)
    next(batches)
    if kind == "trained":
        list(batches)
    held.append((loader, batches))  # Python would close what nobody holds
assert threads == (torch.get_num_threads(), numba.get_num_threads())
sys.exit(7)
"""
"""A program that exits with loaders open: mid-epoch, mid-evaluation or after an epoch.

Importing FFCV sets torch's and numba's thread counts to one, so they have to be restored.
"""
CASES = [("evaluation", "native")] + [
    (kind, name)
    for kind in ("training", "trained")
    for name in get_args(Pipeline)
    if (kind, name) != ("trained", "synthetic")  # its epoch is as long as ImageNet's
]
_M_MMAP_THRESHOLD = -3


def list_threads() -> set[int]:
    return set(map(int, os.listdir("/proc/self/task")))


def have_ended(some: set[int]) -> bool:
    """Wait until these threads are gone: a joined thread stays listed for a moment."""
    limit = time.monotonic() + 60
    while some & list_threads():
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def without_openmp() -> Iterator[None]:
    """Keep torch from starting OpenMP threads, which persist and do not belong to a loader."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("without_openmp")
@pytest.mark.parametrize("name", THREADED)
def test_closed_loader_and_abandoned_evaluation_end_threads(
    name: str, images: Path, loaders: Loaders
) -> None:
    """A loader that is closed twice in mid-epoch; an evaluation that is abandoned."""
    crops = central(name, images / "train", batch=2, workers=3)
    next(iter(crops))  # starts the threads that libraries keep
    first(open_loader(name, images / "train", batch=4, workers=3))
    before = list_threads()
    loader = loaders(name, images / "train", batch=4, workers=3)
    epoch = loader.epoch(0)
    next(epoch)
    new_threads = list_threads() - before
    assert len(new_threads) >= 3
    loader.close()
    loader.close()
    assert have_ended(new_threads)
    with pytest.raises(RuntimeError, match="this loader is closed"):  # not a shorter epoch
        next(epoch)
    before = list_threads()
    batches = iter(crops)
    next(batches)
    new_threads = list_threads() - before
    assert len(new_threads) >= 3
    del batches
    assert have_ended(new_threads)


@pytest.mark.parametrize("name", marked("native", "torchvision", "dali"))
def test_loader_can_be_closed_while_another_thread_waits_for_a_batch(
    name: str, images: Path, loaders: Loaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for this batch, after which the iteration ends with an error."""
    loader = loaders(name, images / "train", batch=4, workers=1)
    views, is_waiting, go_on = loader._views, threading.Event(), threading.Event()
    outcomes: list[Any] = []

    def slow_views(*arguments: Any) -> Iterator[Any]:
        for batch in views(*arguments):
            is_waiting.set()
            go_on.wait(60)
            yield batch

    def iterate() -> None:
        try:
            for batch in loader.epoch(0):
                outcomes.append(batch)
        except RuntimeError as error:
            outcomes.append(str(error))

    monkeypatch.setattr(loader, "_views", slow_views)
    thread = threading.Thread(target=iterate, daemon=True)
    thread.start()
    assert is_waiting.wait(60)
    threading.Timer(0.1, go_on.set).start()
    loader.close()
    assert go_on.is_set()
    thread.join(60)
    assert len(outcomes) == 2 and outcomes[1] == "this loader is closed"


def test_loader_is_usable_after_keyboard_interrupt(
    images: Path, loaders: Loaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves torch's iterator half reset, and a notebook may use the same loader again."""

    loader: Any = loaders("torchvision", images / "train", workers=1)
    assert loader._loader.multiprocessing_context.get_start_method() == "fork"
    expected = list(loader.epoch(0))
    interrupted = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(loader._loader._iterator, "_get_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(loader.epoch(1))
    assert same(list(loader.epoch(0)), expected)


def test_loader_is_usable_after_killed_worker(images: Path, loaders: Loaders) -> None:
    loader: Any = loaders("torchvision", images / "train", batch=4, workers=2)
    expected = list(loader.epoch(0))
    epoch = loader.epoch(1)
    next(epoch)
    os.kill(loader._loader._iterator._workers[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="a worker process died"):
        list(epoch)
    assert same(list(loader.epoch(0)), expected)


@pytest.mark.parametrize("name", THREADED)
def test_loader_in_forked_process_is_rejected(name: str, images: Path) -> None:
    """It lacks the loader's threads. DALI's exit handler leaves the parent's pipelines alone."""
    result = Forked(use_loader_in_fork, name, images / "train").wait(120)
    assert (result.returncode, result.stderr) == (0, "")


def use_loader_in_fork(name: str, root: Path) -> None:
    loader = open_loader(name, make_readable(name, root), batch=4)
    running = loader.epoch(0)
    next(running)
    if not (child := os.fork()):
        signal.alarm(60)
        with pytest.raises(RuntimeError, match="opened before the process was forked"):
            next(loader.epoch(1))
        atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len([*running]) == 5


@pytest.mark.dali
def test_forked_process_does_not_collect_graphs_of_dali(images: Path) -> None:
    """Shutting down a graph whose threads exist only in the parent takes forever."""
    result = Forked(collect_in_fork, images / "train").wait(120)
    assert (result.returncode, result.stderr) == (0, "")


def collect_in_fork(root: Path) -> None:
    loader: Any = open_loader("dali", root, batch=4)
    list(loader.epoch(0))
    garbage = [loader._cropper._dali]
    garbage.append(garbage)  # only the garbage collector frees it
    loader.close()
    del garbage
    if not (child := os.fork()):
        signal.alarm(20)
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.dali
@pytest.mark.ffcv
def test_program_exits_with_open_loaders(images: Path) -> None:
    """Exceptions skip close(). The interpreter and workers must still exit, without output.

    One program opens a loader of every kind and pipeline: any of them could keep it from exiting.
    """
    arguments = [
        text
        for kind, name in CASES
        for text in (kind, name, str(make_readable(name, images / "train")))
    ]
    result = python(OPEN_LOADERS_SCRIPT, *arguments)
    assert (result.returncode, result.stdout, result.stderr) == (7, "", "")


@pytest.mark.alone
@pytest.mark.parametrize("name", marked(GRAPH, "ffcv"))
def test_memory_does_not_grow(name: str, tmp_path: Path) -> None:
    """Over complete epochs and as many abandoned ones. DALI fails in each of them.

    The first third of the 45 epochs is warm-up. The minima of the other two thirds are compared,
    because temporary allocations are not growth. They are 15 epochs, or 90 views, apart.
    """
    root = write_images(tmp_path / "train", each=16, side=160)
    if name == GRAPH:
        path = root / "class1" / "003.jpg"
        path.write_bytes(encoded(Image.open(path), "GIF"))
    result = Forked(print_sizes, name, make_readable(name, root)).wait()
    assert result.returncode == 0, result.stderr
    assert name != GRAPH or "DALI cannot decode" in result.stderr
    view, *sizes = json.loads(result.stdout)
    assert min(sizes[30:]) - min(sizes[15:30]) < 5 * view


def print_sizes(name: str, root: Path) -> None:
    """Print the bytes of a batch's view, and this process's resident memory after each epoch.

    DALI gets every image, like with the fixture ``trusting``.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**17)  # or glibc raises it as blocks are freed
    skip_dali_checks(pytest.MonkeyPatch())
    loader, sizes = open_loader(name, root, batch=16, augment=AugmentConfig.alike(crop=128)), []
    for epoch in range(45):
        for batch in loader.epoch(epoch):
            view = batch.view1.nbytes
        next(iter(loader.epoch(epoch)))
        sizes.append(psutil.Process().memory_info().rss)
    loader.close()
    print(json.dumps([view, *sizes]))
