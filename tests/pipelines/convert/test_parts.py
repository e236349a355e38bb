"""Conversion in parts with dask writes the same bytes, whichever process is killed meanwhile."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fastsiam.config import ConvertConfig
from fastsiam.errors import FastSiamError
from fastsiam.pipelines.convert import parts, writer
from fastsiam.pipelines.store import open_store
from tests.conftest import import_or_skip, write_images
from tests.conversions import run
from tests.data_formats import write_converted_parts
from tests.processes import command, fastsiam, wait_until
from tests.sources import folder_members
from tests.tiers import rest_slow


@pytest.fixture(autouse=True)
def _forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make dask fork its workers in the tests' commands."""
    monkeypatch.setenv("DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD", "fork")
    import_or_skip("distributed", "dask")


def test_parts_option_writes_same_files_as_part_option(images: Path, tmp_path: Path) -> None:
    """An error ends only its part, existing parts are not converted again, dask is not recorded.

    dask's dashboard does not need its usual port, which another conversion may have.
    """
    bad = images / "train" / "class0" / "004.jpg"
    bad.write_bytes(bad.read_bytes()[:300])
    by_hand, out = tmp_path / "by-hand", tmp_path / "out"
    for number in (1, 2):
        (train, _) = run("folder", images, by_hand, part=f"{number}/2", skip_bad=True)
        assert not {"parts", "scheduler"} & train.about["options"].keys()
    arguments = ["convert", "folder", "--source", str(images), "--out", str(out), "--parts", "2"]
    with socket.socket() as other:
        with contextlib.suppress(OSError):  # another test's cluster may have the port
            other.bind(("", 8787))
            other.listen()
        result = fastsiam(*arguments, code=1)
    assert "8787" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert re.fullmatch(r"error: part 1 of 2: .* 1 of 2 parts are missing; run the same .*", last)
    assert re.search(r"^part 1: \S*class0/004\.jpg: ", result.stderr, re.M)
    second = out / "train-00002-of-00002.beton"
    assert [*out.glob("train*.beton")] == [second]
    before = second.stat().st_mtime_ns
    result = fastsiam(*arguments, "--skip-bad")
    assert f"2 parts in {out} are one data set: use it with --data " in result.stdout
    assert len(re.findall(r"^part \d of 2 is done$", result.stderr, re.M)) == 2, result.stderr
    assert second.stat().st_mtime_ns == before
    assert "Nanny" not in result.stderr and "scheduler" not in result.stderr
    assert dict(folder_members(out)) == dict(folder_members(by_hand))
    assert len(open_store(out, "train")) == 23 and len([*out.iterdir()]) == 6


def test_scheduler_option_uses_running_workers(images: Path, tmp_path: Path) -> None:
    import distributed

    by_hand, out = tmp_path / "by-hand", tmp_path / "out"
    write_converted_parts(images, by_hand)
    start_cluster: Any = distributed.LocalCluster  # it has no types
    options = {"dashboard_address": None, "silence_logs": logging.CRITICAL}
    with start_cluster(n_workers=2, threads_per_worker=1, **options) as cluster:
        arguments = ["convert", "folder", "--source", str(images), "--out", str(out)]
        address = cluster.scheduler_address
        result = fastsiam(*arguments, "--parts", "2", "--scheduler", address)
        assert cluster.scheduler.task_prefixes["run_part"].state_counts["memory"] == 2
    assert f"connecting to the dask scheduler at {address}" in result.stderr
    assert dict(folder_members(out)) == dict(folder_members(by_hand))


KILL_WORKER = """
import itertools, os, pathlib, signal, sys, time
from fastsiam.cli import main
from fastsiam.pipelines.convert import writer

writer.BLOCK_BYTES = 4096
record, line, numbers = pathlib.Path(sys.argv.pop(1)), writer.Block.line, itertools.count()

def kill_at_second_block(block):
    if next(numbers) == 1 and not record.exists():
        record.write_text(str(os.getppid()))
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    return line(block)

writer.Block.line = kill_at_second_block
main()
"""
"""``fastsiam`` that kills its parent when its second block is written, before the journal lists it.
The parent's process ID is written to a file; if it exists, nothing is killed."""


