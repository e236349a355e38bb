"""A stopped conversion resumes, or starts over where it has to.

Whatever happens to its unfinished files, the finished file has the same bytes.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from fastsiam import cli
from fastsiam.config import ConvertConfig
from fastsiam.errors import DataError
from fastsiam.pipelines.convert import convert, writer
from fastsiam.pipelines.convert.journal import Block
from fastsiam.pipelines.store import BetonStore, FolderStore, beton
from tests.configs import RecordingConsole
from tests.conftest import write_images
from tests.conversions import assert_same_images, find_problems, run, stub_raising
from tests.processes import Forked, wait_until
from tests.sources import jpeg
from tests.tiers import rest_slow


def convert_in_two_parts(source: Path, out: Path, workers: int) -> None:
    """Convert; blocks after the first ten are only finished once the file ``all-sent`` exists."""
    writer.BLOCK_BYTES = 20_000
    write = writer.Job.write_block

    def write_late(job: writer.Job, task: Any) -> Block:
        block, (number, _) = write(job, task), task
        while number >= 10 and not out.with_name("all-sent").exists():
            time.sleep(0.02)
        return block

    writer.Job.write_block = write_late  # type: ignore[assignment, method-assign]
    sys.argv = ["fastsiam", "convert", "folder", "--source", str(source), "--out", str(out)]
    sys.argv += ["--workers", str(workers)]
    cli.main()


@pytest.mark.parametrize("number", rest_slow([signal.SIGKILL, signal.SIGTERM]))
def test_interrupted_conversion_resumes_with_same_bytes(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL hits only the parent. Ctrl-C and a scheduler's SIGTERM hit the workers too.

    The file equals that of an uninterrupted conversion with another number of workers.
    """
    write_images(tmp_path / "images", classes=3, each=60, side=60)
    out = tmp_path / "out"
    process = Forked(convert_in_two_parts, tmp_path / "images", out, 2, session=True)
    journal = out / "train.beton.journal"
    wait_until(process, lambda: journal.exists() and journal.read_bytes().count(b"\n") > 5)
    if number == signal.SIGKILL:
        process.send(number)
    else:
        os.killpg(process.pid, number)
    (tmp_path / "all-sent").touch()
    with journal.open("a") as file:  # workers hold the lock too, until their last output
        fcntl.flock(file, fcntl.LOCK_EX)
    result = process.wait(60)
    errors = result.stderr
    assert result.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    if number != signal.SIGKILL:
        assert errors.splitlines()[-1] == "stopped; run the same command again to resume"
    assert "Traceback" not in errors and not (out / "train.beton").exists()
    assert (out / "train.beton.partial").exists()
    process = Forked(convert_in_two_parts, tmp_path / "images", out, 3, session=True)
    result = process.wait(120)
    errors = result.stderr
    assert result.returncode == 0, errors
    assert "resuming train.beton: " in errors
    resumed_images = int(errors.split("resuming train.beton: ")[1].split(" ")[0])
    assert 20 < resumed_images < 180
    monkeypatch.setattr(writer, "BLOCK_BYTES", 20_000)
    (straight,) = run("folder", tmp_path / "images", tmp_path / "straight")
    assert (out / "train.beton").read_bytes() == straight.path.read_bytes()
    assert find_problems(out) == []


@contextlib.contextmanager
def interrupt_after(blocks: int) -> Iterator[None]:
    """Interrupt conversions in the block when ``blocks`` blocks are written, and end the block."""
    line, numbers = Block.line, itertools.count()

    def stopping(block: Block) -> bytes:
        if next(numbers) == blocks:
            raise KeyboardInterrupt
        return line(block)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(Block, "line", stopping)
        yield


def resumed(source: Path, out: Path, **options: Any) -> str:
    """Convert; return the only message, which says if the conversion was resumed."""
    console = RecordingConsole()
    convert("folder", ConvertConfig(source=str(source), out=str(out), **options), console)
    (message,) = console.lines
    return message


def is_image(path: Any) -> bool:
    return not isinstance(path, int) and os.fsdecode(path).endswith(".jpg")


def test_when_conversion_resumes_or_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BLOCK_BYTES", 10_000)
    source, out = tmp_path / "images", tmp_path / "out"
    write_images(source, classes=3, each=100, side=60)
    with interrupt_after(20):
        run("folder", source, out)
    for other in ("options", "source", "version"):
        shutil.copytree(out, tmp_path / other)
    partial, journal = out / "train.beton.partial", out / "train.beton.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    data = bytearray(partial.read_bytes())
    data[Block.parse(lines[2]).start + 100] ^= 1  # in the second block
    partial.write_bytes(data)
    journal.write_bytes(b"".join(lines) + lines[-1][:50])  # and the last line is torn
    with pytest.raises(ValueError, match="does not match its checksum"):
        Block.parse(lines[2].replace(b"A", b"B", 1))
    with monkeypatch.context() as patch:
        stat, fail = os.stat, stub_raising(errno.EIO)
        patch.setattr(os, "stat", lambda x, **y: (fail if is_image(x) else stat)(x, **y))
        with pytest.raises(DataError, match=r"cannot read .*\.jpg: Input/output error; "):
            resumed(source, out)
    assert int(resumed(source, out).split(": ")[1].split(" ")[0]) < 20
    assert find_problems(out) == []
    assert_same_images(BetonStore(out / "train.beton"), FolderStore(source))
    over = "starting train.beton over: the source, the options or the version"
    assert resumed(source, tmp_path / "options", quality=80).startswith(over)
    old = tmp_path / "version" / "train.beton.journal"  # when damaged JPEGs passed the check
    old.write_bytes(old.read_bytes().replace(b', "checks": 1', b""))
    assert resumed(source, tmp_path / "version").startswith(over)
    (source / "class1" / "000.jpg").write_bytes(jpeg(5))
    assert resumed(source, tmp_path / "source").startswith(over)
    assert find_problems(tmp_path / "source") == []


