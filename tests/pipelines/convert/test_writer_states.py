"""Whatever happens to an unfinished conversion, the finished file has the same bytes."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from fastsiam.pipelines.convert import writer
from fastsiam.pipelines.convert.journal import Block
from fastsiam.pipelines.store import BetonStore, beton
from tests.conftest import write_images
from tests.conversions import run

SHARE = st.floats(0, 1, exclude_max=True)


@cache
def source_and_file() -> tuple[Path, bytes]:
    """Return images, and the file that an undisturbed conversion makes of them."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    source = write_images(folder / "images", classes=2, each=12, side=30)
    (straight,) = run("folder", source, folder / "straight", workers=1)
    return source, straight.path.read_bytes()


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