def test_parts_of_killed_dask_worker_equal_those_of_one_process(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dask worker is killed in the middle of its part, which another worker resumes."""
    by_hand, out, record = tmp_path / "by-hand", tmp_path / "out", tmp_path / "killed"
    monkeypatch.setattr(writer, "BLOCK_BYTES", 4096)
    for number in (1, 2):
        (train, _) = run("folder", images, by_hand, part=f"{number}/2", workers=1)
        assert len(train.about["blocks"]) > 2
    command_of = parts._command
    monkeypatch.setattr(
        parts,
        "_command",
        lambda *part: (sys.executable, "-c", KILL_WORKER, str(record), *command_of(*part)[3:]),
    )
    config = ConvertConfig(source=str(images), out=str(out), parts=2)
    parts.convert_parts("folder", config, ["convert", "folder"])
    assert int(record.read_text()) != os.getpid()
    assert dict(folder_members(out)) == dict(folder_members(by_hand))


@pytest.mark.slow
def test_dask_retries_part_whose_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = tmp_path / "tries"
    script = f"import os; open({str(tries)!r}, 'a').write('x'); os.kill(os.getpid(), 9)"
    monkeypatch.setattr(parts, "_command", lambda *_: (sys.executable, "-c", script))
    failed = parts.run_by_dask(ConvertConfig(parts=1), [])
    assert failed[1] == "its process was killed (exit code -9)"
    assert tries.read_text() == "x" * (1 + parts._RETRIES)


@pytest.mark.parametrize("number", rest_slow([signal.SIGINT, signal.SIGTERM]))
def test_signal_stops_all_parts_and_command_resumes(number: signal.Signals, tmp_path: Path) -> None:
    write_images(tmp_path / "images", classes=2, each=1, side=900)
    for image in list((tmp_path / "images").rglob("*.jpg")):
        for copy in range(1, 30):
            shutil.copyfile(image, image.with_name(f"{copy:03d}.jpg"))
    arguments = ["convert", "folder", "--source", str(tmp_path / "images"), "--max-side", "64"]
    arguments += ["--out", str(tmp_path / "out"), "--parts", "2"]
    process = command(*arguments, session=True)
    wait_until(process, lambda: list((tmp_path / "out").glob("*.partial")))
    os.killpg(process.pid, number)
    result = process.wait(120)  # and for all processes that share its output
    assert result.returncode == 128 + number, result.stderr
    assert "the same command" in result.stderr.splitlines()[-1]
    fastsiam(*arguments)
    assert len(open_store(tmp_path / "out", "train")) == 60


def test_dask_workers_get_absolute_paths(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have been started with another FASTSIAM_DATA, or without one."""
    by_dask = Mock(return_value={1: "not made"})
    monkeypatch.setenv("FASTSIAM_DATA", str(images.parent))
    monkeypatch.setattr(parts, "run_by_dask", by_dask)
    images.rename(images.with_name("imagenet"))
    with pytest.raises(FastSiamError, match="part 1 of 2: not made; 1 of 2 parts are missing"):
        parts.convert_parts("imagenet", ConvertConfig(parts=2), ["convert", "imagenet"])
    out = f"{images.with_name('imagenet-beton')}"  # where a conversion without parts writes
    _, words = by_dask.call_args.args
    assert words == ["convert", "imagenet", "--source", str(images.parent), "--out", out]


def test_unreachable_dask_scheduler_is_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import dask
    import distributed

    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        dask.config.set({"distributed.comm.timeouts.connect": "200ms"}),
    ):
        for port in (1, silent.getsockname()[1]):
            address = f"tcp://127.0.0.1:{port}"
            with pytest.raises(FastSiamError, match=f"no dask scheduler answers at {address}"):
                parts.run_by_dask(ConvertConfig(parts=2, scheduler=address), [])
    # With a web server or an incomplete address, dask's client would fail a minute later, with a
    # traceback.
    with socket.create_server(("127.0.0.1", 0)) as server:
        web = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        threading.Thread(target=lambda: server.accept()[0].send(b"HTTP/1.1 400 No\r\n")).start()
        with pytest.raises(FastSiamError, match=rf"at {web} \(another kind of server does"):
            parts.run_by_dask(ConvertConfig(parts=2, scheduler=web), [])
    monkeypatch.setattr(distributed, "Client", None)
    with pytest.raises(FastSiamError, match=r"no dask scheduler answers at 127.0.0.1 \(missing"):
        parts.run_by_dask(ConvertConfig(parts=2, scheduler="127.0.0.1"), [])
    with (
        dask.config.set({"temporary-directory": "/dev/null/no"}),
        pytest.raises(FastSiamError, match=r"dask cannot start \(.*'/dev/null/no'"),
    ):
        parts.run_by_dask(ConvertConfig(parts=2), [])
    # This logger would print a traceback if the scheduler is lost later.
    assert not logging.getLogger("distributed.client").isEnabledFor(logging.ERROR)
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(FastSiamError, match=r"fastsiam\[dask\]"):
        parts.run_by_dask(ConvertConfig(parts=2), [])