def test_concurrent_conversion_is_rejected(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network shares answer EACCES, not EAGAIN. A file system without locks is a warning."""
    out, in_use = tmp_path / "out", r"another conversion is writing train\.beton"
    out.mkdir()
    with (out / "train.beton.journal").open("w") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=in_use):
            run("folder", images, out)
    monkeypatch.setattr(fcntl, "flock", stub_raising(errno.EACCES))
    with pytest.raises(DataError, match=in_use):
        run("folder", images, out)
    monkeypatch.setattr(fcntl, "flock", stub_raising(errno.ENOLCK))
    console = RecordingConsole()
    convert("folder", ConvertConfig(source=str(images), out=str(out)), console)
    message = "train.beton.journal cannot be locked (No locks available); make sure"
    assert message in console.warnings[0]


# Conversions that are stopped and damaged at random.


SHARE = st.floats(0, 1, exclude_max=True)


@cache
def source_and_file() -> tuple[Path, bytes]:
    """Return images, and the file that an undisturbed conversion makes of them."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    source = write_images(folder / "images", classes=2, each=12, side=30)
    (straight,) = run("folder", source, folder / "straight", workers=1)
    return source, straight.path.read_bytes()


class Conversion(RuleBasedStateMachine):
    """A conversion that is stopped, and whose unfinished files are damaged."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(writer, "BLOCK_BYTES", 4_000)
        self.source, self.expected = source_and_file()
        self.folder = Path(tempfile.mkdtemp())
        self.out = self.folder / "out"
        self.file = self.out / "train.beton"
        self.partial = self.out / "train.beton.partial"
        self.journal = self.out / "train.beton.journal"

    @rule(blocks=st.integers(0, 8))
    def stop_after(self, blocks: int) -> None:
        """Convert until some blocks are written; if there are fewer, the conversion ends."""
        with interrupt_after(blocks):
            self.finish()
            return
        assert not self.file.exists()

    @rule()
    def finish(self) -> None:
        run("folder", self.source, self.out, workers=1)
        assert self.file.read_bytes() == self.expected
        shutil.rmtree(self.out)

    def is_unfinished(self) -> bool:
        return self.journal.exists() and self.partial.exists()

    @precondition(is_unfinished)
    @rule(of_journal=st.booleans(), share=SHARE, bit=st.integers(0, 7))
    def flip_bit(self, of_journal: bool, share: float, bit: int) -> None:
        path = self.journal if of_journal else self.partial
        data = bytearray(path.read_bytes())
        if data:
            data[int(share * len(data))] ^= 1 << bit
            path.write_bytes(data)

    @precondition(is_unfinished)
    @rule(of_journal=st.booleans(), share=SHARE)
    def truncate(self, of_journal: bool, share: float) -> None:
        path = self.journal if of_journal else self.partial
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])

    @precondition(is_unfinished)
    @rule(of_journal=st.booleans())
    def delete(self, of_journal: bool) -> None:
        (self.journal if of_journal else self.partial).unlink()

    @precondition(is_unfinished)
    @rule(tail=st.binary(max_size=60))
    def tear_last_line(self, tail: bytes) -> None:
        self.journal.write_bytes(self.journal.read_bytes() + tail)

    def teardown(self) -> None:
        self.finish()
        self.patch.undo()
        shutil.rmtree(self.folder)


TestConversion: Any = Conversion.TestCase
TestConversion.settings = settings(max_examples=4, stateful_step_count=8)


def test_bits_flipped_between_images_do_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are gaps before the first image and at the ends of pages, here of 2 KiB."""
    monkeypatch.setattr(writer, "BLOCK_BYTES", 4_000)
    monkeypatch.setattr(beton, "_SMALLEST_PAGE", 2**11)
    source, _ = source_and_file()
    (straight,) = run("folder", source, tmp_path / "straight", workers=1)
    store = BetonStore(straight.path)
    ends = store.start + store.size
    gaps = [int(store.start[0]) - 1, *ends[:-1][ends[:-1] < store.start[1:]].tolist()]
    assert len(gaps) > 2
    for number, gap in enumerate(gaps[:3]):
        out = tmp_path / f"flipped-{number}"
        with interrupt_after(4):
            run("folder", source, out, workers=1)
        data = bytearray((out / "train.beton.partial").read_bytes())
        data[gap] ^= 1
        (out / "train.beton.partial").write_bytes(data)
        (resumed,) = run("folder", source, out, workers=1)
        assert resumed.path.read_bytes() == straight.path.read_bytes(), gap
